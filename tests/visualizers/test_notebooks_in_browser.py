"""The course's own notebooks in a real JupyterLab and a real browser: run whole, their widgets clicked, and loaded again."""

import time

import pytest
from browser_support import MISSING, Notebook, Widget, chromium, lab, photograph, wait_until

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"the browser test needs more than there is: {'; '.join(MISSING)}"),
    pytest.mark.timeout(900),  # under two minutes alone; the machine may be shared
]

WIDGETS = {"00_quickstart": 1, "03_paged_attention": 3, "04_continuous_batching": 3}
SECONDS = 600
"""For a whole notebook, on a busy machine."""

GENERATE = "llm.generate(prompts[:2], SamplingParams(max_tokens=2_000, ignore_eos=True), use_tqdm=False)"


@pytest.fixture(scope="module")
def course(smollm2, tmp_path_factory):
    """The three notebooks, each in a page of its own, all running from top to bottom at the same time."""
    folder, home, profile = (tmp_path_factory.mktemp(name) for name in ("course", "jupyter", "profile"))
    with lab(folder, home) as address, chromium(profile) as browser:
        pages = [*browser.pages, *(browser.new_page() for _ in range(len(WIDGETS) - 1))]
        notebooks = {}
        for name, page in zip(WIDGETS, pages, strict=True):
            notebooks[name] = Notebook(page, f"{address}/lab/workspaces/{name}/tree/{name}.ipynb")
            assert_pictures_are_seen(notebooks[name], WIDGETS[name])
        for notebook in notebooks.values():
            notebook.choose("Run", "runmenu:run-all")
        yield notebooks


def assert_pictures_are_seen(notebook, count):
    """Before a notebook is run it shows each widget's picture, as it was committed."""
    pictures = notebook.page.locator(".jp-RenderedHTMLCommon img[src^='data:image/svg+xml']")
    assert pictures.count() >= count
    assert all(pictures.evaluate_all("images => images.map((image) => image.complete && image.naturalWidth > 300)"))


@pytest.fixture(params=WIDGETS)
def notebook(request, course):
    """One of them, when all its cells have run."""
    notebook = course[request.param]
    notebook.name = request.param
    running = notebook.page.locator(".jp-InputArea-prompt", has_text="[*]")
    wait_until(lambda: running.count() == 0, SECONDS)
    notebook.wait_for_kernel()
    yield notebook
    errors, notebook.errors = notebook.errors, []
    assert not errors


def widgets_of(notebook):
    cells = notebook.cells.filter(has=notebook.page.locator(".refimpl"))
    return [Widget(cells.nth(number)).drawn() for number in range(cells.count())]


def assert_it_steps_back_and_forward(widget):
    """Its number, its sentence and its place go with the buttons, and come back."""
    last = widget.last
    widget.click("Follow the engine")
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
    widget.click("Follow the engine")
    widget.at(widget.last)
    assert widget.why != first


def assert_it_plays_and_pauses(widget):
    widget.click("Play")  # it stands at the end: from the beginning
    pause = widget.root.locator("button[aria-label=Pause]")
    pause.wait_for()
    wait_until(lambda: 0 < widget.position < widget.last)
    pause.click()
    widget.root.locator("button[aria-label=Play]").wait_for()
    stays, why = widget.position, widget.why
    time.sleep(0.3)
    assert (widget.position, widget.why) == (stays, why)
    assert stays < widget.last


def test_a_notebook_of_the_course_runs_and_its_widgets_step_play_pause_and_say_why(notebook):
    assert notebook.page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert notebook.page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
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
