"""The event log: saved and loaded, replayed, subscribed to; and the whole truth: folding it gives the engine's tables."""

import gzip
import itertools
import json
import logging
import time

import msgspec
import pytest

from refimpl import Engine, EngineArgs, EventLog, SamplingParams
from refimpl.decision_texts import DECISION_TEXTS, describe
from refimpl.errors import RefimplError
from refimpl.events import SCHEMA_VERSION, LogHeader, StepRecord
from refimpl.outputs import Decision

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["depth 0", "depth 1"])


def make_engine(overlap=False, **options):
    """A tiny engine whose clock counts how often it was read, so that no two moments are the same."""
    clock = map(float, itertools.count())
    args = {"block_size": 4, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 16, "max_num_seqs": 4} | options
    return Engine(EngineArgs(model="tiny", async_scheduling=overlap, **args), clock=lambda: next(clock))


def close(engine):
    assert engine.audit() == []
    engine.close()


def drive(engine, after_step=lambda: None, at_step=None):
    """Step until nothing is left; ``at_step`` maps step numbers to things to do before them."""
    for number in itertools.count():
        if number in (at_step or {}):
            at_step[number]()
        elif not engine.has_unfinished_requests():
            return
        engine.step()
        after_step()


def run_some(engine):
    for i in range(5):
        engine.add_request(f"r{i}", list(range(1, 4 + 3 * i)), SamplingParams(max_tokens=12, seed=i))
    drive(engine)


@pytest.fixture(scope="module")
def log():
    """The log of a run with chunks, waiting and preemptions."""
    engine = make_engine()
    run_some(engine)
    close(engine)
    assert any(record.preempted for record in engine.events.records)
    return engine.events


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_save_and_load(log, tmp_path, name):
    log.save(tmp_path / name)
    loaded = EventLog.load(str(tmp_path / name))
    assert loaded.header == log.header
    assert list(loaded.records) == list(log.records)
    loaded.save(tmp_path / f"again-{name}")
    content = [gzip.decompress(p.read_bytes()) if name.endswith("gz") else p.read_bytes() for p in tmp_path.iterdir()]
    assert content[0] == content[1]


def test_a_log_is_json_lines(log, tmp_path):
    log.save(tmp_path / "log.jsonl")
    header, *records = map(json.loads, (tmp_path / "log.jsonl").read_text(encoding="utf-8").split("\n")[:-1])
    assert header["schema"] == SCHEMA_VERSION
    assert header["config"] | {"model": "tiny", "block_size": 4, "num_blocks": 12, "max_num_seqs": 4} == header["config"]
    assert len(records) == len(log.records)
    assert [record["step"] for record in records] == [record.step for record in log.records]


def test_a_log_of_nothing(tmp_path):
    empty = EventLog(LogHeader(SCHEMA_VERSION, "0", 0.0, "virtual", {}), capacity=5)
    empty.save(tmp_path / "log.jsonl")
    assert list(EventLog.load(tmp_path / "log.jsonl").records) == []


def damaged(content):
    lines = content.split(b"\n")
    return {
        "empty": b"",
        "another file": b"GGUF\x00\x01\x02",
        "no header": b"\n".join(lines[1:]),
        "a list": b"[1, 2]\n",
        "cut in a line": content[:-20],
        "a line of garbage": b"\n".join([*lines[:3], b"\xff\xfe{", *lines[3:]]),
        "a wrong kind": content.replace(b'"step":1,', b'"step":"one",'),
        "a field gone": content.replace(b'"scheduled_at":', b'"scheduled_on":'),
        "a blank line": b"\n".join([*lines[:3], b"", *lines[3:]]),
    }


