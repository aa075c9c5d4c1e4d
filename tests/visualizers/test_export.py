"""Logs that are written as they happen and read again, and traces for ui.perfetto.dev."""

import gzip
import itertools
import json
import logging
import os
import signal
import subprocess
import sys

import pytest

from refimpl import LLM, Engine, EngineArgs, SamplingParams
from refimpl.decision_texts import describe
from refimpl.errors import RefimplError
from refimpl.events import SCHEMA_VERSION, EventLog, LogHeader
from refimpl.visualizers.export import SLICES, export_perfetto, record, replay
from refimpl.visualizers.history import History

NAMES = pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])


def make_engine(**options):
    sizes = {"block_size": 4, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    ticks = map(float, itertools.count())
    return Engine(EngineArgs(model="tiny", **sizes | options), clock=lambda: next(ticks) / 1000)


def drive(engine, prompts=6):
    for number in range(prompts):
        n = 2 if number == 1 else 1
        params = SamplingParams(max_tokens=12, ignore_eos=True, n=n, seed=number, temperature=1)
        engine.add_request(f"r{number}", list(range(1, 5 + 3 * number)), params)
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()


# ---------------------------------------------------------------------- record and replay


@NAMES
def test_a_recording_is_the_whole_log_what_came_before_included(tmp_path, name):
    engine = make_engine()
    drive(engine, prompts=2)
    before = len(engine.events.records)
    with record(engine, tmp_path / name) as path:
        drive(engine)
    drive(engine, prompts=1)
    history = replay(path)
    written = len(history.records)
    assert before < written < len(engine.events.records)
    assert list(history.records) == list(engine.events.records)[:written]
    assert history.config == engine.events.header.config
    assert list(EventLog.load(path).records) == list(history.records)
    engine.close()


def test_each_record_is_in_the_file_as_soon_as_its_step_is_done(tmp_path):
    engine = make_engine()
    with record(engine, tmp_path / "log.jsonl") as path:
        engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
            assert len(path.read_bytes().splitlines()) == 1 + len(engine.events.records)
    engine.close()


def test_an_engine_that_keeps_no_log_can_be_recorded(tmp_path):
    with LLM("tiny", event_log_size=0) as llm:
        with record(llm, tmp_path / "log.jsonl") as path:
            llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert not llm.engine.events.wanted
    assert replay(path).last.num_finished == 1


def test_the_log_is_let_go_when_the_block_raises(tmp_path):
    engine = make_engine()
    with pytest.raises(KeyboardInterrupt), record(engine, tmp_path / "log.jsonl"):
        raise KeyboardInterrupt
    assert engine.events._subscribers == []
    assert not replay(tmp_path / "log.jsonl").records
    engine.close()


@NAMES
def test_a_process_that_is_killed_leaves_what_it_wrote(tmp_path, name):
    program = f"""
import os, signal
from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.visualizers.export import record
engine = Engine(EngineArgs(model="tiny"))
engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
with record(engine, {str(tmp_path / name)!r}):
    for _ in range(7):
        engine.step()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=280, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    history = replay(tmp_path / name)
    assert [one.step for one in history.records] == list(range(7))


@NAMES
@pytest.mark.parametrize("lost", [1, 30, 200])
def test_a_cut_log_is_read_up_to_its_last_whole_record(tmp_path, caplog, name, lost):
    engine = make_engine()
    drive(engine)
    content = b"".join(b"%b" % line for line in lines_of(engine.events, tmp_path))[:-lost]
    if name.endswith("gz"):
        with (tmp_path / name).open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb") as file:
            file.write(content)
            file.flush()
            whole = raw.tell()
        os.truncate(tmp_path / name, whole)
    else:
        (tmp_path / name).write_bytes(content)
    whole = content.count(b"\n") - 1
    if lost > 1:
        with pytest.raises(RefimplError, match="is damaged"):
            EventLog.load(tmp_path / name)
    with caplog.at_level(logging.WARNING):
        history = replay(tmp_path / name)
    if lost == 1 and not name.endswith("gz"):  # only the line's end is gone: nothing is lost
        whole += 1
        assert caplog.text == ""
    else:
        assert "ends in the middle of a record" in caplog.text
        assert f"{whole} records before that were read" in caplog.text
    assert list(history.records) == list(engine.events.records)[:whole]
    engine.close()


def lines_of(log, folder):
    log.save(folder / "whole.jsonl")
    return (folder / "whole.jsonl").read_bytes().splitlines(keepends=True)


def test_damage_before_the_end_is_no_cut(tmp_path):
    engine = make_engine()
    drive(engine)
    lines = lines_of(engine.events, tmp_path)
    for number, damaged in enumerate(([*lines[:3], b"{\n", *lines[3:]], [*lines[:-1], b"{}\n"], [lines[0][:-9]], [])):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"".join(damaged))
        with pytest.raises(RefimplError, match="is no event log, or is damaged"):
            replay(path)
    engine.close()


def test_what_cannot_be_recorded_is_said(tmp_path):
    with pytest.raises(RefimplError, match="this is a dict"), record({}, tmp_path / "log.jsonl"):
        pass
    engine = make_engine()
    with pytest.raises(RefimplError, match="cannot be written"), record(engine, tmp_path / "missing" / "log.jsonl"):
        pass
    with pytest.raises(RefimplError, match="cannot be written"):
        export_perfetto(engine.events, tmp_path)
    engine.close()


# ---------------------------------------------------------------------- traces


@pytest.fixture(scope="module")
def log():
    engine = make_engine()
    drive(engine)
    engine.add_request("aborted", [1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.step()
    engine.abort("aborted")
    engine.close()
    assert any(one.preempted for one in engine.events.records)
    assert any(one.copies for one in engine.events.records)
    return engine.events


@pytest.fixture(scope="module")
def events(log, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    export_perfetto(log, path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    return trace["traceEvents"]


def of(events, kind, name=None):
    return [event for event in events if event["ph"] == kind and name in (None, event["name"])]


def test_a_trace_is_in_the_trace_event_format(events):
    keys = {"M": {"args"}, "X": {"ts", "dur", "args"}, "C": {"ts", "args"}, "i": {"ts", "s", "args"}}
    for event in events:
        assert set(event) == {"ph", "name", "pid", "tid"} | keys[event["ph"]]
        assert isinstance(event["name"], str)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s", "t") == "t"
    for event in of(events, "C"):
        assert all(isinstance(value, int) for value in event["args"].values())


def test_each_sequence_is_a_track_whose_slices_do_not_overlap(log, events):
    ids = {s for one in log.records for arrival in one.arrived for s in arrival.sequence_ids}
    named = {event["tid"]: event["args"]["name"] for event in of(events, "M", "thread_name")}
    assert named.keys() == {sequence_id + 1 for sequence_id in ids}
    assert {"A r0", "B·0 r1/0", "B·1 r1/1"} <= set(named.values())
    for track in named:
        slices = sorted((event for event in of(events, "X") if event["tid"] == track), key=lambda event: event["ts"])
        assert slices
        assert {event["name"] for event in slices} <= set(SLICES.values())
        for one, after in itertools.pairwise(slices):
            assert one["ts"] + one["dur"] <= after["ts"] + 1e-3


def test_slices_say_the_tokens_and_the_reasons(log, events):
    drawn = sum(token >= 0 for one in log.records for token in one.token_ids)
    assert sum(event["args"].get("tokens drawn", 0) for event in of(events, "X")) == drawn
    finished = [f for one in log.records for f in (*one.finished, *one.aborted)]
    assert [event["args"]["ends"] for event in of(events, "X") if "ends" in event["args"]].count("abort") == 1
    assert len([event for event in of(events, "X") if "ends" in event["args"]]) == len(finished)
    queued = of(events, "X", "preempted")
    assert queued
    assert all("is preempted (recompute)" in event["args"]["why"] for event in queued)
    waits = [describe(d) for one in log.records for d in one.decisions if d.kind.startswith("waits_")]
    assert waits
    reasons = "; ".join(event["args"].get("why", "") for event in of(events, "X"))
    assert all(wait in reasons for wait in waits)


def test_preemptions_and_copies_are_marks_in_microseconds_of_the_log(log, events):
    expected = [(p.sequence_id + 1, one.scheduled_at * 1e6) for one in log.records for p in one.preempted]
    marks = of(events, "i", "preempted")
    assert sorted((event["tid"], event["ts"]) for event in marks) == sorted((track, round(at, 3)) for track, at in expected)
    assert all("is preempted" in event["args"]["why"] for event in marks)
    copies = [(copy.source, copy.target) for one in log.records for copy in one.copies]
    assert [(e["args"]["source"], e["args"]["target"]) for e in of(events, "i", "copy-on-write")] == copies


def test_counters_are_those_of_each_step(log, events):
    tokens, blocks, sequences = (of(events, "C", name) for name in ("tokens a step", "blocks", "sequences"))
    assert [sum(event["args"].values()) for event in tokens] == [*(sum(one.num_new_tokens) for one in log.records), 0]
    assert [event["args"] for event in sequences] == [
        {"running": one.num_running, "waiting": one.num_waiting} for one in log.records
    ]
    history = History(log)
    for position, event in enumerate(blocks):
        counts = history.state_at(position).counts()
        used = counts["owned"] + counts["shared"]
        assert event["args"] == {"used": used, "cached": counts["cached"], "free": counts["free"]}
        assert event["ts"] == pytest.approx(log.records[position].scheduled_at * 1e6)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_history_a_part_of_a_log_and_an_empty_one_are_exported_too(tmp_path, overlap):
    engine = make_engine(async_scheduling=overlap)
    drive(engine)
    engine.close()
    export_perfetto(History(engine.events), tmp_path / "trace.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    part = EventLog(engine.events.header, 1000)
    part.records.extend(list(engine.events.records)[9:])
    export_perfetto(part, tmp_path / "part.json")
    assert of(json.loads((tmp_path / "part.json").read_bytes())["traceEvents"], "X")
    config = engine.events.header.config
    export_perfetto(EventLog(LogHeader(SCHEMA_VERSION, "0", 0.0, "virtual", config), 1), tmp_path / "empty.json")
    assert of(json.loads((tmp_path / "empty.json").read_bytes())["traceEvents"], "X") == []
