"""Exported pages: self-contained, safe whatever the texts, and stepped in a real browser they show what the log says."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser_support import CHROMIUM, MISSING

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))
from sharing_support import Driver

from refimpl import Engine, EngineArgs, EventLog, SamplingParams
from refimpl.errors import RefimplError
from refimpl.visualizers import History, export_html, page
from refimpl.visualizers.batch_timeline import FIGURE as TIMELINE
from refimpl.visualizers.block_map import FIGURE as BLOCK_MAP
from refimpl.visualizers.palette import LIGHT
from refimpl.visualizers.speculation_svg import chips
from refimpl.visualizers.speculation_view import FIGURE as SPECULATION

needs_browser = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))


def small_run(**options):
    engine = Engine(EngineArgs(model="tiny", **{"num_gpu_blocks_override": 9, "max_num_seqs": 3, "block_size": 8} | options))
    for number in range(4):
        params = SamplingParams(max_tokens=24, ignore_eos=True, seed=number, n=2)
        engine.add_request(f"</script><img src=x onerror=alert({number})>", f"prompt </script> {number}", params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    return engine.events


def test_a_page_holds_everything_and_asks_for_nothing(tmp_path):
    text = export_html(small_run(), tmp_path / "run.html").read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>") == 2 + text.count('<script type="text/plain"') > 2
    assert not re.search(r'(src|href)\s*=\s*"?https?:', text)
    assert text.index('<script type="text/plain"') > text.index("openPage(document"), "what is drawn first is read first"
    harmless = text.replace("&lt;img src=x onerror=alert", "").replace(r"\u003cimg src=x onerror=alert", "")
    assert "onerror=alert" not in harmless
    assert "<noscript>" in text


def test_a_log_from_a_file_makes_the_same_page(tmp_path):
    log = small_run()
    log.save(tmp_path / "log.jsonl.gz")
    one = export_html(log, tmp_path / "one.html").read_bytes()
    assert export_html(tmp_path / "log.jsonl.gz", tmp_path / "two.html").read_bytes() == one


def test_a_long_log_is_cut_to_its_last_steps_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_STEPS", 5)
    log = small_run()
    assert f"; the last 5 steps of {len(log.records)}" in export_html(log, tmp_path / "run.html").read_text(encoding="utf-8")


def test_what_cannot_be_exported_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(RefimplError, match="nothing to export: no step has run yet"):
        export_html(Engine(EngineArgs(model="tiny")), tmp_path / "run.html")
    with pytest.raises(RefimplError, match="cannot be written"):
        export_html(small_run(), tmp_path / "no" / "such" / "folder.html")


def test_a_still_picture_of_a_large_cache_stays_small():
    driver = Driver(num_blocks=20_000, max_num_batched_tokens=20_000, max_model_len=4_000)
    for number in range(4):
        driver.add([number + 1] * 900, max_tokens=3)
    driver.step()
    history = History(driver.recorder.events)
    picture = BLOCK_MAP.picture(history, 0)
    drawn = BLOCK_MAP.svg(picture, LIGHT)
    assert len(drawn) < 100_000
    colours = {element.get("fill") for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("rect")}
    owners = {LIGHT[f"h{sequence.hue}"] for sequence in history.last.alive()}
    assert owners | {LIGHT["free"]} <= colours
    assert len(owners) > 1


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@needs_browser
def test_an_exported_page_steps_and_plays_without_a_kernel(browser, tmp_path):
    log = small_run()
    history = History(log)
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(export_html(log, tmp_path / "run.html").as_uri())
    tab.wait_for_selector(".refimpl[data-position]")

    def rows_at(position):
        return BLOCK_MAP.picture(history, position)["rows"]

    def shows(position):
        tab.wait_for_function(f"document.querySelector('.refimpl').dataset.position === '{position}'")
        caption = BLOCK_MAP.picture(history, position)["caption"]
        assert tab.inner_text("[data-figure=block_map] figcaption") == "".join(text for text, _ in caption)

    last = len(history) - 1
    shows(last)
    tab.wait_for_function("[...document.querySelectorAll('figcaption')].every((caption) => caption.textContent)")
    tab.click("button[aria-label='Step back']")
    shows(last - 1)
    told = [[f"{number:,}" if number or k != 1 else "·" for k, number in enumerate(row[3:])] for row in rows_at(last - 1)]
    rows = (
        "[...document.querySelector('.numbers tbody').rows].map((row) => [...row.cells].slice(1).map((c) => c.textContent))"
    )
    tab.wait_for_function(
        f"JSON.stringify({rows}) === {json.dumps(json.dumps(told, separators=(',', ':'), ensure_ascii=False))}"
    )
    tab.click("button[aria-label='Next preemption']")
    shows(next(i for i, record in enumerate(history.records) if record.preempted))
    tab.focus(".refimpl")
    tab.keyboard.press("Home")
    shows(0)
    tab.keyboard.press("ArrowRight")
    shows(1)
    tab.keyboard.press("4")
    tab.keyboard.press(" ")
    shows(last)
    assert errors == []
    tab.close()


@needs_browser
def test_a_page_follows_the_theme_of_vs_code_and_of_colab(browser, tmp_path):
    tab = browser.new_page()
    tab.goto(export_html(small_run(), tmp_path / "run.html", [BLOCK_MAP]).as_uri())
    tab.wait_for_selector(".refimpl[data-position]")
    for classes, theme in (
        ("vscode-dark", "dark"),
        ("vscode-light", "light"),
        ("vscode-high-contrast", "dark"),
        ("vscode-high-contrast vscode-high-contrast-light", "light"),
    ):
        tab.evaluate(f"document.body.className = '{classes}'")
        tab.wait_for_selector(f".refimpl[data-theme={theme}]")
    tab.evaluate("document.body.className = ''")
    for theme in ("dark", "light"):
        tab.evaluate(f"document.documentElement.setAttribute('theme', '{theme}')")
        tab.wait_for_selector(f".refimpl[data-theme={theme}]")
    tab.close()


@needs_browser
def test_a_large_map_that_is_painted_by_changes_is_the_one_painted_whole(browser, tmp_path):
    driver = Driver(num_blocks=25_000, block_size=16, max_num_seqs=24, max_num_batched_tokens=4_000, max_model_len=4_000)
    for number in range(24):
        driver.add([number + 1] * (200 + 37 * number), max_tokens=6)
    log: EventLog = driver.recorder.events
    for _ in range(12):
        driver.step()
    assert len(log.records) > 8
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(export_html(log, tmp_path / "run.html", [BLOCK_MAP]).as_uri())
    tab.wait_for_selector(".refimpl[data-position]")
    pixels = "document.querySelector('canvas[data-refimpl]').toDataURL()"

    def press(key, position):
        tab.keyboard.press(key)
        tab.wait_for_function(f"document.querySelector('.refimpl').dataset.position === '{position}'")

    tab.focus(".refimpl")
    press("Home", 0)
    first = tab.evaluate(pixels)
    for position in range(1, 9):
        press("ArrowRight", position)
    by_changes = tab.evaluate(pixels)
    tab.keyboard.press("t")
    tab.wait_for_function("document.querySelector('.refimpl').dataset.theme === 'dark'")
    tab.keyboard.press("t")
    tab.wait_for_function("document.querySelector('.refimpl').dataset.theme === 'light'")
    tab.wait_for_timeout(200)
    assert tab.evaluate(pixels) == by_changes != first
    tab.close()


@needs_browser
def test_a_page_shows_drafts_goes_to_their_steps_and_pins_their_requests(browser, tmp_path):
    driver = Driver(num_blocks=40, drafts=4, max_num_batched_tokens=32)
    for number in range(3):
        driver.add([number + 1, 2, 3], max_tokens=20)
    log = driver.run().recorder.events
    history = History(log)
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(export_html(log, tmp_path / "run.html", [SPECULATION, TIMELINE]).as_uri())
    tab.wait_for_selector(".speculation_view .sequence")

    def shown():
        of = "[...document.querySelectorAll('.speculation_view .round')]"
        return tab.evaluate(f"{of}.map((r) => [...r.querySelectorAll('.chip')].map((c) => [c.textContent, c.classList[1]]))")

    def told(position):
        sequences = SPECULATION.picture(history, position)["sequences"]
        return [list(map(list, chips(*one[2:]))) for *_, rounds in sequences for one in rounds]

    last = len(history) - 1
    assert shown() == told(last)
    position = int(tab.get_attribute(".speculation_view .step >> nth=0", "data-position"))
    tab.click(".speculation_view .step >> nth=0")
    tab.wait_for_function(f"document.querySelector('.refimpl').dataset.position === '{position}'")
    assert position < last
    assert shown() == told(position)
    tab.click(".speculation_view .letter >> nth=0")
    tab.wait_for_selector(".speculation_view .sequence.faded")
    assert tab.locator(".sequence:not(.faded)").count() == 1
    tab.focus(".batch_timeline canvas[tabindex]")
    tab.keyboard.press("ArrowDown")
    tab.wait_for_function("/decodes 1 \\+ \\d drafts?, \\d/.test(document.querySelector('.tl-tip').innerText)")
    assert errors == []
    tab.close()
