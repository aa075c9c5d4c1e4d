"""The page at /ui: what a viewer is sent, that texts need the key, that nobody slows the engine; and a real browser."""

import asyncio
import json
import sys
import time
from pathlib import Path

import httpx
import pytest
from asgi_support import serving
from fastapi import FastAPI
from starlette.requests import Request

sys.path.insert(0, str(Path(__file__).parents[1] / "visualizers"))
from browser_support import MISSING, chromium, photograph, wait_until

from refimpl import LLM, SamplingParams
from refimpl.errors import RefimplError
from refimpl.server import ui_viewers
from refimpl.server.observing import observe
from refimpl.server.ui import FIGURES, make_router, may_read
from refimpl.server.ui_records import HIDDEN, without_texts
from refimpl.server.ui_viewers import Hub, TooManyViewersError
from refimpl.visualizers.frames import Sender
from refimpl.visualizers.player import Player

needs_browser = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))
SECRET = "the secret word is xyzzy"


@pytest.fixture
def llm():
    options = {"num_gpu_blocks_override": 12, "max_num_seqs": 3, "block_size": 8}
    with LLM("tiny", **options, speculative_config={"method": "ngram", "num_speculative_tokens": 2}) as llm:
        yield llm


def generate(llm, count=4, tokens=20):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, stop=["never said"])
    llm.generate([f"{SECRET} {number}" for number in range(count)], params, use_tqdm=False)


async def take(viewer, hub):
    asked = viewer.ask()
    hub.nudge()
    return [json.loads(text) for text in await asyncio.wait_for(asked, 30)]


async def take_until(viewer, hub, true):
    while True:
        for message in await take(viewer, hub):
            if true(message):
                return message


def at(position):
    return lambda message: message["type"] == "frame" and message["transport"]["position"] == position


def with_hub(llm, test):
    hub = Hub(llm.engine.events, FIGURES)
    asyncio.run(test(hub))
    for _ in range(100):
        if hub._thread is None:
            break
        time.sleep(0.05)
    assert hub._thread is None, "the thread ends when nobody looks any more"
    assert not llm.engine.events._subscribers


# ---------------------------------------------------------------------- records without texts


def test_a_record_without_texts_holds_none_and_says_who_drew(llm):
    generate(llm)
    records = list(llm.engine.events.records)
    assert "xyzzy" in "".join("".join(a.token_texts) for r in records for a in r.arrived)
    for record in records:
        hidden = without_texts(record)
        texts = [*hidden.token_texts, *(t for row in hidden.draft_texts for t in row)]
        texts += [t for arrival in hidden.arrived for t in arrival.token_texts]
        assert set(texts) <= {HIDDEN, ""}
        assert [t >= 0 for t in hidden.token_ids] == [t >= 0 for t in record.token_ids]
        ids = [
            *hidden.token_ids,
            *(t for row in hidden.drafts for t in row),
            *(t for a in hidden.arrived for t in a.token_ids),
        ]
        assert max(ids, default=0) <= 0
        assert [len(row) for row in hidden.drafts] == [len(row) for row in record.drafts]
        assert hidden.num_new_tokens == record.num_new_tokens
        assert hidden.allocated == record.allocated


def test_a_stop_string_in_a_decision_is_hidden():
    with LLM("tiny") as llm:
        first = llm.generate("Hi", SamplingParams(max_tokens=6, ignore_eos=True, seed=3), use_tqdm=False)[0].outputs[0].text
        llm.generate("Hi", SamplingParams(max_tokens=6, ignore_eos=True, seed=3, stop=[first[1:3]]), use_tqdm=False)
        decisions = [d for record in llm.engine.events.records for d in without_texts(record).decisions]
    assert [d.numbers["stop"] for d in decisions if d.kind == "stop_string"] == [HIDDEN]


# ---------------------------------------------------------------------- viewers


def test_a_viewer_is_sent_what_a_widget_is(llm):
    generate(llm)

    async def test(hub):
        viewer = hub.open(with_texts=True)
        [frame] = await take(viewer, hub)
        player = Player(llm.engine.events)
        expected, _ = Sender(FIGURES).frame(player, whole=True)
        assert frame["whole"]
        assert frame["marks"] == expected["marks"]
        assert frame["pictures"].keys() == expected["pictures"].keys()
        for name, picture in expected["pictures"].items():
            assert frame["pictures"][name] == json.loads(json.dumps(picture)), name
        assert frame["transport"] == expected["transport"] | {"engine": True}
        hub.close(viewer)

    with_hub(llm, test)


