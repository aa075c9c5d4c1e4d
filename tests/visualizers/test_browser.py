"""The live widgets in a real JupyterLab and a real browser: painted, stepped, held, loaded again."""

import json
import random
import re
import time

import pytest
from browser_support import MISSING, Notebook, Widget, chromium, lab, photograph, wait_until, write_notebook

from refimpl.visualizers.palette import DARK, LIGHT, hue

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"the browser test needs more than there is: {'; '.join(MISSING)}"),
    pytest.mark.timeout(900),  # seconds alone; the machine may be shared
]

IMPORTS = """
import json
from refimpl import LLM, SamplingParams
from refimpl.visualizers import BlockMap, Dashboard, State
"""

FIRST = f"""{IMPORTS}
llm = LLM("tiny", num_gpu_blocks_override=40)
llm.generate(["The quick brown fox", "jumps"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
BlockMap(llm)
"""

ENGINE = (
    IMPORTS
    + """
llm = LLM("tiny", num_gpu_blocks_override=NUMBER, max_num_seqs=8, max_num_batched_tokens=64)
def add(count, max_tokens=120):
    for i in range(count):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i, n=1 + i % 2)
        llm.engine.add_request(f"request {i}", "The quick brown fox jumps over. " * 4 + "yes" * i, params)
def steps(count=1000):
    while count and llm.engine.has_unfinished_requests():
        llm.engine.step()
        count -= 1
"""
)

BOOKS = """
import json
engine = llm.engine
books = engine.scheduler.kv.snapshot({s.sequence_id: s.num_computed_tokens for s in engine.scheduler.running})
state = State(engine.events.header.config)
for record in engine.events.records:
    state.apply(record)
owners = {}
for sequence_id, table in sorted(books.tables.items()):
    for block_id in table:
        owners.setdefault(block_id, []).append(state.sequences[sequence_id].hue)
told = {"owners": owners, "free": books.free_ids, "cached": books.cached_ids}
told |= {"steps": len(engine.events.records), "copies": len(record.copies)}
told |= {"preempted": [i for i, record in enumerate(engine.events.records) if record.preempted]}
_ = open("books.json", "w").write(json.dumps(told))
"""

LONG = """
import pathlib, threading, time
pathlib.Path("slow").touch()
llm.engine.events.subscribe(lambda record: time.sleep(0.15 * pathlib.Path("slow").exists()))
def tell():
    while pathlib.Path("slow").exists():
        engine = llm.engine
        told = {"closed": engine.gate.closed, "waiting": engine.gate.num_waiting, "steps": len(engine.events.records)}
        pathlib.Path("told.new").write_text(json.dumps(told))
        pathlib.Path("told.new").rename("gate.json")
        time.sleep(0.02)
threading.Thread(target=tell, daemon=True).start()
outputs = llm.generate(["one", "two"], SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False)
print("generated", sum(len(output.outputs[0].token_ids) for output in outputs))
"""


