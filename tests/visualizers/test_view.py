"""Views without a browser: messages, frames, the player's places, and that nothing drawn disturbs the engine."""

import json
import logging
import threading
import time

import numpy as np
import pytest

from refimpl import LLM, Engine, EngineArgs, SamplingParams
from refimpl.errors import RefimplError
from refimpl.events import ArrivalRecord, EventLog, LogHeader, StepRecord
from refimpl.outputs import Finish
from refimpl.visualizers import block_map
from refimpl.visualizers.figures import ALL
from refimpl.visualizers.frames import Sender, transport
from refimpl.visualizers.history import History
from refimpl.visualizers.player import FEWEST_FRAMES, MOST_FRAMES, SHARE, Player, pause_after, player_of
from refimpl.visualizers.source import player_for
from refimpl.visualizers.view import View
from refimpl.visualizers.widgets import BlockMap, Dashboard

PATIENCE = 240


def until(true):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.002)


def make_engine(**options):
    sizes = {"block_size": 4, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    return Engine(EngineArgs(model="tiny", **sizes | options))


def add(engine, requests=5, max_tokens=12):
    for number in range(requests):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=2 if number == 1 else 1, seed=number)
        engine.add_request(f"r{number}", list(range(1, 5 + 3 * number)), params)


def drive(engine):
    while engine.has_unfinished_requests():
        engine.step()


@pytest.fixture
def engine():
    engine = make_engine()
    yield engine
    engine.close()


@pytest.fixture
def ran(engine):
    add(engine)
    drive(engine)
    return engine


@pytest.fixture(scope="module")
def recorded():
    engine = make_engine()
    add(engine)
    drive(engine)
    engine.close()
    return engine.events


@pytest.fixture
def log(recorded):
    """A log of its own for each test, and so a player of its own."""
    log = EventLog(recorded.header, 10_000)
    log.records.extend(recorded.records)
    return log


@pytest.fixture
def shown():
    """Makes views whose messages to the browser are kept, and closes them."""
    views = []

    def show(source, kind=BlockMap):
        view = kind(source)
        view.sent = []
        view.send = lambda message, buffers=None: view.sent.append((message, buffers))
        views.append(view)
        return view

    yield show
    for view in views:
        view.close()


def tell(view, **message):
    view._on_message(view, message, [])


def said(view):
    return [message["text"] for message, _ in view.sent if message["type"] == "said"]


# ---------------------------------------------------------------------- messages


def test_nothing_is_sent_before_a_browser_says_hello_and_then_all_of_it(log, shown):
    view = shown(log)
    view._draw()
    assert view.sent == []
    tell(view, type="hello")
    frames = [message for message, _ in view.sent if message["whole"]]
    assert len(frames) == 1
    assert frames[0]["transport"]["position"] == len(log.records) - 1
    assert frames[0]["pictures"]["block_map"]["cells"] == "all"
    assert {kind for _, kind in frames[0]["marks"]} == {"arrival", "copy", "preemption"}


def test_a_page_that_cannot_speak_while_a_cell_runs_is_sent_all_of_it_until_it_does(engine, shown, monkeypatch):
    monkeypatch.setattr("refimpl.visualizers.view.UNHEARD", 0.0)
    add(engine)
    engine.step()
    view = shown(engine)
    view._draw()
    assert view.sent == [], "nobody has displayed it"
    view._repr_mimebundle_()
    for position in (1, 2):
        engine.step()
        until(lambda at=position: view.sent and view.sent[-1][0]["transport"]["position"] == at)
    assert all(message["whole"] for message, _ in view.sent)
    tell(view, type="hello")
    engine.step()
    until(lambda: view.sent[-1][0]["transport"]["position"] == 3)
    assert not view.sent[-1][0]["whole"]


def test_a_page_that_has_not_spoken_is_sent_a_frame_now_and_then_only(engine, shown, monkeypatch):
    monkeypatch.setattr("refimpl.visualizers.view.UNHEARD", 1e9)
    add(engine)
    view = shown(engine)
    view._repr_mimebundle_()
    view._sent_unheard = time.monotonic()
    drive(engine)
    view._draw()
    assert view.sent == []


