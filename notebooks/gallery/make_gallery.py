"""Make the pictures that the README shows, from a real run of the tiny model.

    python notebooks/gallery/make_gallery.py

Writes run.jsonl.gz (the event log), run.html (the exported page) and, where playwright and a Chromium are at hand,
dashboard-light.png and dashboard-dark.png. The run has a preemption, copies on write, a fork and prefix hits.
"""

import shutil
from pathlib import Path

from refimpl import Engine, EngineArgs, EventLog, SamplingParams
from refimpl.visualizers import export_html

HERE = Path(__file__).parent
LATE = [
    ("fox again", "The quick brown fox jumps over the lazy cat", 40),
    ("paging", "What is paging?", 50),
    ("waiting", "Why do requests wait?", 50),
    ("long", "A prompt that comes late, and is so long that it must be split by the budget of a step. " * 2, 40),
]


def run() -> EventLog:
    """A small pool, so that requests wait and one gives way."""
    engine = Engine(
        EngineArgs(
            model="tiny",
            dtype="float32",
            num_gpu_blocks_override=51,
            block_size=8,
            max_num_seqs=6,
            max_num_batched_tokens=48,
        )
    )

    def add(name: str, prompt: str, max_tokens: int, seed: int, n: int = 1) -> None:
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, n=n))

    add("fox", "The quick brown fox jumps over the lazy dog", 60, 1)
    add("story", "Once upon a time there was a model that liked long prompts, and its readers were patient.", 90, 2)
    add("samples", "Three answers to one question", 70, 3, n=3)
    late = list(LATE)
    while engine.has_unfinished_requests():
        engine.step()
        step = engine.scheduler.step
        if step % 7 == 0 and late:
            add(*late.pop(0), seed=step)
        if step == 20:
            engine.fork("fox", "branch")
    engine.close()
    return engine.events


def screenshots(page: Path) -> None:
    """The page at its first preemption, light and dark."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1264, "height": 1500})
        tab.goto(page.as_uri())
        tab.wait_for_selector(".refimpl canvas")
        tab.click("button[aria-label='Next preemption']")
        for theme in ("light", "dark"):
            tab.wait_for_function(f"document.querySelector('.refimpl').dataset.theme === '{theme}'")
            tab.wait_for_timeout(600)
            tab.screenshot(path=HERE / f"dashboard-{theme}.png", full_page=True)
            tab.click("button[aria-label='Light or dark']")
        browser.close()


if __name__ == "__main__":
    log = run()
    log.save(HERE / "run.jsonl.gz")
    exported = export_html(log, HERE / "run.html")
    screenshots(exported)