@pytest.mark.parametrize("damage", list(damaged(b"")))
def test_a_damaged_log_is_refused(log, tmp_path, damage):
    log.save(tmp_path / "log.jsonl")
    content = (tmp_path / "log.jsonl").read_bytes()
    assert damaged(content)[damage] != content
    (tmp_path / "log.jsonl").write_bytes(damaged(content)[damage])
    with pytest.raises(RefimplError, match=r"log\.jsonl is no event log, or is damaged"):
        EventLog.load(tmp_path / "log.jsonl")


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain", "garbage after the magic"])
def test_a_damaged_gzip_log_is_refused(log, tmp_path, damage):
    file = tmp_path / "log.jsonl.gz"
    log.save(file)
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        for i in range(len(content) // 2, len(content) // 2 + 40):
            content[i] ^= 0xFF
    elif damage == "plain":
        content = gzip.decompress(content)
    else:
        content[10:] = b"\xff" * 100
    file.write_bytes(content)
    with pytest.raises(RefimplError, match="is no event log, or is damaged"):
        EventLog.load(file)


@pytest.mark.parametrize("header", [{"schema": 2, "refimpl": "9.9"}, {"schema": 2, "refimpl": "9.9", "shape": "new"}])
def test_another_schema_is_named(tmp_path, header):
    (tmp_path / "log.jsonl").write_text(json.dumps(header) + '\n{"another": "record"}\n')
    with pytest.raises(RefimplError, match=r"event schema 2; this refimpl reads 1.*9\.9"):
        EventLog.load(tmp_path / "log.jsonl")


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(RefimplError, match="cannot be read"):
        EventLog.load(tmp_path / "missing.jsonl")


# ---------------------------------------------------------------------- replay, capacity, subscribers


def test_replay_is_the_records_in_order(log):
    records = list(log.replay())
    assert records == list(log.records)
    assert [r.updated_at for r in records] == sorted(r.updated_at for r in records)


def test_replay_keeps_the_time_between_records(log, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    records = list(log.replay(speed=2))
    assert waits == [(b.updated_at - a.updated_at) / 2 for a, b in itertools.pairwise(records)]
    assert all(wait > 0 for wait in waits)


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_replay_at_no_speed_is_refused(log, speed):
    with pytest.raises(RefimplError, match="speed"):
        next(log.replay(speed=speed))


def test_the_newest_records_are_kept(log):
    engine = make_engine(event_log_size=3)
    run_some(engine)
    assert list(engine.events.records) == list(log.records)[-3:]
    close(engine)


@OVERLAP
def test_nothing_is_recorded_unless_somebody_looks(overlap):
    engine = make_engine(overlap, event_log_size=0)
    run_some(engine)
    assert not engine.events.wanted
    seen = []
    unsubscribe = engine.events.subscribe(seen.append)
    assert engine.events.wanted
    engine.add_request("x", [1, 2, 3], SamplingParams(max_tokens=3))
    drive(engine)
    assert [r.request_id for record in seen for r in record.arrived] == ["x"]
    count = len(seen)
    unsubscribe()
    unsubscribe()  # twice is once
    engine.add_request("y", [1, 2, 3], SamplingParams(max_tokens=3))
    drive(engine)
    assert len(seen) == count
    assert list(engine.events.records) == []
    close(engine)


@OVERLAP
def test_a_subscriber_that_raises_is_dropped(overlap, caplog):
    engine, seen, calls = make_engine(overlap), [], []

    def broken(record):
        calls.append(record)
        raise RuntimeError("a broken widget")

    def leaves_and_raises(_record):
        leave()
        raise RuntimeError("gone")

    engine.events.subscribe(broken)
    leave = engine.events.subscribe(leaves_and_raises)
    engine.events.subscribe(seen.append)
    with caplog.at_level(logging.WARNING, "refimpl"):
        run_some(engine)
    assert len(calls) == 1
    assert seen == list(engine.events.records)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "a broken widget" in str(warnings[0].exc_info[1])
    close(engine)


def test_a_subscriber_may_subscribe_another():
    engine, late = make_engine(), []
    subscribed = []

    def first(_record):
        if not subscribed:
            subscribed.append(engine.events.subscribe(late.append))

    engine.events.subscribe(first)
    run_some(engine)
    assert late == list(engine.events.records)[1:]
    close(engine)


# ---------------------------------------------------------------------- what the records say


def moments(records, overlap):
    """Each step's two moments in the order in which they happened; ``overlap`` is the header's ``async_scheduling``.

    "planned" is everything up to the batch: aborts, preemptions, admissions, allocations. "updated" is what its tokens
    brought: ends, and the blocks that they gave back. Moments of equal time (a virtual clock) go by the rule of the loop:
    step N is taken in before step N + 1 is planned, with overlap before N + 2 is.
    """
    timed = []
    for record in records:
        timed.append((record.scheduled_at, record.step, "planned", record))
        timed.append((record.updated_at, record.step + (1.5 if overlap else 0.5), "updated", record))
    return [(moment, record) for _, _, moment, record in sorted(timed, key=lambda entry: entry[:2])]


class Books:
    """The pool and the tables, rebuilt from records alone."""

    def __init__(self, header):
        self.blocks = set(range(1, header.config["num_blocks"] + 1))
        self.tables = {}
        self.slots = {}
        self.tokens = {}

    @property
    def free(self):
        """Blocks in no table: free, or cached for whoever comes."""
        return self.blocks - {block_id for table in self.tables.values() for block_id in table}

    def apply(self, moment, record):
        if moment == "planned":
            self.plan(record)
        else:
            self.update(record)

    def plan(self, record):
        for arrival in record.arrived:
            for sequence_id in arrival.sequence_ids:
                assert sequence_id not in self.tokens
                self.tokens[sequence_id] = list(arrival.token_ids)
        for event in (*record.aborted, *record.preempted, *record.exhausted):
            self.release(event)
        shared = {block_id for hit in record.prefix_hits for block_id in hit.block_ids}
        for parent, _child in record.forks:
            shared |= set(self.tables.get(parent, ()))
        for sequence_id, slot, _num_computed_tokens in record.admitted:
            assert sequence_id not in self.tables
            self.tables[sequence_id] = []
            self.slots[slot] = sequence_id
        for slot, block_ids in record.allocated:
            for block_id in block_ids:
                parents = {parent for parent, child in record.forks if child == self.slots[slot]}
                from_parent = any(block_id in self.tables[parent] for parent in parents)
                assert block_id in self.free or block_id in shared or from_parent, f"block {block_id} is owned twice"
                self.tables[self.slots[slot]].append(block_id)
        for copy in record.copies:
            assert copy.target in self.free
            assert self.tables[self.slots[copy.slot]][copy.index] == copy.source
            self.tables[self.slots[copy.slot]][copy.index] = copy.target
        assert len(self.free) == record.num_free_blocks, f"free blocks after planning step {record.step}"
        assert len(self.tables) == record.num_running

    def update(self, record):
        for sequence_id, token_id in zip(record.sequence_ids, record.token_ids, strict=True):
            if token_id >= 0:
                self.tokens[sequence_id].append(token_id)
        for finish in record.finished:
            self.release(finish)

    def release(self, event):
        table = set(self.tables.pop(event.sequence_id, []))
        assert table & self.free == set(event.block_ids), "what nobody uses any more"


def actual_books(engine):
    snapshot = engine.scheduler.kv.snapshot({})
    return snapshot.tables, set(snapshot.free_ids) | set(snapshot.cached_ids)


def assert_folding_gives_the_engines_books(engine, snapshots, outputs=None):
    books, timeline = (
        Books(engine.events.header),
        moments(engine.events.records, engine.events.header.config["async_scheduling"]),
    )
    when = {"planned": lambda r: r.scheduled_at, "updated": lambda r: r.updated_at}
    for now, tables, free in snapshots:
        while timeline and when[timeline[0][0]](timeline[0][1]) <= now:
            books.apply(*timeline.pop(0))
        assert {s: tuple(blocks) for s, blocks in books.tables.items()} == tables
        assert books.free == free
    assert timeline == []
    return books


def photographer(engine, snapshots):
    started_at = engine._recorder._started_at
    return lambda: snapshots.append((engine.clock() - started_at, *actual_books(engine)))


@OVERLAP
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpu_blocks_override": 6, "max_num_seqs": 3},
        {"num_gpu_blocks_override": 7, "block_size": 1, "max_model_len": 7},
        {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 5, "max_num_seqs": 5},
        {"enable_kv_cache": False, "max_num_batched_tokens": 64},
    ],
    ids=["12 blocks", "6 blocks", "blocks of 1", "small budget", "no cache"],
)
def test_folding_the_records_gives_the_engines_books(overlap, options):
    engine, snapshots, drawn = make_engine(overlap, **options), [], {}
    limit = engine.scheduler.config.max_model_len
    photograph = photographer(engine, snapshots)

    def add(i, prompt, **params):
        prompt = min(prompt, limit - 1)
        engine.add_request(f"r{i}", [(7 * i + t) % 256 for t in range(prompt)], SamplingParams(seed=i, **params))

    # Different ends: by length, by a stop token that nobody foresees, for want of blocks, by an abort anywhere.
    stops = tuple(range(0, 320, 9))
    for i in range(4):
        add(i, 2 + 4 * i, max_tokens=9, stop_token_ids=stops if i % 2 else ())
    at_step = {
        2: lambda: add(4, 5, n=2, max_tokens=30, stop_token_ids=stops),
        3: lambda: add(5, 3, max_tokens=2),
        5: lambda: engine.abort("r4"),
        6: lambda: add(6, 3, max_tokens=25, ignore_eos=True),
        7: lambda: add(7, 4, max_tokens=6),
        8: lambda: engine.scheduler.preempt_at(engine.scheduler.step, "r6"),
        9: lambda: engine.abort(["r7", "unknown"]),
    }

    def after_step():
        photograph()
        for sequence in engine.scheduler.sequences.values():
            drawn[sequence.sequence_id] = list(sequence.token_ids)

    drive(engine, after_step, at_step)
    photograph()
    books = assert_folding_gives_the_engines_books(engine, snapshots)
    assert books.tables == {}
    # The tokens too: what was last seen of each sequence is a head of what the records say.
    for sequence_id, token_ids in drawn.items():
        assert books.tokens[sequence_id][: len(token_ids)] == token_ids
    assert {f.reason for r in engine.events.records for f in (*r.finished, *r.aborted, *r.exhausted)} >= {"abort", "length"}
    close(engine)