def test_what_is_sent_of_every_figure_is_json_and_bytes(log, shown):
    view = shown(log, Dashboard)
    tell(view, type="hello")
    message, buffers = next((message, buffers) for message, buffers in view.sent if message["whole"])
    json.dumps(message, allow_nan=False)
    assert set(message["pictures"]) == {figure.name for figure in ALL}
    assert all(isinstance(buffer, bytes) for buffer in buffers)


def test_messages_move_the_player(ran, shown):
    view = shown(ran)
    player, last = view.player, len(ran.events.records) - 1
    for message, position in [
        ({"type": "seek", "position": 3}, 3),
        ({"type": "step", "delta": 1}, 4),
        ({"type": "step", "delta": -2}, 2),
        ({"type": "seek", "position": -9}, 0),
        ({"type": "seek", "position": 10**9}, last),
        ({"type": "pause"}, last),
        ({"type": "live"}, last),
    ]:
        tell(view, **message)
        assert player.position == position
    assert player.live
    tell(view, type="pin", request="r1")
    tell(view, type="speed", speed=20)
    assert (player.pinned, player.speed) == ("r1", 20)
    tell(view, type="pin", request=None)
    tell(view, type="play")
    assert player.pinned is None
    assert player.playing
    tell(view, type="pause")
    tell(view, type="next_preemption")
    assert ran.events.records[player.position].preempted
    tell(view, type="card", block=1)
    cards = [message["card"] for message, _ in view.sent if message["type"] == "card"]
    assert [card["block"] for card in cards] == [1]
    assert not said(view)


@pytest.mark.parametrize(
    "message",
    [None, 3, "step", [], {}, {"type": None}, {"type": []}, {"type": {}}, {"type": "nonsense"}, {"type": "__class__"}]
    + [{"type": "pin", "request": wrong} for wrong in (3, [], {})],
)
def test_what_is_no_message_is_ignored(log, shown, message):
    view = shown(log)
    before = view.player.position
    view._on_message(view, message, [])
    assert view.sent == []
    assert (view.player.position, view.player.pinned) == (before, None)


@pytest.mark.parametrize(
    "message",
    [{"type": kind} for kind in ("seek", "step", "card", "speed", "pin")]
    + [{"type": "seek", "position": wrong} for wrong in (None, "x", [], float("inf"), float("nan"))]
    + [{"type": "step", "delta": "far"}, {"type": "card", "block": {}}, {"type": "speed", "speed": "fast"}],
)
def test_a_message_with_a_wrong_value_is_answered_and_changes_nothing(log, shown, message, caplog):
    view = shown(log)
    before = view.player.position, view.player.speed, view.player.pinned
    tell(view, **message)
    assert len(said(view)) == 1
    assert said(view)[0].startswith("that did not work")
    assert (view.player.position, view.player.speed, view.player.pinned) == before


def test_a_speed_stays_within_reason(log, shown):
    view = shown(log)
    for speed, taken in ((0, 0.1), (-5, 0.1), (1e9, 1000), (float("nan"), 0.1)):
        tell(view, type="speed", speed=speed)
        assert view.player.speed == taken


def test_what_cannot_be_done_is_said(ran, shown, tmp_path):
    view = shown(ran)
    tell(view, type="engine_step")
    tell(view, type="step", delta=1)
    ran.close()
    tell(view, type="engine_step")
    ran.events.save(tmp_path / "log.jsonl")
    saved = shown(tmp_path / "log.jsonl")
    for kind in ("engine_step", "hold"):
        tell(saved, type=kind, hold=True)
    calm = make_engine(num_gpu_blocks_override=200)
    add(calm)
    drive(calm)
    never = shown(calm)
    tell(never, type="next_preemption")
    calm.close()
    idle = "no request waits or runs; add one with engine.add_request, or call generate"
    assert said(view) == [idle, idle, "this engine is closed; make a new one"]
    assert said(saved) == ["this is a saved log: no engine runs behind it"] * 2
    assert said(never) == ["nothing was preempted in this log"]


