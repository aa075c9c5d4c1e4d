"""Tables and charts of the notebooks: what is drawn is what was given, in every form."""

import xml.etree.ElementTree as ET

import pytest

from refimpl.bench.show import chart, short, table

LINES = {"measured <1>": [(1, 10), (10, 100), (100, 1000)], "prefill": [(50, 400)]}
SVG = "{http://www.w3.org/2000/svg}"


def drawn(**options):
    return ET.fromstring(chart("A & B", LINES, x="batch", y="tokens/s", **options).svg())


def test_a_table_is_markdown_and_figures_are_flush_right():
    shown = str(table(["name", "count", "what"], [["a|b", 1, "x"], ["c", "2.5%", "y"]]))
    assert shown == "| name | count | what |\n| --- | ---: | --- |\n| a\\|b | 1 | x |\n| c | 2.5% | y |"
    assert table(["a"], [])._repr_markdown_() == "| a |\n| --- |"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a row has 1 cells under a head of 2"):
        table(["a", "b"], [["1"]])


@pytest.mark.parametrize("log", [False, True])
def test_a_drawing_has_every_point_every_name_and_stays_within_its_plot(log):
    svg = drawn(log_x=log, log_y=log, dots=("prefill",))
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert {"A & B", "batch", "tokens/s", "measured <1>", "prefill"} <= set(texts)
    assert len(list(svg.iter(f"{SVG}circle"))) == 4
    [line] = svg.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert points == sorted(points), "x grows to the right"
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True), "and y upwards"
    assert all(76 <= x <= 630 and 40 <= y <= 348 for x, y in points)


def test_equal_ratios_are_equally_far_apart_on_logarithmic_axes():
    [line] = drawn(log_x=True, log_y=True, dots=("prefill",)).iter(f"{SVG}polyline")
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in line.get("points").split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)


def test_axes_have_a_few_round_ticks():
    for log in (False, True):
        for high in (0.003, 7, 40, 5e3, 3e9):
            svg = ET.fromstring(chart("t", {"a": [(high / 900, 1), (high, 2)]}, x="x", y="y", log_x=log).svg())
            marks = [text for text in svg.iter(f"{SVG}text") if text.get("y") == "365"]
            assert 2 <= len(marks) <= 10, (log, high)


def test_a_constant_line_can_be_drawn():
    for log in (False, True):
        chart("t", {"a": [(1, 0.5), (2, 0.5)], "b": [(1, 0.5)]}, x="x", y="y", log_y=log).svg()


def test_the_interactive_form_is_a_figure_of_plotly_with_the_same_points():
    figures = pytest.importorskip("plotly.graph_objects")
    bundle = chart("t", LINES, x="x", y="y", log_x=True, dots=("prefill",))._repr_mimebundle_()
    assert list(bundle) == ["application/vnd.plotly.v1+json", "image/svg+xml", "text/plain"]
    figure = figures.Figure(bundle["application/vnd.plotly.v1+json"])
    assert [list(zip(trace.x, trace.y, strict=True)) for trace in figure.data] == list(LINES.values())
    assert [trace.mode for trace in figure.data] == ["lines+markers", "markers"]
    assert figure.layout.xaxis.type == "log"


def test_long_numbers_are_shortened():
    assert [short(v) for v in (0, 0.25, 5_000, 40_000, 2.5e6, 3e9)] == ["0", "0.25", "5000", "40k", "2.5M", "3G"]
