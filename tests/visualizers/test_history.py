"""A history is as long as its log's ring: what fell out is forgotten by everyone, and said; what is kept stays the same."""

import json

import pytest

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.events import EventLog
from refimpl.visualizers import history as history_module
from refimpl.visualizers.batch_timeline import FIGURE as TIMELINE
from refimpl.visualizers.block_tables import FIGURE as TABLES
from refimpl.visualizers.figures import ALL
from refimpl.visualizers.frames import Sender
from refimpl.visualizers.history import History
from refimpl.visualizers.latency_fold import LatencyFold
from refimpl.visualizers.latency_view import FIGURE as LATENCY
from refimpl.visualizers.player import Player
from refimpl.visualizers.static_html import figures
from refimpl.visualizers.tail import Tail
from refimpl.visualizers.terminal import render
from refimpl.visualizers.timeline_rows import Timeline

EVERY, LIMIT = 16, 40


@pytest.fixture(autouse=True)
def short_pages(monkeypatch):
    monkeypatch.setattr(history_module, "KEYFRAME_EVERY", EVERY)


@pytest.fixture(scope="module")
def run():
    """Some 100 steps of requests that fork, copy, wait and are preempted."""
    sizes = {"block_size": 4, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = Engine(EngineArgs(model="tiny", **sizes))
    for number in range(24):
        params = SamplingParams(max_tokens=12, ignore_eos=True, n=1 + number % 2, seed=number)
        engine.add_request(f"r{number}", list(range(1, 6 + number % 9)), params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    assert len(engine.events.records) > 2 * LIMIT
    return engine.events


def ring(run, num_records=None):
    """The run's log as if its ring held ``LIMIT`` records, and a history that followed it from the beginning."""
    log = EventLog(run.header, LIMIT)
    history = History(log)
    for record in list(run.records)[:num_records]:
        log.append(record)
        history.append(record)
    return log, history


def test_a_tail_keeps_the_numbers_of_what_is_left():
    tail = Tail(range(10))
    tail.forget(4)
    assert (len(tail), list(tail), tail[4], tail[-1], tail[2:6], tail[8:]) == (10, [4, 5, 6, 7, 8, 9], 4, 9, [4, 5], [8, 9])
    for index in (3, 10, -7):
        with pytest.raises(IndexError, match="those from 4 to 9"):
            tail[index]
    tail.forget(99)
    assert (len(tail), list(tail), bool(tail)) == (10, [], False)


def test_a_history_keeps_no_more_than_the_ring_and_a_page(run):
    log = EventLog(run.header, LIMIT)
    history = History(log)
    for number, record in enumerate(run.records, start=1):
        history.append(record)
        assert len(history) == number
        assert min(number, LIMIT) <= history.records.num_kept < LIMIT + EVERY
        assert len(history._keyframes) <= LIMIT // EVERY + 2


def test_states_after_forgetting_are_those_of_the_whole_log(run):
    _, history = ring(run)
    whole = History(run)
    assert history.first > 0
    for position in (*range(len(history) - 1, history.first - 2, -7), history.first - 1):
        one, other = history.state_at(position), whole.state_at(position)
        assert one.record is other.record
        assert one.counts() == other.counts()
        assert one.fills().tolist() == other.fills().tolist()
        assert [(s.letter, s.hue, s.table, s.token_texts) for s in one.alive()] == [
            (s.letter, s.hue, s.table, s.token_texts) for s in other.alive()
        ]
    assert history.state_at(0).record is history.state_at(history.first - 1).record


@pytest.mark.parametrize("late", [False, True])
def test_a_timeline_forgets_with_its_history_and_one_begun_late_knows_who_is_there(run, late):
    log = EventLog(run.header, LIMIT)
    history = History(log)
    for record in run.records:
        history.append(record)
        if not late:
            history.fold(Timeline)
    timeline, whole = history.fold(Timeline), History(run).fold(Timeline)
    assert timeline.columns.first == history.first
    assert timeline.rows.num_kept < len(whole.rows)
    kept = {row.sequence_id: row for row in timeline.rows}
    for row in whole.rows:
        if row.gone is None or row.gone > history.first:
            other = kept[row.sequence_id]
            assert (other.letter, other.end) == (row.letter, row.end)
            for column in range(history.first + 1, len(history)):
                assert other.at(column)[0] == row.at(column)[0], (row.letter, column)
    assert [c.owned for c in timeline.columns] == [c.owned for c in whole.columns[history.first :]]


@pytest.mark.parametrize("late", [False, True])
def test_latencies_are_those_of_the_records_that_are_kept(run, late):
    log = EventLog(run.header, LIMIT)
    history, whole = History(log), History(run)
    for record in run.records:
        history.append(record)
        if not late:
            history.fold(LatencyFold)
    last, before = len(history) - 1, whole.fold(LatencyFold).num_first[history.first - 1]
    picture, other = LATENCY.picture(history, last), LATENCY.picture(whole, last)
    assert picture["first"]["count"] == other["first"]["count"] - before
    assert [dot[4] for dot in picture["first"]["dots"]] == [dot[4] for dot in other["first"]["dots"]][before:]
    fold = history.fold(LatencyFold)
    assert fold.num_first.num_kept == history.records.num_kept
    assert len(fold._request_of) < len(whole.fold(LatencyFold)._request_of)


def test_the_latest_copy_is_told_as_long_as_its_record_is_kept(run):
    _, history = ring(run)
    whole = History(run)
    copies = [position for position, record in enumerate(run.records) if record.copies]
    for position in range(history.first, len(history)):
        latest = max((at for at in copies if at <= position), default=-1)
        if latest >= history.first:
            picture = TABLES.picture(history, position)
            assert (picture["kind"], picture["source"]) == ("copy", TABLES.picture(whole, position)["source"])
            assert picture["tokens"] == TABLES.picture(whole, position)["tokens"]


def test_a_player_stays_within_what_is_kept_and_says_what_is_not(run):
    log = EventLog(run.header, LIMIT)
    player, sender = Player(log), Sender(ALL)
    records = list(run.records)
    for record in records[:20]:
        log.append(record)
    player.seek(3)
    for start in range(20, len(records), 10):
        for record in records[start : start + 10]:
            log.append(record)
        player.catch_up()
        message, _ = sender.frame(player, False)
        assert message["transport"]["first"] == message["transport"]["gone"] == player.history.first
        assert player.position == max(3, player.history.first)
        json.dumps(message, allow_nan=False)
    assert player.history.first > 3
    player.seek(0)
    assert player.position == player.history.first
    player.go_live()
    assert player.position == len(records) - 1
    assert player.next_preemption()
    assert player.history.first <= player.position
    told = f"first {player.history.first}"
    assert told in render(player.history, len(records) - 1, 160)
    assert told in figures((TIMELINE,), player.history, len(records) - 1)


def test_a_view_that_fell_behind_the_ring_begins_anew(run):
    log = EventLog(run.header, LIMIT)
    player, sender = Player(log), Sender(ALL)
    records = list(run.records)
    log.append(records[0])
    player.catch_up()
    assert sender.frame(player, True)[0]["whole"]
    for record in records[1 : LIMIT + 30]:
        log.append(record)
    player.catch_up()
    message, _ = sender.frame(player, False)
    assert message["whole"]
    assert message["transport"]["count"] == LIMIT