def test_an_idle_engine_is_driven_by_steps_and_keeps_their_outputs(engine, shown):
    view = shown(engine)
    add(engine, requests=1, max_tokens=4)
    for count in range(1, 5):
        tell(view, type="step", delta=1)
        assert (len(engine.events.records), view.player.position) == (count, count - 1)
    assert not said(view)
    tell(view, type="step", delta=-2)
    tell(view, type="step", delta=1)  # not at the end: a step in the log
    assert (len(engine.events.records), view.player.position) == (4, 2)
    assert [output.finished for output in engine.step()][-1]


def test_hold_and_step_drive_an_engine_that_runs_in_another_thread(engine, shown):
    view = shown(engine)
    add(engine)
    tell(view, type="hold", hold=True)
    thread = threading.Thread(target=drive, args=(engine,), daemon=True)
    thread.start()
    for count in (1, 2):
        until(lambda: engine.gate.num_waiting == 1)
        tell(view, type="step", delta=1)
        until(lambda count=count: len(engine.events.records) == count)
    until(lambda: engine.gate.num_waiting == 1)
    assert len(engine.events.records) == 2
    tell(view, type="hold", hold=False)
    thread.join(PATIENCE)
    assert not thread.is_alive()


# ---------------------------------------------------------------------- frames


def cells_of(sender, player, whole=False):
    message, buffers = sender.frame(player, whole)
    picture = message["pictures"].get("block_map", {})
    if "cells" not in picture:
        return "changed", np.empty(0, dtype="<u4")
    return picture["cells"], np.frombuffer(buffers[picture["buffer"]], dtype="<u4")


@pytest.mark.parametrize("order", ["forward", "backward", "jumps"])
def test_changed_cells_applied_to_the_frame_before_give_the_next(log, order):
    player = Player(log)
    places = list(range(-1, len(log.records)))
    places = {"forward": places, "backward": places[::-1], "jumps": places[::7] + places[::-3]}[order]
    sender, seen = Sender((block_map.FIGURE,)), None
    for number, position in enumerate(places):
        player.position = position
        kind, words = cells_of(sender, player, whole=number == 0)
        if kind == "all":
            seen = words.reshape(-1, 2).copy()
        else:
            changed = words.reshape(-1, 3)
            seen[changed[:, 0]] = changed[:, 1:]
        fresh = np.frombuffer(block_map.BlockMap().picture(player.history, position)["cells"], dtype="<u4")
        assert kind == ("all" if number == 0 else "changed")
        assert (seen.ravel() == fresh).all()


def test_a_whole_frame_begins_anew_and_marks_are_sent_once(log):
    player = Player(log)
    sender = Sender((block_map.FIGURE,))
    first, _ = sender.frame(player, True)
    second, _ = sender.frame(player, False)
    again, _ = sender.frame(player, True)
    assert first["marks"] == again["marks"] != []
    assert second["marks"] == []
    assert second["pictures"] == {}
    assert [frame["pictures"]["block_map"]["cells"] for frame in (first, again)] == ["all", "all"]


def test_frames_are_sent_in_the_order_in_which_they_were_taken(log, shown):
    """Else differences would come before the frame that they are to."""
    view = shown(log)
    started, go_on, order = threading.Event(), threading.Event(), []

    def slow_first(message, buffers=None):
        if not order and not started.is_set():
            started.set()
            go_on.wait(PATIENCE)
        order.append(message["whole"])

    view.send = slow_first
    hello = threading.Thread(target=lambda: view._send_frame(whole=True), daemon=True)
    hello.start()
    assert started.wait(PATIENCE)
    other = threading.Thread(target=lambda: view._send_frame(whole=False), daemon=True)
    other.start()
    go_on.set()
    hello.join(PATIENCE)
    other.join(PATIENCE)
    assert order == [True, False]


