"""The fold of timelines: rows, columns and reasons say what the scheduler and its sequences did, overlap or not."""

import contextlib
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from prove import random_call, random_driver
from sharing_support import Driver

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.cache.shadow import ShadowExecutor
from refimpl.decision_texts import describe
from refimpl.errors import RequestError
from refimpl.events import ArrivalRecord, StepRecord
from refimpl.outputs import NO_TOKEN, Finish, Preemption
from refimpl.visualizers.state import State
from refimpl.visualizers.timeline_books import CAUSES, MEMORY, SLOT
from refimpl.visualizers.timeline_overview import BINS, LINES, Overview
from refimpl.visualizers.timeline_rows import Timeline
from refimpl.visualizers.timeline_runs import (
    DECODE,
    FOLLOWS,
    GONE,
    IDLE,
    PADDING,
    PREEMPTED,
    PREFILL,
    QUEUE,
    QUEUED,
    STATES,
    SWAPPED,
    WAITING,
    WITH_SLOT,
    Row,
)

CONFIG = {"block_size": 4, "num_blocks": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_kv_cache": True}


class Endless(Driver):
    """Draws no token that ends a sequence."""

    def __init__(self, **options):
        super().__init__(**options)
        self.executor = ShadowExecutor(self.kv.block_size, lambda path, token_ids: 1 + len(token_ids) % 6)

    def run(self, max_steps=3000):
        for _ in range(max_steps):
            self.step()
            if not self.scheduler.has_unfinished and not self.in_flight:
                return self
        raise AssertionError(f"not done after {max_steps} steps")


def folded(config, records):
    timeline = Timeline(config)
    fold(timeline, State(config), records)
    return timeline


def fold(timeline, state, records):
    """The records that a timeline does not have yet; ``state`` is that after those it has."""
    for record in records[len(timeline) :]:
        state.apply(record)
        timeline.apply(record, state)


def timeline_of(driver):
    return folded(driver.recorder.events.header.config, list(driver.recorder.events.records))


def ends(record):
    return (*record.aborted, *record.exhausted, *record.finished)


def states(timeline, column, wanted):
    return {row.sequence_id for row in timeline.rows if row.at(column)[0] in wanted}


def assert_the_queue_is_the_schedulers(timeline, driver):
    """After a step whose tokens are known; who was added or ended since is not in the log yet."""
    scheduler, column = driver.scheduler, len(timeline) - 1
    told = {row.sequence_id for row in timeline.rows}
    waiting = {s for s, sequence in scheduler.sequences.items() if sequence.slot is None and s in told}
    queued = {s for s in waiting if scheduler.waiting.waits(scheduler.sequences[s])}
    if driver.kv.can_share:
        assert states(timeline, column, QUEUE) == queued
    assert states(timeline, column, QUEUE | {FOLLOWS}) == waiting


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_the_lives_of_the_sequences_in_random_runs(seed):
    rng = random.Random(seed)
    driver = random_driver(rng)
    config, records = driver.recorder.events.header.config, driver.recorder.events.records
    live, state = Timeline(config), State(config)
    for _ in range(120):
        name, arguments = random_call(rng, driver)
        with contextlib.suppress(RequestError):
            getattr(driver, name)(**arguments)
        if name == "step" and not driver.in_flight and len(records) > len(live):
            fold(live, state, list(records))
            assert_the_queue_is_the_schedulers(live, driver)
    driver.run()
    fold(live, state, list(records))
    sequences = {s.sequence_id: s for request in driver.requests.values() for s in request.sequences}
    assert [row.sequence_id for row in live.rows] == sorted(sequences)
    for row in live.rows:
        sequence = sequences[row.sequence_id]
        assert row.sums(len(live))[1] == len(sequence.output_token_ids)
        assert len(row.preemptions) == sequence.num_preemptions
        assert (row.end[2], row.state) == (sequence.finish_reason, GONE)
        [told, *_] = [i for i, r in enumerate(records) if row.sequence_id in [f.sequence_id for f in ends(r)]]
        assert row.end[:2] == (told + (row.sequence_id in [f.sequence_id for f in records[told].finished]), told)
        admitted = [i for i, record in enumerate(records) if row.sequence_id in [a[0] for a in record.admitted]]
        took_slot = [i for i in range(len(live)) if row.at(i)[0] in WITH_SLOT and row.at(i - 1)[0] not in WITH_SLOT]
        assert set(took_slot) <= set(admitted)
        assert min(took_slot, default=None) == min(admitted, default=None)
        preempted = [i for i, record in enumerate(records) if row.sequence_id in [p.sequence_id for p in record.preempted]]
        assert row.preemptions == preempted


@pytest.mark.parametrize("seed", range(40))
def test_columns_are_the_records_of_random_runs(seed):
    rng = random.Random(seed)
    driver = random_driver(rng)
    for _ in range(120):
        name, arguments = random_call(rng, driver)
        with contextlib.suppress(RequestError):
            getattr(driver, name)(**arguments)
    driver.run()
    timeline = timeline_of(driver)
    state = State(driver.recorder.events.header.config)
    for index, (record, column) in enumerate(zip(driver.recorder.events.records, timeline.columns, strict=True)):
        state.apply(record)
        assert column.prefill + column.decode + column.padding == sum(record.num_new_tokens)
        assert {"owned": column.owned, "shared": column.shared, "cached": column.cached}.items() <= state.counts().items()
        assert states(timeline, index, {PREFILL, DECODE, PADDING}) >= set(record.sequence_ids)
        assert column.num_alive == len(states(timeline, index, set(range(1, 10))))
    waited = sum(row.sums(len(timeline))[0] for row in timeline.rows)
    assert waited == (sum(timeline.columns[-1].waits) if timeline.columns else 0)
    drawn = sum(sum(t >= 0 for t in r.token_ids) + sum(r.num_accepted) for r in driver.recorder.events.records)
    assert drawn == sum(row.sums(len(timeline))[1] for row in timeline.rows)


def test_a_decode_is_a_step_and_a_token_and_the_first_token_comes_with_the_prefill():
    driver = Endless(num_blocks=40)
    request = driver.add(range(1, 11), max_tokens=7)
    driver.run()
    [row] = timeline_of(driver).rows
    prefill, decode = row.runs(0, 100)[:5], row.runs(0, 100)[5:]
    assert prefill == [0, 1, PREFILL, 1, 10]
    assert decode == [1, 7, DECODE, 1, 0]
    assert row.end == (7, 6, "length")
    assert row.first_token_at == pytest.approx(request.metrics.first_token_time - driver.recorder._started_at, abs=5)


def test_a_chunk_draws_no_token():
    driver = Endless(num_blocks=40, max_num_batched_tokens=4)
    driver.add(range(1, 11), max_tokens=2)
    driver.run()
    assert timeline_of(driver).rows[0].runs(0, 9) == [0, 2, PREFILL, 0, 4, 2, 3, PREFILL, 1, 2, 3, 4, DECODE, 1, 0]


def test_who_waits_for_a_slot_waits_until_one_is_free_and_knows_behind_whom():
    driver = Endless(num_blocks=40, max_num_seqs=1)
    for number in range(3):
        driver.add([number, 2, 3], max_tokens=4)
    driver.run()
    timeline = timeline_of(driver)
    assert [row.sums(len(timeline))[0] for row in timeline.rows] == [0, 4, 8]
    assert timeline.columns[-1].waits[SLOT] == sum(timeline.columns[-1].waits) == 12
    assert [(hold.row, hold.since, hold.until) for hold in timeline.holds.all] == [(1, 0, 4), (2, 4, 8)]
    told = [d for record in driver.recorder.events.records for d in record.decisions if d.kind == "waits_slot"]
    assert [hold.text for hold in timeline.holds.all] == [describe(decision) for decision in told]
    assert timeline.columns[3].num_waited == 2


def test_a_preempted_sequence_waits_again_and_its_prefill_is_one():
    driver = Endless(num_blocks=6, watermark=0, max_model_len=24, prefix_cache=False)
    driver.add([1] * 8, max_tokens=10)
    driver.add([2] * 8, max_tokens=6)
    driver.run()
    timeline = timeline_of(driver)
    [at] = timeline.rows[1].preemptions
    assert timeline.rows[1].at(at)[0] == QUEUED
    back = next(i for i in range(at, len(timeline)) if timeline.rows[1].at(i)[0] != QUEUED)
    assert timeline.rows[1].at(back)[0] == PREFILL
    assert timeline.rows[1].sums(len(timeline)) == (back - at, 6)
    assert timeline.columns[-1].waits[MEMORY] > 0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_samples_follow_their_leader_and_are_forked_from_its_row(prefix_cache):
    driver = Endless(num_blocks=40, max_num_batched_tokens=4, prefix_cache=prefix_cache)
    driver.add([1, 2, 3, 4, 5], n=3, max_tokens=4)
    driver.run()
    timeline = timeline_of(driver)
    assert [row.at(0)[0] for row in timeline.rows] == [PREFILL, FOLLOWS, FOLLOWS]
    assert [(row.parent, row.forked, row.at(1)) for row in timeline.rows[1:]] == [(0, 1, (DECODE, 1, 0))] * 2
    assert [row.sums(len(timeline)) for row in timeline.rows] == [(0, 4)] * 3


def test_the_padding_of_a_static_batch_is_shown_until_the_batch_ends():
    driver = Endless(num_blocks=40, scheduler="static", max_num_seqs=2)
    for max_tokens in (3, 8, 2):
        driver.add([max_tokens, 2, 3], max_tokens=max_tokens)
    driver.run()
    timeline = timeline_of(driver)
    short, long, late = timeline.rows
    assert short.runs(0, 99) == [0, 1, PREFILL, 1, 3, 1, 3, DECODE, 1, 0, 3, 8, PADDING, 0, 0]
    assert (short.end, long.end) == ((3, 2, "length"), (8, 7, "length"))
    assert late.runs(0, 8) == [0, 8, WAITING, 0, 0]
    assert [column.padding for column in timeline.columns] == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert (timeline.padded_steps, timeline.slot_steps, timeline.num_drawn) == (5, 18, 13)


def test_with_overlap_a_row_planned_before_its_end_was_known_is_computed_for_nobody():
    """Token 0 ends a sequence, which no one knows when the next step is planned."""
    driver = Driver(num_blocks=40, depth=1)
    driver.executor = ShadowExecutor(4, lambda path, token_ids: 0 if len(token_ids) >= 5 else 3)
    driver.add([1, 2, 3], max_tokens=9)
    with contextlib.suppress(AssertionError):  # these tokens are not those that it expects
        driver.run()
    timeline = timeline_of(driver)
    [row] = timeline.rows
    assert row.runs(0, 99) == [0, 1, PREFILL, 1, 3, 1, 3, DECODE, 1, 0, 3, 4, PADDING, 0, 0]
    assert row.end == (3, 2, "stop")
    assert [(c.prefill, c.decode, c.padding) for c in timeline.columns] == [(3, 0, 0), (0, 1, 0), (0, 1, 0), (0, 0, 1)]


def test_with_overlap_a_preemption_of_what_has_ended_is_a_mark_and_no_wait():
    records = [
        StepRecord(
            0, 0.0, 1.0, (0,), (0,), (2,), (5,), ("x",), arrived=(arrival(0),), admitted=((0, 0, 0),), finished=(END,)
        ),
        StepRecord(1, 0.5, 2.0, preempted=(Preemption(0, "recompute", ()),)),
    ]
    timeline = folded(CONFIG, records)
    [row] = timeline.rows
    assert (row.preemptions, row.state, row.sums(2)) == ([1], GONE, (0, 1))
    assert timeline.columns[1].num_preemptions == 1


def test_a_swapped_sequence_is_told_from_one_that_is_recomputed():
    records = [
        StepRecord(0, 0.0, 1.0, (0,), (0,), (2,), (5,), ("x",), arrived=(arrival(0),), admitted=((0, 0, 0),)),
        StepRecord(1, 1.0, 2.0, preempted=(Preemption(0, "swap", ()),)),
    ]
    timeline = folded(CONFIG, records)
    assert timeline.rows[0].state == SWAPPED


def test_a_row_that_draws_accepted_drafts_counts_them():
    first = StepRecord(0, 0.0, 1.0, (0,), (0,), (2,), (5,), ("x",), arrived=(arrival(0),), admitted=((0, 0, 0),))
    more = {"drafts": ((1, 2, 3, 4),), "draft_texts": (("a", "b", "c", "d"),), "num_drafts": (4,)}
    round_ = StepRecord(1, 1.0, 2.0, (0,), (0,), (5,), (6,), ("y",), **more, num_accepted=(3,))
    timeline = folded(CONFIG, [first, round_, round_])
    assert timeline.rows[0].runs(0, 3) == [0, 1, PREFILL, 1, 2, 1, 3, DECODE, 4, 4], "a check is no prefill"
    assert (timeline.most_drawn, timeline.num_drawn) == (4, 9)
    refused = StepRecord(2, 2.0, 3.0, (0,), (0,), (5,), (6,), ("y",), **more, num_accepted=(0,))
    plain = StepRecord(3, 3.0, 4.0, (0,), (0,), (1,), (6,), ("y",))
    ends = StepRecord(4, 4.0, 5.0, (0,), (0,), (5,), (-1,), ("",), **more, num_accepted=(2,), finished=(END,))
    row = folded(CONFIG, [first, refused, plain, plain, ends]).rows[0]
    assert row.runs(1, 5) == [1, 2, DECODE, 1, 4, 2, 4, DECODE, 1, 0, 4, 5, DECODE, 2, 4]
    assert row.sums(5)[1] == 6, "an end among accepted drafts leaves no token behind them"


def test_a_log_that_lost_its_beginning_shows_who_runs_in_it():
    driver = Endless(num_blocks=40, max_num_seqs=2)
    for number in range(3):
        driver.add([number, 2, 3], max_tokens=6)
    driver.run()
    records = list(driver.recorder.events.records)[2:]
    timeline = folded(driver.recorder.events.header.config, records)
    assert [(row.letter, row.state) for row in timeline.rows] == [("?0", GONE), ("?1", GONE), ("?2", GONE)]
    assert timeline.rows[0].runs(0, 99) == [0, 4, DECODE, 1, 0]
    assert [c.prefill + c.decode + c.padding for c in timeline.columns] == [sum(r.num_new_tokens) for r in records]


def test_a_step_that_changes_nothing_costs_no_run(monkeypatch):
    """The work on rows is the same for answers of 20 tokens and of 200."""
    calls = []
    monkeypatch.setattr(Row, "set", lambda self, *args, real=Row.set: (calls.append(1), real(self, *args)))
    work = []
    for max_tokens in (20, 200):
        driver = Endless(num_blocks=300, max_num_seqs=4, max_model_len=300)
        for number in range(4):
            driver.add([number, 2, 3], max_tokens=max_tokens)
        driver.run()
        calls.clear()
        timeline = timeline_of(driver)
        work.append((len(calls), sum(len(row.starts) for row in timeline.rows)))
        assert [row.sums(len(timeline))[1] for row in timeline.rows] == [max_tokens] * 4
    assert work[0] == work[1]


# ---------------------------------------------------------------------- the overview

END = Finish(0, "stop", ())


def arrival(number):
    return ArrivalRecord(f"r{number}", (number,), (1, 2), ("a", "b"))


def grid(overview):
    """Each line of an overview as its states."""
    return [[state for at in range(0, len(runs), 2) for state in [runs[at]] * runs[at + 1]] for runs in overview.lines()]


def test_an_overview_of_few_steps_and_rows_is_the_timeline_itself():
    driver = Endless(num_blocks=6, watermark=0, max_model_len=24)
    for number in range(3):
        driver.add([number] * 8, max_tokens=10)
    driver.run()
    timeline = timeline_of(driver)
    expected = [[row.at(column)[0] for column in range(len(timeline))] for row in timeline.rows]
    for row in timeline.rows:
        for column in row.preemptions:
            expected[row.index][column] = PREEMPTED
    assert any(row.preemptions for row in timeline.rows)
    assert grid(timeline.overview) == expected


@pytest.mark.parametrize("seed", range(5))
def test_an_overview_merges_by_priority_and_loses_no_event(seed):
    """Against cells that are kept one by one."""
    rng = random.Random(seed)
    overview, rows, columns = Overview(len(STATES)), 3 * LINES + 5, 2 * BINS + 77
    now, cells = [GONE] * rows, {}
    for column in range(columns):
        for row in rng.sample(range(rows), 3):
            if row > column / columns * rows:
                continue
            state = rng.choice([GONE, WAITING, DECODE, PREFILL, QUEUED, IDLE])
            if state != now[row]:
                overview.change(row, now[row], state)
                now[row] = state
            if state == QUEUED:
                overview.mark(row, PREEMPTED)
                cells[row, column] = PREEMPTED
        overview.close(column)
        for row, state in enumerate(now):
            cells.setdefault((row, column), state)
    merged = {}
    for (row, column), state in cells.items():
        cell = row // overview.rows_per_line, column // overview.steps_per_bin
        merged[cell] = max(merged.get(cell, GONE), state)
    drawn = {(y, x): state for y, line in enumerate(grid(overview)) for x, state in enumerate(line)}
    assert drawn == {cell: state for cell, state in merged.items() if cell in drawn}
    assert all(state == GONE for cell, state in merged.items() if cell not in drawn)
    assert (overview.rows_per_line, overview.steps_per_bin) == (4, 4)


def test_causes_have_a_number_each():
    assert len(CAUSES) == len(set(CAUSES))
    driver = Endless(num_blocks=6, watermark=0, max_model_len=24)
    driver.add([1] * 8, max_tokens=9)
    driver.add([2] * 16, max_tokens=2)
    driver.run()
    timeline = timeline_of(driver)
    assert timeline.holds.for_memory
    assert timeline.holds.at(timeline.holds.for_memory[0].since) is timeline.holds.for_memory[0]
    assert timeline.columns[-1].waits[MEMORY] == timeline.rows[1].sums(len(timeline))[0]
    assert NO_TOKEN not in [t for record in driver.recorder.events.records for t in record.token_ids]


def test_a_replayed_log_of_a_cache_that_cannot_share_has_no_followers():
    """There each sample computes the prompt on its own: it waits for a slot, not for another sample."""
    engine = Engine(EngineArgs(model="tiny", kv_cache_manager="contiguous", max_model_len=64, max_num_seqs=1))
    engine.add_request("a", [1, 2, 3], SamplingParams(n=3, max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    config, records = engine.events.header.config, list(engine.events.records)
    assert config["can_share"] is False
    for told in (config, {key: value for key, value in config.items() if key != "can_share"}):
        timeline = folded(told, records)
        assert [row.at(0)[0] for row in timeline.rows] == [PREFILL, WAITING, WAITING]