def test_each_viewer_goes_its_own_way_and_follows_the_engine_when_it_is_live(llm, monkeypatch):
    monkeypatch.setattr(ui_viewers, "FASTEST", 5000)
    generate(llm)

    async def test(hub):
        one, other = hub.open(True), hub.open(False)
        last = len(llm.engine.events.records) - 1
        await take_until(one, hub, at(last))
        await take_until(other, hub, at(last))
        for message, position in (
            ({"type": "seek", "position": 3}, 3),
            ({"type": "step", "delta": 2}, 5),
            ({"type": "step", "delta": -100}, 0),
            ({"type": "seek", "position": 10**9}, last),
        ):
            assert hub.tell(one.id, message)
            assert not (await take_until(one, hub, at(position)))["transport"]["live"]
        await asyncio.to_thread(generate, llm)
        now = len(llm.engine.events.records) - 1
        assert (await take_until(other, hub, at(now)))["transport"]["count"] == now + 1
        assert one.position == last
        hub.tell(one.id, {"type": "live"})
        await take_until(one, hub, at(now))
        hub.tell(one.id, {"type": "seek", "position": 0})
        hub.tell(one.id, {"type": "speed", "speed": 5000})
        hub.tell(one.id, {"type": "play"})
        assert not (await take_until(one, hub, at(now)))["transport"]["playing"]
        hub.tell(one.id, {"type": "next_preemption"})
        hub.tell(one.id, {"type": "pin", "request": "0"})
        await take_until(one, hub, lambda message: message["type"] == "frame" and message["transport"]["pinned"] == "0")
        hub.tell(one.id, {"type": "hold", "hold": True})
        assert "only looks" in (await take_until(one, hub, lambda message: message["type"] == "said"))["text"]
        assert not llm.engine.gate.closed
        for viewer in (one, other):
            hub.close(viewer)

    with_hub(llm, test)


def test_texts_are_in_cards_for_those_alone_who_may_read(llm):
    generate(llm)

    async def test(hub):
        position = next(n for n, r in enumerate(llm.engine.events.records) if r.allocated)
        _, (first, *_) = llm.engine.events.records[position].allocated[0]
        for with_texts in (True, False):
            viewer = hub.open(with_texts)
            await take(viewer, hub)
            hub.tell(viewer.id, {"type": "seek", "position": position})
            hub.tell(viewer.id, {"type": "card", "block": first})
            card = (await take_until(viewer, hub, lambda message: message["type"] == "card"))["card"]
            assert card["tokens"]
            assert (set(card["tokens"]) == {HIDDEN}) == (not with_texts)
            hub.close(viewer)

    with_hub(llm, test)


def test_what_a_page_sends_is_not_trusted(llm):
    generate(llm)

    async def test(hub):
        viewer = hub.open(True)
        await take(viewer, hub)
        for wrong in (
            [], "x", 7, {}, {"type": 5}, {"type": "seek"}, {"type": "seek", "position": "far"}, {"type": "width"},
            {"type": "speed", "speed": float("nan")}, {"type": "card", "block": 10**9}, {"type": "card", "block": -1},
            {"type": "step", "delta": float("inf")}, {"type": "pin", "request": {"a": 1}}, {"type": "__init__"},
        ):  # fmt: skip
            assert hub.tell(viewer.id, wrong)
        hub.tell(viewer.id, {"type": "seek", "position": 1})
        await take_until(viewer, hub, at(1))
        assert not hub.tell("nobody", {"type": "live"})
        hub.close(viewer)

    with_hub(llm, test)


def test_a_viewer_who_takes_nothing_is_made_no_frames_and_holds_up_nobody(llm, monkeypatch):
    made = []
    frame = Sender.frame
    monkeypatch.setattr(Sender, "frame", lambda self, *a: made.append(self) or frame(self, *a))

    async def test(hub):
        slow, quick = hub.open(True), hub.open(True)
        await asyncio.to_thread(generate, llm)
        last = len(llm.engine.events.records) - 1
        await take_until(quick, hub, at(last))
        assert slow._sender not in made
        assert (await take(slow, hub))[-1]["transport"]["position"] == last, "then it gets the newest, whole"
        hub.close(slow)
        hub.close(quick)

    with_hub(llm, test)


def test_so_many_may_look_and_no_more(llm, monkeypatch):
    monkeypatch.setattr(ui_viewers, "MOST_VIEWERS", 2)

    async def test(hub):
        viewers = [hub.open(True), hub.open(True)]
        with pytest.raises(TooManyViewersError, match="2 pages"):
            hub.open(True)
        hub.close(viewers.pop())
        viewers.append(hub.open(True))
        for viewer in viewers:
            hub.close(viewer)

    with_hub(llm, test)