def test_only_what_changed_travels(log):
    """Of a picture the keys whose values changed, of its cells those of other bytes; put together they are the picture."""
    player, sender, seen = Player(log), Sender(ALL), {}
    whole_bytes = 0
    for position in range(len(log.records)):
        player.position = position
        message, buffers = sender.frame(player, position == 0)
        for name, changes in message["pictures"].items():
            before = seen.setdefault(name, {})
            same = {key for key, value in changes.items() if key in before and before[key] == value}
            assert same <= {"cells", "buffer"}
            before.update(changes)
        whole_bytes += sum(map(len, buffers)) if message["pictures"].get("block_map", {}).get("cells") == "all" else 0
        for figure in ALL:
            fresh = figure.picture(player.history, position)
            assert {key: seen[figure.name][key] for key in fresh if key != "cells"} == {
                key: value for key, value in fresh.items() if key != "cells"
            }
    assert whole_bytes == block_map.CELL.size * 15


def test_a_step_of_a_large_pool_sends_the_blocks_it_touched():
    engine = make_engine(num_gpu_blocks_override=3_000, max_num_batched_tokens=64)
    add(engine, requests=4)
    player, sender = Player(engine.events), Sender((block_map.FIGURE,))
    engine.step()
    player.catch_up()
    sender.frame(player, True)
    for _ in range(5):
        engine.step()
        player.catch_up()
        _, words = cells_of(sender, player)
        assert 0 < len(words) // 3 <= 2 * 5  # of five sequences: the last block, and at most one more
    engine.close()


def test_a_view_tells_its_width_and_gets_a_picture_for_it(log, shown):
    view = shown(log, Dashboard)
    tell(view, type="hello")
    tell(view, type="width", width=500)
    tell(view, type="width", width=-3)
    assert view._sender.width == 1
    tell(view, type="width", width="wide")
    assert said(view) == ["that did not work: invalid literal for int() with base 10: 'wide'"]


def test_an_engine_whose_outputs_only_wait_to_be_returned_cannot_be_driven(engine, shown):
    view = shown(engine)
    add(engine, requests=1, max_tokens=2)
    told = []
    for _ in range(3):
        told.append(transport(view.player)["drivable"])
        tell(view, type="step", delta=1)
    assert told == [True, True, False]
    assert engine.has_unfinished_requests()


def test_the_pause_after_a_frame_keeps_to_the_share_within_the_frame_rates():
    assert pause_after(0.0, 0.0) == 1 / MOST_FRAMES
    assert pause_after(0.004, 0.004) + 0.004 == pytest.approx(0.004 / SHARE)
    assert pause_after(0.04, 0.04) + 0.04 == pytest.approx(1 / FEWEST_FRAMES)


def test_time_in_which_the_engine_had_the_processor_is_part_of_a_frames_period_but_not_all_of_it():
    assert pause_after(0.004, 0.02) + 0.02 == pytest.approx(0.004 / SHARE)
    assert pause_after(0.004, 2.0) == pytest.approx(0.004 / SHARE - 1 / MOST_FRAMES)


# ---------------------------------------------------------------------- the player


def test_two_views_of_one_log_share_position_and_pin(log, shown):
    one, two = shown(log), shown(log, Dashboard)
    assert one.player is two.player is player_of(log)
    tell(one, type="seek", position=2)
    tell(two, type="pin", request="r2")
    for view in (one, two):
        tell(view, type="hello")
        whole = next(message for message, _ in view.sent if message["whole"])
        assert (whole["transport"]["position"], whole["transport"]["pinned"]) == (2, "r2")


def test_a_live_player_follows_and_one_that_stepped_back_stays(engine):
    player = Player(engine.events, engine)
    add(engine)
    engine.step()
    player.catch_up()
    assert (player.position, player.live) == (0, True)
    for _ in range(3):
        engine.step()
    player.step(-1)
    assert (player.position, player.live) == (2, False)
    engine.step()
    player.catch_up()
    assert player.position == 2
    player.go_live()
    assert (player.position, player.live) == (4, True)


def test_a_saved_log_is_live_again_at_its_end(log):
    player = Player(log)
    player.seek(1)
    assert not player.live
    player.seek(10**6)
    assert player.live


