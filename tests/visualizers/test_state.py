"""The fold of event records: at every step of random runs it says what the engine's own books say."""

import contextlib
import random
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from prove import random_call, random_driver
from sharing_support import Driver

from refimpl import LLM, BeamSearchParams, SamplingParams
from refimpl.errors import RequestError
from refimpl.events import EventLog
from refimpl.visualizers.history import History
from refimpl.visualizers.sequence_state import NEUTRAL
from refimpl.visualizers.state import State
from refimpl.visualizers.words import letters


def books(state):
    return {s.sequence_id: tuple(s.table) for s in state.alive() if s.table}


def assert_same(state, driver):
    """The fold against the manager's snapshot and the scheduler's sequences."""
    snapshot = driver.scheduler.snapshot()
    assert_same_swap(state, driver, snapshot)
    assert books(state) == {s: table for s, table in snapshot.tables.items() if table}
    kinds = {
        kind: {b.block_id for b in map(state.block, range(state.num_blocks + 1)) if b.kind == kind}
        for kind in ("free", "cached", "null")
    }
    assert kinds == {"free": set(snapshot.free_ids), "cached": set(snapshot.cached_ids), "null": {0}}
    counts = state.counts()
    assert sum(counts.values()) == driver.kv.num_blocks
    assert counts["free"] + counts["cached"] == len(snapshot.free_ids) + len(snapshot.cached_ids)
    for sequence in driver.scheduler.running:
        folded = state.sequences[sequence.sequence_id]
        assert folded.num_computed_tokens == sequence.num_computed_tokens
        assert folded.slot == sequence.slot
        if not sequence.finished:
            assert folded.num_output_tokens == len(sequence.output_token_ids)
    waiting = {s.sequence_id for s in state.alive() if s.phase in ("waiting", "preempted", "swapped")}
    assert waiting == {s.sequence_id for s in driver.scheduler.sequences.values() if s.slot is None}


def assert_same_swap(state, driver, snapshot):
    """Where the blocks of swapped sequences are, on the host and on the device."""
    swapped = {s: [(p.block_id, p.on_host) for p in places] for s, places in snapshot.swapped_tables.items()}
    assert {s: list(map(tuple, places)) for s, places in state.swapped.tables.items()} == swapped
    assert {s.sequence_id for s in state.alive() if s.phase == "swapped"} == set(swapped)
    assert state.num_host_blocks == snapshot.num_host_blocks
    assert state.swapped.num_used == snapshot.num_host_blocks - len(snapshot.host_free_ids)
    assert {host_id: len(owners) for host_id, owners in state.swapped.owners().items()} == snapshot.host_ref_counts
    assert {b: state.blocks.count(b) for b in range(state.num_blocks + 1) if state.blocks.count(b)} == snapshot.ref_counts
    for sequence_id in swapped:
        assert state.sequences[sequence_id].num_computed_tokens == snapshot.num_computed_tokens[sequence_id]
        preemptions = driver.scheduler.sequences[sequence_id].num_preemptions
        assert state.sequences[sequence_id].num_preemptions == preemptions


@pytest.mark.parametrize("seed", range(60))
def test_the_fold_is_the_engines_books_at_every_step_of_random_runs(seed):
    rng = random.Random(seed)
    driver = random_driver(rng)
    state = State(driver.recorder.events.header.config)
    driver.recorder.events.subscribe(state.apply)
    for _ in range(120):
        name, arguments = random_call(rng, driver)
        with contextlib.suppress(RequestError):
            getattr(driver, name)(**arguments)
        if name == "step" and not driver.in_flight:  # else the log is a step behind
            assert_same(state, driver)
    driver.run()
    assert_same(state, driver)
    assert not [s for s in state.alive() if s.phase != "finished"]


