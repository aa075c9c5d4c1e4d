"""The course's own notebooks in a real JupyterLab and a real browser: run whole, their widgets clicked, and loaded again."""

import sys
import time
from pathlib import Path

import nbformat
import pytest
from browser_support import MISSING, Notebook, Widget, chromium, is_json, lab, photograph, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
from run_notebooks import IN_A_BROWSER, assert_checks_say_right

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"the browser test needs more than there is: {'; '.join(MISSING)}"),
    pytest.mark.timeout(900),  # under two minutes alone; the machine may be shared
]

WIDGETS = {"03_paged_attention": 4, "04_continuous_batching": 3, "00_quickstart": 1}
SECONDS = 600
"""For a whole notebook, on a busy machine."""
TOO_LATE = "Failed to initialize model"
"""What anywidget says of a widget whose module has not been loaded after two seconds; it comes with the next load."""

ANOTHER = """
import time
llm = LLM("tiny")
_ = llm.engine.events.subscribe(lambda record: time.sleep(0.3))
llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
"""
"""The notebook closes its own at the end."""
GENERATE = "llm.generate(['A river', 'A hill'], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)"


@pytest.fixture(scope="module")
def course(smollm2, tmp_path_factory, request):
    """Gives a notebook by name, running in a page of its own. The one with the embedded model takes longest and begins."""
    folder, home, profile = (tmp_path_factory.mktemp(name) for name in ("course", "jupyter", "profile"))
    opened = {}
    with lab(folder, home) as address, chromium(profile) as browser:
        copied = set(folder.iterdir())

        def running(name):
            if name not in opened:
                opened[name] = Notebook(browser.new_page(), f"{address}/lab/workspaces/{name}/tree/{name}.ipynb")
                opened[name].name, opened[name].path = name, folder / f"{name}.ipynb"
                assert_pictures_are_seen(opened[name])
                opened[name].choose("Run", "runmenu:run-all")
            return opened[name]

        if any("00_quickstart" in item.name for item in request.session.items):
            running("00_quickstart")
        yield running
        assert set(folder.iterdir()) <= copied | {folder / ".ipynb_checkpoints"}, "a notebook leaves no files"


def assert_pictures_are_seen(notebook):
    """Before a notebook is run it shows each widget's picture, as it was committed."""
    pictures = notebook.page.locator(".jp-RenderedHTMLCommon img[src^='data:image/svg+xml']")
    assert pictures.count() >= WIDGETS[notebook.name]
    assert all(pictures.evaluate_all("images => images.map((image) => image.complete && image.naturalWidth > 300)"))


@pytest.fixture
def notebook(request, course):
    """One of them, when all its cells have run."""
    notebook = course(request.param)
    running = notebook.page.locator(".jp-InputArea-prompt", has_text="[*]")
    wait_until(lambda: running.count() == 0, SECONDS)
    notebook.wait_for_kernel()
    if any(TOO_LATE in error for error in notebook.errors):
        notebook.errors = []
        notebook.save()
        notebook.open()
    yield notebook
    errors, notebook.errors = notebook.errors, []
    assert not errors


def widgets_of(notebook):
    cells = notebook.cells.filter(has=notebook.page.locator(".refimpl"))
    return [Widget(cells.nth(number)).drawn() for number in range(cells.count())]


def test_those_that_are_run_here_alone_are_these():
    assert set(WIDGETS) == set(IN_A_BROWSER)


def press(widget, key):
    widget.root.locator(".heading").click()
    widget.page.keyboard.press(key)


def assert_it_steps_back_and_forward(widget):
    """Its number, its sentence and its place go with the buttons, and come back."""
    last = widget.last
    press(widget, "End")  # the button for it is there while the engine lives
    widget.at(last)
    at_the_end = widget.step, widget.why
    for position in (last - 1, last - 2):
        widget.click("Step back")
        widget.at(position)
    assert widget.step == at_the_end[0] - 2
    widget.click("Step forward")
    widget.click("Step forward")
    widget.at(last)
    assert (widget.step, widget.why) == at_the_end