def test_a_log_that_forgets_begins_anew():
    with LLM("tiny", event_log_size=8) as llm:
        generate(llm, 1)

        async def test(hub):
            viewer = hub.open(False)
            await take(viewer, hub)
            await asyncio.to_thread(generate, llm, 1)
            frame = await take_until(viewer, hub, lambda message: message["type"] == "frame")
            assert frame["transport"]["step"] == llm.engine.events.records[-1].step
            hub.close(viewer)

        with_hub(llm, test)


# ---------------------------------------------------------------------- over HTTP


def request_from(host, **headers):
    scope = {"type": "http", "client": (host, 1234), "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    return Request(scope)


def test_texts_need_the_key_or_this_machine():
    assert may_read(request_from("10.0.0.1", authorization="Bearer right"), ["wrong", "right"])
    assert not may_read(request_from("127.0.0.1", authorization="Bearer other"), ["right"])
    assert not may_read(request_from("127.0.0.1"), ["right"])
    assert not may_read(request_from("127.0.0.1", authorization="Basic right"), ["right"])
    assert may_read(request_from("127.0.0.1"), [])
    assert may_read(request_from("::1"), [])
    assert not may_read(request_from("10.0.0.1"), [])
    assert not may_read(request_from("127.0.0.1", **{"x-forwarded-for": "10.0.0.1"}), [])


def test_the_page_asks_nobody_else_and_its_stream_is_of_frames(llm):
    generate(llm)
    app = FastAPI()
    observe(app, [llm.engine], "tiny", api_keys=["right"])
    with serving(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        page, scripts, styles = (client.get(path) for path in ("/ui", "/ui/ui.js", "/ui/ui.css"))
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for text in (page.text, scripts.text, styles.text):
            assert "http://" not in text.replace("http://www.w3.org", "")
            assert "https://" not in text
        assert client.get("/ui/frames?engine=3").status_code == 404
        assert client.post("/ui/viewers/none", json={"type": "live"}).status_code == 404
        assert client.post("/ui/viewers/none", content=b"x" * 5000).status_code == 413
        assert client.post("/ui/viewers/none", content=b"{").status_code == 400
        with client.stream("GET", "/ui/frames", headers={"Authorization": "Bearer right"}) as stream:
            events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
            opening, frame = next(events), next(events)
            assert opening["texts"]
            assert [name for name, _, _ in opening["shown"]] == ["block_map", "batch_timeline"]
            assert frame["whole"]
            assert client.post(f"/ui/viewers/{opening['viewer']}", json={"type": "seek", "position": 2}).status_code == 204
            assert next(e for e in events if e["type"] == "frame")["transport"]["position"] == 2
        with client.stream("GET", "/ui/frames") as stream:
            assert not json.loads(next(stream.iter_lines())[6:])["texts"]
        assert "refimpl:num_requests_running" in client.get("/metrics").text


def test_streams_end_with_the_server(llm):
    app, ending = FastAPI(), []
    app.include_router(make_router([llm.engine], ending=lambda: bool(ending)))
    with serving(app) as url, httpx.stream("GET", f"{url}/ui/frames", trust_env=False, timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        ending.append(True)
        for _ in lines:
            pass


def test_an_engine_without_a_log_has_no_page_but_metrics():
    with LLM("tiny", event_log_size=0) as llm:
        with pytest.raises(RefimplError, match="--no-ui"):
            observe(FastAPI(), [llm.engine], "tiny")
        observe(FastAPI(), [llm.engine], "tiny", ui=False).close()


@needs_browser
def test_a_browser_draws_what_runs_and_goes_back(llm, tmp_path):
    generate(llm)
    app = FastAPI()
    metrics = observe(app, [llm.engine], "tiny", api_keys=["right"])
    with serving(app) as url, chromium(tmp_path) as browser:
        page, errors, asked = browser.new_page(), [], []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/ui")
        view = page.locator(".refimpl")
        page.locator(".refimpl[data-position]").wait_for()
        last = len(llm.engine.events.records) - 1
        assert view.get_attribute("data-position") == str(last)
        assert "Texts are hidden" in page.locator("#note").inner_text()
        page.locator("[data-figure=batch_timeline] canvas:visible").first.wait_for()
        generate(llm)
        wait_until(lambda: view.get_attribute("data-position") == str(len(llm.engine.events.records) - 1))
        page.locator("button[aria-label='Step back']").click()
        wait_until(lambda: view.get_attribute("data-position") == str(len(llm.engine.events.records) - 2))
        assert not page.locator("button[aria-label='Hold the engine']").is_visible()
        page.fill("input[name=key]", "right")
        page.click("#key button")
        page.locator(".refimpl[data-position]").wait_for()
        wait_until(lambda: page.locator("#note").inner_text() == "")
        photograph(page.locator("main"), "ui")
        assert all(one.startswith((url, "data:")) for one in asked)
        assert errors == []
        page.close()
    metrics.close()