def test_letters_go_on_after_z():
    assert [letters(n) for n in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


def test_a_hue_belongs_to_one_request_while_it_lives_and_rests_longest_before_its_next():
    driver = Driver(num_blocks=60, max_num_seqs=12, max_num_batched_tokens=64, prefix_cache=False)
    state = State(driver.recorder.events.header.config)
    driver.recorder.events.subscribe(state.apply)
    for number in range(10):
        driver.add([1, 2, number], max_tokens=30 if number else 1)
    driver.step()
    hues = {s.letter: s.hue for s in state.sequences.values()}
    assert [hues[letter] for letter in "ABCDEFGHIJ"] == [0, 1, 2, 3, 4, 5, 6, 7, NEUTRAL, NEUTRAL]
    driver.add([5], max_tokens=3)
    driver.step()
    assert next(s.hue for s in state.sequences.values() if s.letter == "K") == 0


def test_samples_share_a_hue_and_differ_by_suffix():
    driver = Driver(num_blocks=40)
    state = State(driver.recorder.events.header.config)
    driver.recorder.events.subscribe(state.apply)
    driver.add([1, 2, 3, 4, 5], n=3)
    driver.step()
    assert [(s.letter, s.name, s.hue) for s in state.alive()] == [("A·0", "0/0", 0), ("A·1", "0/1", 0), ("A·2", "0/2", 0)]
    shared = [block for block in map(state.block, range(state.num_blocks + 1)) if block.kind == "shared"]
    assert [(len(block.owners), block.fill) for block in shared] == [(3, 4), (3, 1)]


def test_a_copy_is_another_state():
    driver = Driver(num_blocks=40)
    state = State(driver.recorder.events.header.config)
    driver.recorder.events.subscribe(state.apply)
    driver.add([1, 2, 3, 4, 5], n=2, max_tokens=5)
    driver.step()
    before = State.of(state.keep())
    tables = books(before)
    driver.run()
    assert books(before) == tables != books(state)


def test_a_saved_log_folds_without_an_engine(tmp_path):
    driver = Driver(num_blocks=8)
    for number in range(5):
        driver.add([number, 2, 3], max_tokens=9)
    driver.run()
    driver.recorder.events.save(tmp_path / "log.jsonl.gz")
    loaded = EventLog.load(tmp_path / "log.jsonl.gz")
    state = State(loaded.header.config)
    for record in loaded.replay():
        state.apply(record)
        assert sum(state.counts().values()) == 8
    assert state.num_finished == state.num_requests == 5


def test_a_log_that_lost_its_beginning_says_so_and_shows_who_comes_later():
    driver = Driver(num_blocks=30, max_num_seqs=1)
    for number in range(3):
        driver.add([number, 2, 3], max_tokens=4)
    driver.run()
    records = list(driver.recorder.events.records)
    state = State(driver.recorder.events.header.config)
    for record in records[1:]:
        state.apply(record)
    assert state.truncated
    assert state.num_requests == 0


def test_an_id_that_is_used_again_is_another_request():
    driver = Driver(num_blocks=40, prefix_cache=False)
    state = State(driver.recorder.events.header.config)
    driver.recorder.events.subscribe(state.apply)
    first = driver.add([1, 2, 3], max_tokens=9)
    driver.add([4, 5], max_tokens=9)
    driver.step()
    driver.abort(first)
    again = driver.add([7, 8], max_tokens=3)
    again.request_id = first.request_id
    driver.scheduler._arrived[-1] = msgspec.structs.replace(driver.scheduler._arrived[-1], request_id=first.request_id)
    driver.run()
    assert state.num_finished == state.num_requests == 3


def test_a_reset_of_an_idle_engine_is_in_the_log():
    with LLM("tiny") as llm:
        llm.generate(
            "a prompt that fills a block or two, so that something is cached", SamplingParams(max_tokens=4), use_tqdm=False
        )
        history = History(llm.engine.events)
        assert history.last.counts()["cached"] > 0
        llm.engine.reset_prefix_cache()
        assert History(llm.engine.events).last.counts()["cached"] == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_searches_that_are_preempted_while_beams_fork_are_folded_as_the_engine_has_them(mode):
    """Beams share blocks with beams that were swapped out, and are pruned, copied and come back."""
    options = {"block_size": 4, "max_num_seqs": 8, "enable_prefix_caching": False, "preemption_mode": mode}
    with LLM("tiny", num_gpu_blocks_override=40, swap_space=0.01, **options) as llm:
        engine, told = llm.engine, 0
        for number, text in enumerate(("Hello there", "you")):
            params = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
            engine.add_request(str(number), text, params)
        for step in (2, 3, 5, 7, 8):
            engine.scheduler.preempt_at(step, str(step % 2), mode)
        state = State(engine.events.header.config)
        engine.events.subscribe(state.apply)
        while engine.has_unfinished_requests():
            engine.step()
            if engine.scheduler._born:  # a record to come tells of a fork
                continue
            snapshot, known = engine.scheduler.snapshot(), {s.sequence_id: s for s in state.alive()}
            assert_same_swap(state, engine, snapshot)
            assert books(state) == {s: table for s, table in snapshot.tables.items() if table}
            assert known.keys() == engine.scheduler.sequences.keys()
            preempted = {i: s.num_preemptions for i, s in engine.scheduler.sequences.items()}
            assert {i: s.num_preemptions for i, s in known.items()} == preempted
            told += len(state.swapped.tables) if mode == "swap" else sum(s.phase == "preempted" for s in known.values())
            for sequence_id, sequence in engine.scheduler.sequences.items():
                assert "".join(known[sequence_id].token_texts) == "".join(
                    map(engine.tokenizer.token_text, sequence.token_ids)
                )
        assert told > 2
        assert state.num_finished == state.num_requests == 2
        assert (state.counts()["free"], state.swapped.num_used, state.swapped.tables) == (40, 0, {})


@pytest.mark.parametrize("seed", range(12))
def test_a_state_that_is_read_once_is_the_one_that_is_read_after_each_step(seed):
    """Batches that do the same step after step are taken in when somebody reads; nothing of them may be lost or doubled."""
    rng = random.Random(seed)
    driver = random_driver(rng)
    config, log = driver.recorder.events.header.config, driver.recorder.events
    often, once = State(config), State(config)
    log.subscribe(lambda record: (often.apply(record), often.sequences))
    log.subscribe(once.apply)
    kept = None
    for number in range(120):
        name, arguments = random_call(rng, driver)
        with contextlib.suppress(RequestError):
            getattr(driver, name)(**arguments)
        if number == 60:
            kept, first = State.of(once.keep()), len(log.records)
    for record in list(log.records)[first:]:
        kept.apply(record)
    assert often.sequences == once.sequences == kept.sequences
    assert often.fills().tolist() == once.fills().tolist() == kept.fills().tolist()
    assert often.fills().tolist() == [often.block(block_id).fill for block_id in range(config["num_blocks"] + 1)]


def test_beams_are_of_one_request_and_their_texts_are_those_of_the_search():
    llm = LLM("tiny", num_gpu_blocks_override=14, block_size=4, max_num_seqs=5, enable_prefix_caching=False)
    engine = llm.engine
    for number, text in enumerate(("Hello", "you there")):
        engine.add_request(str(number), text, BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True))
    state, forks = State(engine.events.header.config), 0
    while engine.has_unfinished_requests():
        engine.step()
        record = engine.events.records[-1]
        state.apply(record)
        forks += len(record.forks)
        known, alive = {s.sequence_id: s for s in state.alive()}, engine.scheduler.sequences
        if not engine.scheduler._born:  # else a record to come tells of a fork
            assert {i: tuple(s.table) for i, s in known.items() if s.table} == engine.scheduler.snapshot().tables
            assert known.keys() == alive.keys()
            texts = {i: "".join(map(engine.tokenizer.token_text, s.token_ids)) for i, s in alive.items()}
            assert {i: "".join(s.token_texts) for i, s in known.items()} == texts
        assert {s.request_id for s in known.values()} <= {"0", "1"}
    assert forks > 4
    assert state.num_finished == state.num_requests == 2
    assert state.counts()["free"] == 14
    llm.close()
