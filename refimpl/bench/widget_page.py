"""A dashboard in a real browser, for bench widgets: what a frame takes to draw, and when the first picture is there.

A frame's time is that of its message being taken in, the pictures being drawn, and the page being laid out, on the page's
thread: headless Chromium, software rendering, 1280 x 800. The first picture of a widget is there when the frame after its
message ends; the time counts from the moment at which the page begins to set the widget up. That of an exported page counts
from the moment at which the browser is sent to it, and stands beside that of a page with nothing in it.
"""

from __future__ import annotations

import base64
import json
import shutil
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from refimpl.events import EventLog

Message = tuple[dict[str, Any], list[bytes]]

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
SIZE = {"width": 1280, "height": 800}
PAINTS = 5
"""Times that the exported page is opened."""

BENCH = """
const drawn = [], native = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (f) => native((now) => {
  const started = performance.now();
  f(now); void document.body.offsetHeight;
  drawn.push(performance.now() - started);
});
"""
FEED = """
let listener = null;
const model = { get: (key) => SHOWN[key], on: (_event, f) => { listener = f; }, off: () => {}, send: () => {} };
const begun = performance.now();
render({ model, el: document.body });
const mounting = performance.now() - begun;
window.feed = (message, texts) => new Promise((resolve) => {
  const buffers = texts.map((text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer));
  drawn.length = 0;
  const started = performance.now();
  listener(message, buffers);
  const taken = performance.now() - started;
  native(() => setTimeout(() => {
    window.firstPicture ??= mounting + performance.now() - started;
    resolve(taken + drawn.reduce((a, b) => a + b, 0));
  }, 0));
});
"""
FIRST_PAINT = """
new MutationObserver((_, observer) => {
  if (!document.querySelector("[data-position]")) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.firstPaint = performance.now(); }, 0));
}).observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["data-position"] });
"""
EMPTY = "<!doctype html><body><script>document.body.dataset.position = 0</script>"


def chromium() -> str | None:
    """The browser's program."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def missing() -> str | None:
    """Why no browser can be measured; None if one can."""
    if find_spec("playwright") is None:
        return "playwright is not installed"
    return None if chromium() else "no chromium, chromium-browser or google-chrome on PATH"


def measure(messages: list[Message], warm_up: list[Message], log: EventLog) -> dict[str, Any]:
    """Milliseconds of drawing each message after those of the warm-up, and to the first picture, live and exported."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        tab = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        live = Path(folder) / "live.html"
        live.write_text(_live_page(), encoding="utf-8")
        _open(tab, live)
        times = [_feed(tab, message) for message in (*warm_up, *messages)][len(warm_up) :]
        first = [_first_picture(browser, live, warm_up[0]) for _ in range(PAINTS)]
        pages = _exported_pages(browser, log, Path(folder))
        browser.close()
    ordered = sorted(times)
    changed = [sum(map(len, buffers)) // 12 for _, buffers in messages]
    return {
        "draw_ms": {"median": statistics.median(times), "p95": ordered[len(ordered) * 95 // 100], "max": ordered[-1]},
        "changed_blocks_median": statistics.median(changed),
        "first_paint_ms": {"median": statistics.median(first), "all": first},
        "exported_page_ms": {name: {"median": statistics.median(paints), "all": paints} for name, paints in pages.items()},
    }


def _live_page() -> str:
    from refimpl.visualizers.figures import ALL
    from refimpl.visualizers.page import script, style

    names = [figure.name for figure in ALL]
    shown = {"shown": [[f.name, f.title, f.question] for f in ALL], "heading": "bench", "transport_shown": True}
    code = f"{BENCH}\n{script(names)}\nconst SHOWN = {json.dumps(shown)};\n{FEED}".replace("</", "<\\/")
    return f"<!doctype html><meta charset=utf-8><style>{style(names)}</style><body><script type=module>{code}</script>"


def _feed(tab: Any, message: Message) -> float:
    head, buffers = message
    texts = [base64.b64encode(buffer).decode() for buffer in buffers]
    return float(tab.evaluate("([message, texts]) => window.feed(message, texts)", [head, texts]))


def _open(tab: Any, live: Path) -> None:
    tab.goto(live.as_uri())
    tab.wait_for_function("window.feed !== undefined")


def _first_picture(browser: Any, live: Path, message: Message) -> float:
    tab = browser.new_page(viewport=SIZE)
    _open(tab, live)
    _feed(tab, message)
    taken = float(tab.evaluate("window.firstPicture"))
    tab.close()
    return taken


def _exported_pages(browser: Any, log: EventLog, folder: Path) -> dict[str, list[float]]:
    """Of the exported page and of an empty one, in turn."""
    from refimpl.visualizers.page import export_html

    empty = folder / "empty.html"
    empty.write_text(EMPTY, encoding="utf-8")
    pages = {"page": export_html(log, folder / "exported.html"), "empty": empty}
    paints: dict[str, list[float]] = {name: [] for name in pages}
    for _ in range(PAINTS):
        for name, page in pages.items():
            tab = browser.new_page(viewport=SIZE)
            tab.add_init_script(FIRST_PAINT)
            tab.goto(page.as_uri())
            tab.wait_for_function("window.firstPaint !== undefined")
            paints[name].append(float(tab.evaluate("window.firstPaint")))
            tab.close()
    return paints