def assert_it_says_why(widget):
    """The first step tells of what arrived, another one of something else."""
    scrubber = widget.root.locator("input[type=range]")
    scrubber.focus()
    widget.page.keyboard.press("Home")
    widget.at(0)
    assert widget.why.startswith("Why?")
    first = widget.why
    assert first in f"Why?{scrubber.get_attribute('aria-valuetext').partition(': ')[2]}"
    press(widget, "End")
    widget.at(widget.last)
    assert widget.why != first


def assert_it_plays_and_pauses(widget):
    play, pause = (widget.root.locator(f"button[aria-label={label}]") for label in ("Play", "Pause"))
    press(widget, "1")
    widget.root.locator("button", has_text="2 steps/s").wait_for()
    play.click()  # it stands at the end: from the beginning
    pause.click()
    play.wait_for()
    stays, why = widget.position, widget.why
    time.sleep(0.6)
    assert (widget.position, widget.why) == (stays, why)
    assert stays < widget.last
    press(widget, "4")
    play.click()  # and on from here, to the end
    widget.at(widget.last)
    play.wait_for()


@pytest.mark.parametrize("notebook", WIDGETS, indirect=True)
def test_a_notebook_of_the_course_runs_and_its_widgets_step_play_pause_and_say_why(notebook):
    for kind in ("error", "stderr"):
        assert notebook.page.locator(f"[data-mime-type='application/vnd.jupyter.{kind}']").all_inner_texts() == []
    prompts = notebook.cells.locator(".jp-InputArea-prompt").all_inner_texts()
    widgets = widgets_of(notebook)
    assert len(widgets) == WIDGETS[notebook.name]
    for number, widget in enumerate(widgets):
        assert_it_steps_back_and_forward(widget)
        assert_it_says_why(widget)
        assert_it_plays_and_pauses(widget)
        for theme in ("light", "dark"):
            widget.has("data-theme", theme)
            photograph(widget.root, f"{notebook.name}-{number}-{theme}")
            widget.click("Light or dark")
        widget.has("data-theme", "light")
    assert notebook.cells.locator(".jp-InputArea-prompt").all_inner_texts() == prompts, "no cell ran again"
    before = notebook.path.stat().st_mtime_ns
    notebook.save()
    # The tab can say that it is saved while the file is still written.
    wait_until(lambda: notebook.path.stat().st_mtime_ns != before and is_json(notebook.path))
    assert_checks_say_right(nbformat.read(notebook.path, as_version=4))


@pytest.mark.parametrize("notebook", ["04_continuous_batching"], indirect=True)
def test_the_course_shows_why_a_request_gave_way(notebook):
    widget = widgets_of(notebook)[-1]
    widget.click("Next preemption")
    widget.says("is preempted")


@pytest.mark.parametrize("notebook", ["00_quickstart"], indirect=True)
def test_play_and_pause_are_answered_while_generate_blocks_and_a_reload_brings_the_picture_back(notebook):
    """JupyterLab shows widgets after a reload when the kernel has answered it: when the cell has ended, or was stopped."""
    notebook.add_cell()
    widget = notebook.show(ANOTHER + "Dashboard(llm)")
    number, before = notebook.cells.count() - 2, widget.position
    cell = notebook.start(GENERATE)
    wait_until(lambda: widget.position > before)

    widget.root.locator("input[type=range]").focus()
    notebook.page.keyboard.press("Home")
    widget.at(0)
    widget.click("Play")
    wait_until(lambda: widget.position > 0)
    widget.click("Pause")
    widget.root.locator("button[aria-label=Play]").wait_for()
    stays, end = widget.position, widget.last
    wait_until(lambda: widget.last > end)  # the engine goes on
    assert widget.position == stays < end
    widget.click("Follow the engine")
    wait_until(lambda: widget.position > end)
    assert cell.locator(".jp-InputArea-prompt").inner_text() == "[*]:"

    notebook.save()
    seen = widget.position
    notebook.page.goto(notebook.address, wait_until="domcontentloaded")
    notebook.page.locator("#jp-main-statusbar").get_by_text("| Unknown").wait_for()
    notebook.choose("Kernel", "kernelmenu:interrupt")
    notebook.wait_for_kernel()
    widget = Widget(notebook.cells.nth(number)).drawn()
    last = widget.position
    assert last >= seen
    assert widget.last == last
    code = "llm.generate('A river is', SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)"
    notebook.run(code)
    widget.at(last + 3)
