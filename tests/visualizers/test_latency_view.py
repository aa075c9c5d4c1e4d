"""LatencyView: its numbers are the requests' own metrics, at every position of the log."""

import contextlib
import itertools
import json
import random
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from prove import random_call, random_driver
from sharing_support import Driver

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.errors import RequestError
from refimpl.events import SCHEMA_VERSION, ArrivalRecord, EventLog, LogHeader, StepRecord
from refimpl.outputs import Finish
from refimpl.visualizers.figure import plain
from refimpl.visualizers.history import History
from refimpl.visualizers.latency_column import SHORTEST, Column
from refimpl.visualizers.latency_fold import LatencyFold
from refimpl.visualizers.latency_view import FIGURE, MOST_DOTS, _axis, seconds_text, swarm
from refimpl.visualizers.palette import DARK, LIGHT

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class Clock:
    """Stands still within a step, so that every reading of one step is the same."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def run(overlap=False, clock=None, num_requests=6, **options):
    """A tiny engine with chunks, waits and preemptions: (its event log, metrics by request)."""
    sizes = {"block_size": 4, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 16, "max_num_seqs": 4} | options
    clock = clock or Clock()
    engine = Engine(EngineArgs(model="tiny", async_scheduling=overlap, **sizes), clock=clock)
    metrics = {}
    for step in itertools.count():
        if step < num_requests:
            params = SamplingParams(max_tokens=12, ignore_eos=True, n=2 if step == 1 else 1, seed=step)
            engine.add_request(f"r{step}", list(range(1, 5 + 3 * step)), params)
        elif not engine.has_unfinished_requests():
            break
        if isinstance(clock, Clock):
            clock.now += 0.01 * (1 + step % 7)
        for output in engine.step():
            metrics[output.request_id] = output.metrics
    engine.close()
    assert any(record.preempted for record in engine.events.records)
    return engine.events, metrics


def gaps_of(metrics):
    return [gap for one in metrics.values() for sample in one.inter_token_latencies for gap in sample]


@pytest.fixture(scope="module")
def ran():
    return run()


def picture(log, position=10**9):
    return FIGURE.picture(History(log), position)


# ---------------------------------------------------------------------- against the engine


def test_the_time_to_the_first_token_is_that_of_the_metrics(ran):
    log, metrics = ran
    dots = {dot[4]: dot for dot in picture(log)["first"]["dots"]}
    assert dots.keys() == metrics.keys()
    for request_id, one in metrics.items():
        seconds, queued = dots[request_id][:2]
        assert seconds == pytest.approx(one.time_to_first_token, abs=1e-6)
        assert queued == pytest.approx(one.first_scheduled_time - one.arrival_time, abs=1e-6)


@pytest.mark.parametrize("overlap", [False, True], ids=["depth 0", "depth 1"])
def test_with_a_moving_clock_times_are_right_up_to_the_work_of_one_step(overlap):
    """Each reading of this clock is a tick, so the difference is a count of readings: some for each row of a step."""
    clock = map(float, itertools.count(1000))
    log, metrics = run(overlap, clock=lambda: next(clock))
    dots = {dot[4]: dot for dot in picture(log)["first"]["dots"]}
    for request_id, one in metrics.items():
        assert abs(dots[request_id][0] - one.time_to_first_token) <= 12
    assert picture(log)["pauses"]["count"] == len(gaps_of(metrics))


def test_pauses_are_those_of_the_metrics_quantiles_included(ran):
    log, metrics = ran
    gaps, panel = gaps_of(metrics), picture(log)["pauses"]
    assert panel["count"] == len(gaps) == sum(panel["bars"])
    assert panel["p50"] == pytest.approx(np.quantile(gaps, 0.5))
    assert panel["p99"] == pytest.approx(np.quantile(gaps, 0.99))
    assert panel["longest"][0] == pytest.approx(max(gaps))


def test_the_longest_pause_says_its_cause_and_its_record(ran):
    log, _ = ran
    seconds, _, label, request_id, position = picture(log)["pauses"]["longest"]
    assert "preempted" in label
    assert label.endswith(seconds_text(seconds))
    record = log.records[position]
    ids = {s for r in log.records for arrival in r.arrived if arrival.request_id == request_id for s in arrival.sequence_ids}
    assert ids & set(record.sequence_ids)
    assert any(p.sequence_id in ids for r in log.records for p in r.preempted)


def test_a_picture_of_the_past_knows_nothing_of_later(ran):
    log, _ = ran
    history = History(log)
    for position in (0, 3, len(history) // 2, len(history) - 1):
        cut = EventLog(log.header, len(history))
        for record in history.records[: position + 1]:
            cut.append(record)
        then, alone = FIGURE.picture(history, position), picture(cut)
        assert then["caption"] == alone["caption"]
        for panel, keys in (("first", ("dots", "waiting", "count")), ("pauses", ("count", "bars", "p50", "longest"))):
            assert [then[panel][key] for key in keys] == [alone[panel][key] for key in keys]


def test_requests_without_a_token_are_rings(ran):
    log, _ = ran
    first = FIGURE.picture(History(log), 3)["first"]
    arrived = {a.request_id for record in list(log.records)[:4] for a in record.arrived}
    with_token, waiting = {dot[4] for dot in first["dots"]}, {row[3] for row in first["waiting"]}
    assert with_token | waiting == arrived
    assert not with_token & waiting
    assert first["num_waiting"] == len(waiting) > 0
    assert [row[0] for row in first["waiting"]] == sorted((row[0] for row in first["waiting"]), reverse=True)


def test_a_history_is_folded_once(ran, monkeypatch):
    log, _ = ran
    history, applied = History(log), []
    apply = LatencyFold.apply
    monkeypatch.setattr(
        LatencyFold, "apply", lambda fold, record, state: (applied.append(record.step), apply(fold, record, state))
    )
    for position in (5, -1, len(history) - 1, 2):
        FIGURE.picture(history, position)
    assert len(applied) == len(history)
    history.append(StepRecord(step=10_000, scheduled_at=1e3, updated_at=1e3))
    FIGURE.picture(history, len(history) - 1)
    assert len(applied) == len(history)


def test_a_static_batchs_padding_has_no_latency():
    log, metrics = run(scheduler="static", num_gpu_blocks_override=16)
    assert picture(log)["pauses"]["count"] == len(gaps_of(metrics))


@pytest.mark.parametrize("seed", range(12))
def test_first_tokens_and_pauses_of_random_runs_are_all_counted(seed):
    rng = random.Random(seed)
    driver = random_driver(rng)
    for _ in range(80):
        name, arguments = random_call(rng, driver)
        with contextlib.suppress(RequestError):
            getattr(driver, name)(**arguments)
    driver.run()
    drawn = picture(driver.recorder.events)
    times = [[set(s.token_times) for s in request.sequences] for request in driver.requests.values()]
    assert drawn["first"]["count"] == sum(any(samples) for samples in times)
    assert drawn["pauses"]["count"] == sum(max(0, len(moments) - 1) for samples in times for moments in samples)


def test_a_reason_to_wait_is_the_schedulers_sentence():
    driver = Driver(num_blocks=10, max_num_seqs=1)
    for number in range(2):
        driver.add([number, 2, 3], max_tokens=4)
    driver.run()
    drawn = picture(driver.recorder.events)
    assert drawn["first"]["reasons"] == ["", "waits: all 1 slots are taken"]
    assert "in the queue (all 1 slots are taken)" in plain(drawn["caption"])


# ---------------------------------------------------------------------- no requests, a log's middle, many requests


def test_no_requests_yet(ran):
    empty = picture(EventLog(ran[0].header, 10))
    assert plain(empty["caption"]) == "No requests yet."
    assert FIGURE.picture(History(ran[0]), -1)["caption"] == empty["caption"]
    ElementTree.fromstring(FIGURE.svg(empty, LIGHT))


def test_a_log_that_lost_its_beginning_keeps_its_pauses(ran):
    log, metrics = ran
    cut = EventLog(log.header, len(log.records))
    for record in list(log.records)[9:]:
        cut.append(record)
    drawn = picture(cut)
    assert 0 < drawn["pauses"]["count"] < len(gaps_of(metrics))
    assert all(dot[4] in metrics for dot in drawn["first"]["dots"])
    ElementTree.fromstring(FIGURE.svg(drawn, DARK))


def test_many_requests_are_bars():
    config = {"block_size": 4, "num_blocks": 10}
    log = EventLog(LogHeader(SCHEMA_VERSION, "0", 0.0, "virtual", config), 100_000)
    for number in range(MOST_DOTS + 1):
        arrived = (ArrivalRecord(f"r{number}", (number,), (1,), ("a",)),)
        rows = {"sequence_ids": (number,), "slots": (0,), "num_new_tokens": (1,), "token_ids": (5,), "token_texts": ("b",)}
        ends = (Finish(number, "length", ()),)
        log.append(
            StepRecord(number, number, number + 0.02, arrived=arrived, admitted=((number, 0, 0),), finished=ends, **rows)
        )
    history = History(log)
    as_dots, as_bars = (FIGURE.picture(history, position) for position in (MOST_DOTS - 1, MOST_DOTS))
    assert len(as_dots["first"]["dots"]) == MOST_DOTS == sum(as_dots["first"]["bars"])
    assert as_bars["first"]["dots"] == []
    assert sum(as_bars["first"]["bars"]) == as_bars["first"]["count"] == MOST_DOTS + 1
    assert len(json.dumps(as_bars)) < 3_000
    assert "a bar counts requests" in FIGURE.svg(as_bars, LIGHT)


# ---------------------------------------------------------------------- form


def test_the_picture_is_json_and_the_svg_says_its_caption(ran):
    drawn = picture(ran[0])
    again = json.loads(json.dumps(drawn))
    for palette in (LIGHT, DARK):
        root = ElementTree.fromstring(FIGURE.svg(again, palette))
        assert root.get("aria-label") == plain(drawn["caption"])
        assert len([e for e in root.iter() if e.tag.endswith("circle")]) == len(drawn["first"]["dots"]) + 1
    assert [bold for _, bold in drawn["caption"]].count(True) == 2


def test_a_column_gives_exact_quantiles_of_each_prefix():
    values = np.random.default_rng(0).lognormal(-4, 1, 5000).tolist()
    column = Column()
    for start in range(0, 5000, 700):
        column.extend(values[start : start + 700])
    for size in (1, 2, 3, 999, 5000):
        told = column.distribution(size)
        assert told["p50"] == pytest.approx(np.quantile(values[:size], 0.5))
        assert told["p99"] == pytest.approx(np.quantile(values[:size], 0.99))
        assert sum(told["bars"]) == size
    assert column.distribution(0)["p50"] is None
    column.extend([0.0])
    assert column.low == SHORTEST


def test_pauses_of_a_virtual_clock_are_equal_but_for_rounding_and_their_quantiles_are_that_pause():
    pauses = np.diff(0.02 * np.arange(2000)).tolist()
    assert len(set(pauses)) > 1
    column = Column()
    column.extend(pauses)
    for size in (1, 1999):
        told = column.distribution(size)
        assert told["p50"] == pytest.approx(0.02, rel=1e-9)
        assert told["p99"] == pytest.approx(0.02, rel=1e-9)
    column.extend([0.02001] * 2001)  # in the same bar, and told apart
    assert column.distribution(4000)["p50"] == pytest.approx(0.02001, rel=1e-9)


@pytest.mark.parametrize(("low", "high"), [(0.011, 0.32), (3e-6, 4000.0), (0.5, 0.5), (float("inf"), 0.0), (1e-6, 1e-6)])
def test_an_axis_spans_its_values_and_at_least_about_a_decade(low, high):
    told = _axis(low, high)
    start, end = told["axis"]
    if high:
        assert start < low <= high < end
    assert end >= 9.9 * start
    assert 2 <= len(told["ticks"]) <= 12
    assert all(start * 0.999 <= seconds <= end * 1.001 for seconds, _ in told["ticks"])


def test_seconds_have_three_digits():
    written = [seconds_text(s) for s in (0.00042, 0.0107, 0.467, 1.08, 12.34, 123.4, 0.00534, 0.9996)]
    assert written == ["420 µs", "10.7 ms", "467 ms", "1.08 s", "12.3 s", "123 s", "5.3 ms", "1.00 s"]


def test_dots_of_a_swarm_do_not_touch_while_there_are_lanes():
    xs = sorted(np.random.default_rng(1).uniform(0, 300, 150).tolist())
    lanes = swarm(xs, 9, 15)
    for (x, lane), (other, other_lane) in itertools.combinations(zip(xs, lanes, strict=True), 2):
        assert lane != other_lane or other - x >= 9
    assert max(map(abs, swarm([0.0] * 50, 9, 5))) == 2