@OVERLAP
def test_preemptions_are_in_the_records(overlap):
    engine = make_engine(overlap, num_gpu_blocks_override=8, max_num_seqs=3)
    for i in range(3):
        engine.add_request(f"r{i}", list(range(1, 8)), SamplingParams(max_tokens=20, seed=i, ignore_eos=True))
    snapshots = []
    drive(engine, photographer(engine, snapshots))
    assert sum(len(r.preempted) for r in engine.events.records) >= 2
    assert_folding_gives_the_engines_books(engine, snapshots)
    close(engine)


@OVERLAP
def test_a_saved_log_folds_the_same(overlap, tmp_path):
    engine = make_engine(overlap)
    run_some(engine)
    engine.events.save(tmp_path / "log.jsonl.gz")
    loaded = EventLog.load(tmp_path / "log.jsonl.gz")
    books = Books(loaded.header)
    for moment, record in moments(loaded.replay(), loaded.header.config["async_scheduling"]):
        books.apply(moment, record)
    assert books.tables == {}
    assert len(books.tokens) == 5
    close(engine)


@pytest.mark.parametrize(("overlap", "expected"), [(False, "p0 u0 p1 u1 p2 u2"), (True, "p0 p1 u0 p2 u1 u2")])
def test_moments_of_equal_time(overlap, expected):
    """A virtual clock stands still between taking a step in and planning the next."""
    times = [(0, 1), (1, 2), (2, 3)] if not overlap else [(0, 1), (0, 2), (1, 3)]
    records = [StepRecord(step, float(a), float(b)) for step, (a, b) in enumerate(times)]
    assert " ".join(f"{what[0]}{record.step}" for what, record in moments(records, overlap)) == expected