def engine(num_blocks):
    return ENGINE.replace("NUMBER", str(num_blocks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def notebook(folder, tmp_path_factory):
    write_notebook(folder / "live.ipynb", FIRST, "")
    home, profile = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("profile")
    with lab(folder, home) as address, chromium(profile) as browser:
        yield Notebook(browser.pages[0], f"{address}/lab/tree/live.ipynb")


@pytest.fixture(autouse=True)
def no_console_errors(request):
    yield
    if not MISSING:
        notebook = request.getfixturevalue("notebook")
        errors, notebook.errors = notebook.errors, []
        assert not errors


def test_refimpl_lab_leads_to_a_painted_map_by_one_click_on_run_all(notebook, folder):
    assert (folder / "00_quickstart.ipynb").exists()
    notebook.choose("Run", "runmenu:run-all")
    notebook.wait(notebook.cells.first)
    widget = Widget(notebook.cells.first).drawn()
    cached, free = widget.bottom_lines([1, 40])
    assert (cached, free) == ([LIGHT["cached"]], [LIGHT["free"]])
    assert "40 blocks of 16 tokens" in widget.root.inner_text()


def assert_pixels_are(widget, books, palette):
    """Twenty cells, and one of each kind at least, have the colours of who owns them by the auditor's snapshot."""
    owners = {int(block): hues for block, hues in books["owners"].items()}
    alone = [block for block, hues in owners.items() if len(hues) == 1]
    shared = [block for block, hues in owners.items() if len(hues) > 1]
    kinds = [alone, shared, books["free"], books["cached"]]
    rng = random.Random(1)
    chosen = [rng.choice(blocks) for blocks in kinds]
    chosen += rng.sample(sorted({*owners, *books["free"], *books["cached"]} - set(chosen)), 16)
    for block, colours in zip(chosen, widget.bottom_lines(chosen), strict=True):
        if block in owners:
            expected = {hue(palette, number) for number in owners[block]}
            assert set(colours) == expected if block in alone else set(colours) >= expected, (block, colours, expected)
        else:
            assert colours == [palette["free" if block in books["free"] else "cached"]], block


def test_the_map_has_the_colours_that_the_auditors_snapshot_names_in_light_and_dark(notebook, folder):
    notebook.run(engine(60) + "add(6)\nsteps(100)\nllm.engine.abort(['request 1', 'request 5'])\nsteps(1)" + BOOKS)
    books = json.loads((folder / "books.json").read_text())
    assert books["preempted"]
    assert books["copies"] == 0  # arrows would cross cells
    widget = notebook.show("Dashboard(llm)")
    widget.at(books["steps"] - 1)
    assert_pixels_are(widget, books, LIGHT)
    notebook.page.set_viewport_size({"width": 1500, "height": 2600})
    for theme, palette in (("light", LIGHT), ("dark", DARK)):
        assert_pixels_are(widget, books, palette)
        notebook.page.mouse.move(0, 0)  # no tip
        photograph(widget.root, f"dashboard-{theme}")
        widget.click("Light or dark")
        widget.has("data-theme", "dark" if theme == "light" else "light")
    notebook.page.set_viewport_size({"width": 1500, "height": 1400})


def test_buttons_move_the_widget_and_its_reasons_go_with_it(notebook, folder):
    notebook.run(engine(20) + "add(4, 40)\nsteps()" + BOOKS)
    books = json.loads((folder / "books.json").read_text())
    widget = notebook.show("BlockMap(llm)")
    last = books["steps"] - 1
    widget.at(last)
    why = widget.why
    widget.click("Next preemption")
    widget.at(books["preempted"][0])
    assert "gave way" in widget.why or "preempted" in widget.why
    assert widget.why != why
    widget.click("Step back")
    widget.at(books["preempted"][0] - 1)
    widget.click("Step forward")
    widget.at(books["preempted"][0])
    scrubber = widget.root.locator("input[type=range]")
    assert re.match(r"Step \d+: \S+", scrubber.get_attribute("aria-valuetext"))
    assert scrubber.get_attribute("max") == str(last)
    widget.click("Speed")
    widget.root.locator("button", has_text="20 steps/s").wait_for()
    before = widget.position
    widget.click("Play")
    wait_until(lambda: widget.position > before + 2)
    widget.click("Pause")
    widget.root.locator("button[aria-label=Play]").wait_for()
    stays = widget.position
    time.sleep(0.3)
    assert widget.position == stays < last
    widget.click("Follow the engine")
    widget.at(last)
    widget.click("Step forward")
    widget.says("no request waits or runs")


def test_keys_move_the_widget_that_has_the_focus_and_nothing_else(notebook, folder):
    notebook.run(engine(20) + "add(4, 40)\nsteps(30)" + BOOKS)
    books = json.loads((folder / "books.json").read_text())
    widget, press = notebook.show("BlockMap(llm)"), notebook.page.keyboard.press
    widget.at(29)
    press("Escape")  # the notebook's command mode, in which arrows are keys of its own
    widget.root.locator(".heading").click()
    for key, position in (
        ("ArrowLeft", 28),
        ("ArrowLeft", 27),
        ("ArrowRight", 28),
        ("p", books["preempted"][0]),
        ("End", 29),
    ):
        press(key)
        widget.at(position)
    press("1")
    widget.root.locator("button", has_text="2 steps/s").wait_for()
    press(" ")
    widget.root.locator("button[aria-label=Pause]").wait_for()
    press(" ")
    widget.root.locator("button[aria-label=Play]").wait_for()
    press("End")
    widget.at(29)
    press("t")
    widget.has("data-theme", "dark")
    press("t")
    widget.has("data-theme", "light")

    hues = {int(block): set(numbers) for block, numbers in books["owners"].items()}
    one, *others = (block for block in hues if len(hues[block]) == 1)
    other = next(block for block in others if hues[block] != hues[one])
    plain = widget.bottom_lines([one, other])
    widget.click_block(one)  # pins its request: the others fade
    wait_until(lambda: widget.bottom_lines([one])[0] == plain[0] and widget.bottom_lines([other])[0] != plain[1])
    press("Escape")
    wait_until(lambda: widget.bottom_lines([one, other]) == plain)
    assert widget.position == 29

    notebook.cells.last.locator(".cm-content").click()
    for key in "p", " ", "t", "ArrowLeft", "1":
        press(key)
    assert notebook.cells.last.locator(".cm-content").inner_text() == "p 1t"
    press("Control+a")
    press("Delete")
    widget.root.locator("button[aria-label=Play]").wait_for()
    assert widget.position == 29
    widget.has("data-theme", "light")


def test_the_engine_is_held_stepped_and_let_go_while_generate_blocks_its_cell(notebook, folder):
    def told():
        return json.loads((folder / "gate.json").read_text())

    widget = notebook.show(engine(200) + "Dashboard(llm)")
    cell = notebook.start(LONG)
    wait_until(lambda: (folder / "gate.json").exists() and told()["steps"] > 5)
    widget.root.scroll_into_view_if_needed()
    wait_until(lambda: widget.position > 3)
    widget.click("Hold the engine")
    wait_until(lambda: told()["closed"] and told()["waiting"] == 1)
    steps = told()["steps"]
    widget.at(steps - 1)
    assert widget.root.locator("button[aria-label='Hold the engine']").inner_text() == "held"
    time.sleep(0.4)
    assert told()["steps"] == steps
    assert cell.locator(".jp-InputArea-prompt").inner_text() == "[*]:"
    widget.click("Step forward")
    widget.at(steps)
    time.sleep(0.4)
    assert told() == {"closed": True, "waiting": 1, "steps": steps + 1}
    assert widget.position == steps
    (folder / "slow").unlink()
    widget.click("Hold the engine")
    notebook.wait(cell)
    assert "generated 600" in cell.inner_text()


def test_a_widget_is_painted_while_the_cell_after_it_generates(notebook, folder):
    shown = notebook.start(engine(200) + "Dashboard(llm)")
    cell = notebook.start(LONG)
    widget = Widget(shown).drawn()
    assert cell.locator(".jp-InputArea-prompt").inner_text() == "[*]:"
    (folder / "slow").unlink()
    notebook.wait(cell)
    assert widget.root.is_visible()


def test_a_reload_in_mid_run_brings_the_picture_back_and_it_goes_on(notebook, folder):
    notebook.run(engine(60) + "add(3)\nsteps(20)" + BOOKS)
    books = json.loads((folder / "books.json").read_text())
    widget = notebook.show("Dashboard(llm)")
    widget.at(19)
    number = notebook.cells.count() - 2
    notebook.save()
    notebook.open()
    widget = Widget(notebook.cells.nth(number)).drawn()
    widget.at(19)
    blocks = [int(block) for block, hues in books["owners"].items() if len(hues) == 1]
    assert widget.bottom_lines(blocks) == [[hue(LIGHT, books["owners"][str(block)][0])] for block in blocks]
    notebook.run("steps(3)")
    widget.at(22)


def test_where_motion_is_reduced_a_log_is_played_at_two_steps_a_second(notebook):
    notebook.page.emulate_media(reduced_motion="reduce")
    widget = notebook.show(engine(60) + "add(3)\nsteps(20)\nDashboard(llm)")
    speed = widget.root.locator("button[aria-label=Speed]")
    assert speed.inner_text() == "8 steps/s"
    widget.click("Play")
    widget.root.locator("button", has_text="2 steps/s").wait_for()
    widget.click("Pause")
    widget.click("Speed")
    widget.click("Step back")
    widget.root.locator("button[aria-label=Play]").wait_for()
    assert speed.inner_text() == "2 steps/s"
    notebook.page.emulate_media(reduced_motion="no-preference")


def test_captions_are_the_pictures_text_and_tab_goes_from_the_transport_through_the_figures(notebook):
    widget = notebook.show(engine(60) + "add(3)\nsteps(20)\nDashboard(llm)")
    for figure in widget.root.locator("figure").all():
        caption = figure.locator("figcaption").inner_text()
        pictures = figure.locator("[role=img], [role=group]").all()
        assert pictures, caption
        assert caption in [picture.get_attribute("aria-label") for picture in pictures]
    assert widget.root.locator("canvas:not([role=img]):not([aria-hidden=true])").count() == 0
    reached = widget.root.evaluate(
        "root => [...root.querySelectorAll(`button:not([hidden]), input, [tabindex='0']`)].map((el) => el.tagName)"
    )
    assert reached[:2] == ["BUTTON", "BUTTON"]
    assert reached.index("INPUT") < reached.index("CANVAS")
    assert "BUTTON" not in reached[reached.index("CANVAS") :]


def test_two_dashboards_of_one_engine_and_one_shown_twice_show_the_same_step(notebook):
    first = notebook.show(engine(60) + "add(3)\nsteps(20)\nview = Dashboard(llm)\nview")
    second = notebook.show("Dashboard(llm)")
    notebook.show("view").at(19)
    second.click("Step back")
    second.at(18)
    first.at(18)
    first.click("Follow the engine")
    first.at(19)
    second.at(19)
    assert first.step == second.step


def test_a_closed_engine_shows_its_last_picture_and_says_so_on_a_step(notebook):
    code = "llm.generate('x', SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)\nllm.close()\nDashboard(llm)"
    widget = notebook.show(engine(60) + code)
    widget.at(7)
    widget.click("Step forward")
    widget.says("this engine is closed")
    assert widget.position == 7
    widget.click("Step back")
    widget.at(6)


ATTENTION = """
import torch
from refimpl.attention.tiles import decode_walks, trace_attention
from refimpl.visualizers import AttentionView
query, keys, values = torch.randn(1, 4, 4), torch.randn(12, 4, 4), torch.randn(12, 4, 4)
AttentionView(trace_attention(query, keys, values, range(1, 12), 44, 0.5, decode_walks(1, 4, 44, 3, 16, 8)))
"""


def test_an_attention_is_stepped_tile_by_tile_in_the_colours_of_the_page(notebook):
    widget = notebook.show(ATTENTION)
    widget.at(6)
    widget.says("The merge weighs 3 averages")
    widget.root.locator("input[type=range]").focus()
    notebook.page.keyboard.press("Home")
    widget.at(0)
    assert "Walk A takes in keys 0 to 7, from blocks 1, 2" in widget.why
    widget.click("Step forward")
    widget.at(1)
    square = widget.root.locator("figure svg rect[stroke='var(--signal)']")
    for theme, palette in (("light", LIGHT), ("dark", DARK)):
        widget.has("data-theme", theme)
        colour = square.evaluate("rect => getComputedStyle(rect).stroke")
        assert colour == "rgb({}, {}, {})".format(*bytes.fromhex(palette["signal"][1:])), theme
        photograph(widget.root, f"attention-{theme}")
        widget.click("Light or dark")
    caption = widget.root.locator("figcaption").inner_text()
    assert widget.root.locator("figure [role=img]").get_attribute("aria-label") == caption
    assert widget.root.locator("button[aria-label='Next preemption']").is_hidden()
    notebook.page.keyboard.press("4")
    widget.click("Play")
    widget.at(6)
    widget.root.locator("button[aria-label=Play]").wait_for()
