"""The palette: its colours can be told apart by all eyes, its texts can be read, and the style sheet says the same."""

import itertools
import re
from pathlib import Path

import pytest

import refimpl.visualizers.palette as palette_module
from refimpl.visualizers.palette import DARK, LIGHT, hue, luminance, mix, on
from refimpl.visualizers.sequence_state import NEUTRAL, NUM_HUES

THEMES = pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])

# Machado, Oliveira and Fernandes 2009, severity 1.0: from linear RGB as it is to linear RGB as it is seen.
VISIONS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TO_LMS = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def linear(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]


def oklab(rgb):
    return times(TO_LAB, [v ** (1 / 3) for v in times(TO_LMS, rgb)])


def seen(colour, vision):
    """A colour in OKLab as it is seen; what a screen cannot show is cut off."""
    return oklab([min(1.0, max(0.0, v)) for v in times(VISIONS[vision], linear(colour))])


def distance(a, b, vision):
    return sum((x - y) ** 2 for x, y in zip(seen(a, vision), seen(b, vision), strict=True)) ** 0.5


def contrast(a, b):
    high, low = sorted((luminance(a) + 0.05, luminance(b) + 0.05), reverse=True)
    return high / low


def told_apart(palette):
    return [palette[f"h{i}"] for i in range(NUM_HUES)] + [palette["signal"], palette["cached"]]


def test_the_measure_knows_white_black_and_grey():
    assert oklab([1, 1, 1]) == pytest.approx([1, 0, 0], abs=1e-6)
    assert distance("#000000", "#ffffff", "normal") == pytest.approx(1, abs=1e-6)
    for vision in VISIONS:  # greys are greys to all
        assert seen("#808080", vision) == pytest.approx(seen("#808080", "normal"), abs=1e-4)
    assert distance("#dc3018", "#2c8164", "deuteranopia") < distance("#dc3018", "#2c8164", "normal")


@THEMES
@pytest.mark.parametrize("vision", VISIONS)
def test_hues_signal_and_cached_grey_differ(palette, vision):
    least = min(distance(a, b, vision) for a, b in itertools.combinations(told_apart(palette), 2))
    assert least >= 0.08


@THEMES
@pytest.mark.parametrize("vision", VISIONS)
def test_the_ninth_hue_differs_from_all(palette, vision):
    assert min(distance(hue(palette, NEUTRAL), other, vision) for other in told_apart(palette)) >= 0.069


@THEMES
@pytest.mark.parametrize("name", ["ink", "ink2", "ink3"])
def test_text_can_be_read(palette, name):
    assert contrast(palette[name], palette["bg"]) >= 4.5


@THEMES
def test_text_on_a_colour_is_the_one_that_contrasts_more(palette):
    for name in [f"h{i}" for i in range(NUM_HUES + 1)] + ["signal", "cached", "solid", "tint"]:
        colour = palette[name]
        best = max(("#ffffff", "#111418"), key=lambda text: contrast(text, colour))
        assert on(colour) == best, name
        assert contrast(on(colour), colour) >= 4.0, name


def style_sheet_values(selector):
    sheet = Path(palette_module.__file__).parent.joinpath("static", "base.css").read_text(encoding="utf-8")
    [body] = re.findall(rf"^{re.escape(selector)} \{{(.*?)^\}}", sheet, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6});", body))


@pytest.mark.parametrize(
    ("selector", "palette"), [(".refimpl", LIGHT), ('.refimpl[data-theme="dark"]', DARK)], ids=["light", "dark"]
)
def test_the_style_sheet_has_the_same_values(selector, palette):
    assert style_sheet_values(selector) == palette


def test_the_scripts_know_every_colour():
    script = Path(palette_module.__file__).parent.joinpath("static", "common.js").read_text(encoding="utf-8")
    [names] = re.findall(r'COLOURS = "([^"]+)"', script)
    assert set(names.split()) == LIGHT.keys() == DARK.keys()


def test_a_mix_lies_between():
    assert mix("#000000", "#ffffff", 0.0) == "#000000"
    assert mix("#000000", "#ffffff", 1.0) == "#ffffff"
    assert mix("#102030", "#304050", 0.5) == "#203040"
    assert hue(LIGHT, None) == LIGHT["h8"]