def test_texts_and_arrivals(log):
    first = log.records[0]
    assert [a.request_id for a in first.arrived] == [f"r{i}" for i in range(5)]
    for arrival in first.arrived:
        assert len(arrival.token_ids) == len(arrival.token_texts)
    for record in log.records:
        assert len(record.sequence_ids) == len(record.slots) == len(record.num_new_tokens) == len(record.token_ids)
        assert [text == "" for text in record.token_texts] == [token < 0 for token in record.token_ids]
        assert sum(record.num_new_tokens) <= 16


def test_every_decision_has_a_sentence(log):
    kinds = set()
    for record in log.records:
        for decision in record.decisions:
            kinds.add(decision.kind)
            assert "{" not in describe(decision)
    assert {"arrived", "admitted", "preempted", "resumed", "chunked", "finished"} <= kinds <= DECISION_TEXTS.keys()


def test_records_are_frozen(log):
    with pytest.raises(AttributeError):
        log.records[0].step = 5
    assert msgspec.structs.replace(log.records[0], step=5).step == 5


@pytest.mark.parametrize(
    ("kind", "numbers", "says"),
    [
        ("waits_blocks", {"needed": 1, "free": 0}, "waits: needs 1 block, 0 free"),
        ("waits_blocks", {"needed": 11, "free": 1}, "waits: needs 11 blocks, 1 free"),
        (
            "admitted",
            {"slot": 0, "new": 1, "total": 2, "blocks": 1},
            "to slot 0: 1 of its 2 tokens in this step, 1 new block",
        ),
        ("resumed", {"slot": 0, "new": 9, "total": 9, "blocks": 0}, "9 of 9 tokens in this step, 0 new blocks"),
        ("waits_batch", {"running": 1}, "runs to its end, 1 sequence still"),
        ("left_batch", {"tokens": 21}, "21 tokens were computed after its end"),
    ],
)
def test_a_sentence_counts_in_words_that_fit_the_number(kind, numbers, says):
    assert says in describe(Decision(0, 0.0, 0, kind, numbers))