def test_play_goes_on_by_itself_to_the_end_at_its_speed(ran):
    player, seen = Player(ran.events, ran), []
    player.set_speed(1000)
    player.play()
    assert (player.position, player.live, player.playing) == (0, False, True)
    stop = player.listen(lambda: seen.append(player.position))
    until(lambda: not player.playing)
    assert player.position == len(ran.events.records) - 1
    assert seen == sorted(seen)
    stop()


def test_pause_stays(ran):
    player = Player(ran.events, ran)
    player.play()
    player.pause()
    assert (player.position, player.live, player.playing) == (0, False, False)


def test_play_before_anything_ran_leaves_the_player_live(engine):
    player = Player(engine.events, engine)
    player.play()
    assert (player.position, player.live, player.playing) == (-1, True, False)


def test_next_preemption_goes_round(log):
    player = Player(log)
    expected = [position for position, record in enumerate(log.records) if record.preempted]
    player.seek(0)
    found = []
    for _ in range(len(expected) + 1):
        assert player.next_preemption()
        found.append(player.position)
    assert found == [*expected, expected[0]]
    assert not Player(EventLog(log.header, 10)).next_preemption()


def test_a_player_whose_listeners_left_has_no_thread_and_starts_one_for_the_next(log):
    player, drawn = Player(log), threading.Event()
    stop = player.listen(lambda: None)
    thread = player._thread
    stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    stop = player.listen(drawn.set)
    player.seek(1)
    assert drawn.wait(PATIENCE)
    stop()


# ---------------------------------------------------------------------- nothing drawn disturbs the engine


class Broken(block_map.BlockMap):
    def picture(self, history, position, look=None):
        raise ValueError("this figure is broken")


class BrokenView(View):
    figures = (Broken(),)


def test_a_failing_figure_is_let_go_with_a_warning_and_generation_goes_on(engine, shown, caplog):
    broken, sound = shown(engine, BrokenView), shown(engine)
    tell(sound, type="hello")
    with caplog.at_level(logging.WARNING):
        tell(broken, type="hello")
        add(engine)
        drive(engine)
        until(lambda: "let go" in caplog.text)
    assert said(broken) == ["that did not work: this figure is broken"]
    assert len(engine.events.records) > 10
    until(lambda: sound.sent[-1][0]["transport"]["position"] == len(engine.events.records) - 1)


def test_a_failing_listener_is_dropped_and_the_others_are_still_called(engine, caplog):
    player, called = Player(engine.events, engine), []

    def failing():
        raise ValueError("no")

    player.listen(failing)
    stop = player.listen(lambda: called.append(player.position))
    with caplog.at_level(logging.WARNING):
        add(engine, requests=1)
        drive(engine)
        until(lambda: called and called[-1] == len(engine.events.records) - 1)
    assert caplog.text.count("could not be drawn and is let go") == 1
    stop()


def test_steps_go_on_while_a_listener_takes_its_time(engine):
    player, entered, go_on = Player(engine.events, engine), threading.Event(), threading.Event()

    def slow():
        entered.set()
        go_on.wait(PATIENCE)

    stop = player.listen(slow)
    add(engine)
    engine.step()
    assert entered.wait(PATIENCE)
    drive(engine)
    assert not go_on.is_set()
    assert len(player.history) < len(engine.events.records)
    go_on.set()
    stop()
    player.catch_up()
    assert len(player.history) == len(engine.events.records)


def test_steps_go_on_while_a_picture_is_made(engine):
    """The player's lock is held then; the engine's thread never takes it."""
    player = Player(engine.events, engine)
    add(engine)
    with player.locked():
        thread = threading.Thread(target=drive, args=(engine,), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert len(player.history) == 0
    player.catch_up()
    assert player.position == len(engine.events.records) - 1 > 10


def test_a_closed_view_gets_no_more_frames(engine, shown):
    view = shown(engine)
    tell(view, type="hello")
    view.close()
    view.sent.clear()
    add(engine)
    drive(engine)
    view.player._thread and view.player._thread.join(PATIENCE)
    assert view.sent == []


# ---------------------------------------------------------------------- without a browser, and sources


def test_where_no_widget_runs_a_picture_stands_in_for_it(log, shown):
    view = shown(log, Dashboard)
    html = view._repr_html_()
    assert "<script" not in html
    assert html.count("<svg") >= len(ALL)
    assert f"Step {len(log.records) - 1} of" in html
    bundle = view._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == view.model_id
    assert data["text/html"] == html
    assert "blocks hold running sequences" in data["text/plain"]


def test_a_view_is_made_of_an_llm_an_engine_a_log_or_a_path(tmp_path):
    with LLM("tiny", num_gpu_blocks_override=20) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        engine = llm.engine
        player = player_for(llm)
        assert player_for(engine) is player_for(engine.events) is player_for(player) is player
        assert player.engine is engine
        for name in ("log.jsonl", "log.jsonl.gz"):
            engine.events.save(tmp_path / name)
            for path in (tmp_path / name, str(tmp_path / name)):
                loaded = player_for(path)
                assert loaded.engine is None
                assert list(loaded.history.records) == list(engine.events.records)


@pytest.mark.parametrize("nonsense", [None, 3, [], object(), {"engine": 1}])
def test_anything_else_is_refused(nonsense):
    with pytest.raises(RefimplError, match=f"an LLM or an Engine, .*this is a {type(nonsense).__name__}"):
        BlockMap(nonsense)


def test_a_path_that_holds_no_log_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("nothing")
    with pytest.raises(RefimplError, match="is no event log"):
        BlockMap(tmp_path / "x.jsonl")
    with pytest.raises(RefimplError, match="cannot be read"):
        BlockMap(str(tmp_path / "missing.jsonl"))


def test_an_engine_that_records_nothing_is_refused():
    engine = make_engine(event_log_size=0)
    with pytest.raises(RefimplError, match="event_log_size=0"):
        BlockMap(engine)
    engine.close()


# ---------------------------------------------------------------------- many requests


def test_ten_thousand_requests_are_counted_and_drawn():
    """Four at a time, one block each, one step each; the block of the last four stays taken."""
    config = {"model": "made up", "block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    config |= {"max_model_len": 64, "enable_prefix_caching": False, "async_scheduling": False, "enable_kv_cache": True}
    log = EventLog(LogHeader(1, "test", 0.0, "virtual", config | {"reserved_blocks": None}), 10_000)
    all_ids = range(10_000)
    arrived = tuple(ArrivalRecord(f"r{s}", (s,), (7, 8), ("a", "b")) for s in all_ids)
    for step in range(2_500):
        ids = tuple(range(4 * step, 4 * step + 4))
        log.append(
            StepRecord(
                step=step,
                scheduled_at=float(step),
                updated_at=step + 0.5,
                sequence_ids=ids,
                slots=(0, 1, 2, 3),
                num_new_tokens=(2,) * 4,
                token_ids=(9,) * 4,
                token_texts=("c",) * 4,
                arrived=arrived if step == 0 else (),
                admitted=tuple((s, slot, 0) for slot, s in enumerate(ids)),
                allocated=tuple((slot, (slot + 1,)) for slot in range(4)),
                finished=tuple(Finish(s, "length", (s % 4 + 1,)) for s in ids) if step < 2_499 else (),
                num_running=4,
                num_waiting=10_000 - 4 * step - 4,
            )
        )
    history = History(log)
    state = history.last
    assert (state.num_requests, state.num_finished, len(state.alive())) == (10_000, 9_996, 4)
    assert state.counts() == {"owned": 4, "shared": 0, "cached": 0, "free": 60}
    middle = history.state_at(1_000)
    assert (middle.num_finished, len(middle.alive())) == (4_004, 10_000 - 4_004)
    player = player_of(log)
    for position in (2_499, 1_000, 0):
        player.seek(position)
        message, _ = Sender(ALL).frame(player, True)
        assert message["transport"]["position"] == position
        assert len(json.dumps(message)) < 2_000_000
