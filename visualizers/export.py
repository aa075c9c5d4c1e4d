"""Logs as files: written while the engine runs, read again, and turned into a trace for ui.perfetto.dev."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from refimpl.errors import RefimplError
from refimpl.events import EventLog, StepRecord
from refimpl.visualizers.history import History
from refimpl.visualizers.source import log_of
from refimpl.visualizers.tail import Tail
from refimpl.visualizers.timeline_books import Column
from refimpl.visualizers.timeline_rows import Timeline
from refimpl.visualizers.timeline_runs import DECODE, FOLLOWS, IDLE, PADDING, PREFILL, QUEUED, SWAPPED, WAITING, Row

SLICES = {
    WAITING: "waiting",
    FOLLOWS: "waiting for the prompt",
    IDLE: "without a row",
    PADDING: "padding",
    DECODE: "decode",
    PREFILL: "prefill",
    QUEUED: "preempted",
    SWAPPED: "preempted, swapped out",
}
"""What a stretch of a sequence's track is called."""
SEQUENCES, ENGINE = 1, 2
"""The trace's two processes: one has a thread a sequence, the other the counters."""

Event = dict[str, Any]


# ---------------------------------------------------------------------- logs


@contextmanager
def record(source: Any, path: str | Path) -> Iterator[Path]:
    """Write an engine's log to a file while the block runs, a record after each step (gzipped if the name ends in .gz).

    What the log holds already is written first. Each record is handed to the operating system at once, so a crash loses
    none; :func:`replay` reads what is there. If the file cannot be written to any more, the engine goes on, with a warning.

    Args:
        source: an LLM, an Engine, or an EventLog.
        path: the file; an old one is replaced.

    Raises:
        RefimplError: ``source`` is none of these, or the file cannot be made.

    Example:
        >>> with record(llm, "run.jsonl.gz"):  # doctest: +SKIP
        ...     llm.generate(prompts)

    """
    events, path, encode = log_of(source), Path(path), msgspec.json.encode
    with _create(path) as file:
        file.write(encode(events.header) + b"\n")
        file.writelines(encode(one) + b"\n" for one in tuple(events.records))
        file.flush()

        def write(one: StepRecord) -> None:
            file.write(encode(one) + b"\n")
            file.flush()

        unsubscribe = events.subscribe(write)
        try:
            yield path
        finally:
            unsubscribe()


def replay(path: str | Path) -> History:
    """The history of a saved log. One that was cut in its last record is read up to there, with a warning.

    Raises:
        RefimplError: it is no event log, is damaged, or was written by another schema version.

    """
    return History(EventLog.load(path, partial=True))


def _create(path: Path) -> IO[bytes]:
    try:
        file: Any = gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb")  # noqa: SIM115
    except OSError as error:
        raise RefimplError(f"{path} cannot be written: {error}") from error
    opened: IO[bytes] = file
    return opened


# ---------------------------------------------------------------------- traces


def export_perfetto(source: Any, path: str | Path) -> None:
    """Write a trace for ui.perfetto.dev or chrome://tracing (gzipped if the name ends in .gz).

    Each sequence is a track of what it did, with the scheduler's reasons; preemptions and copies are marks on it. Counters
    are the tokens of each step, blocks by use, those of the swap space, and sequences that run and wait. Times are
    microseconds of the log. The source is an LLM, an Engine, an EventLog, a History, or the path of a saved log.

    Raises:
        RefimplError: the source has no log, or the file cannot be made.

    """
    history = source if isinstance(source, History) else History(log_of(source))
    timeline = history.fold(Timeline)
    events = _names(timeline)
    for row in timeline.rows:
        events += _slices(row, history.records)
        events += _preemptions(row, history.records)
    for column, one in zip(timeline.columns, history.records, strict=True):
        events += _copies(one)
        events += _counters(column, one, history.last.num_blocks)
        if history.last.num_host_blocks:
            events += _swap_counters(column, one, history.last.num_host_blocks)
    if history.records:
        events.append(_counter("tokens a step", history.records[-1].updated_at, {"prefill": 0, "decode": 0}))
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {k: str(v) for k, v in history.config.items()}}
    with _create(Path(path)) as file:
        file.write(json.dumps(trace, ensure_ascii=False).encode())


def _names(timeline: Timeline) -> list[Event]:
    """What processes and threads are called, and their order."""
    events = [_named("process_name", SEQUENCES, 0, name="sequences"), _named("process_name", ENGINE, 0, name="engine")]
    events += [_named("process_sort_index", process, 0, sort_index=process) for process in (SEQUENCES, ENGINE)]
    for row in timeline.rows:
        track = row.sequence_id + 1
        events.append(_named("thread_name", SEQUENCES, track, name=f"{row.letter} {row.name}"))
        events.append(_named("thread_sort_index", SEQUENCES, track, sort_index=row.index))
    return events


def _named(what: str, process: int, track: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": arguments}


def _slices(row: Row, records: Tail[StepRecord]) -> list[Event]:
    """A slice for each stretch of the same state. It lasts until the next one begins; the last one, until its step's end."""
    runs = row.runs(records.first, len(records))
    stretches: list[tuple[int, int, int, int, int]] = []
    """(from, to, state, tokens drawn, tokens that a prefill computes or drafts that a decode checks)."""
    for start, end, state, drawn, computed in zip(*(runs[i::5] for i in range(5)), strict=True):
        first, new, computed = start, (end - start) * drawn, (end - start) * computed
        if stretches and stretches[-1][1:3] == (start, state) and state == DECODE:  # of another number of tokens a step
            first, _, _, before, drafted = stretches.pop()
            new, computed = new + before, computed + drafted
        stretches.append((first, end, state, new, computed))
    events: list[Event] = []
    for index, (start, end, state, new, computed) in enumerate(stretches):
        last, begins = index + 1 == len(stretches), records[start].scheduled_at
        if index == 0 and state in (WAITING, FOLLOWS):
            begins = row.arrived_at
        elif index == 0 and row.arrived_at < begins:  # its first step began later than it came
            events.append(_slice("waiting", row, row.arrived_at, begins, {}))
        arguments: dict[str, Any] = {"steps": end - start, "first step": records[start].step}
        if state == PREFILL:
            arguments["tokens computed"] = computed
        elif state == DECODE and computed:
            arguments["drafts checked"] = computed
        if state in (PREFILL, DECODE):
            arguments["tokens drawn"] = new
        if told := [sentence for column, sentence in row.decisions if start <= column < end]:
            arguments["why"] = "; ".join(told)
        if last and row.end is not None:
            arguments["ends"] = row.end[2]
        ends = records[end - 1].updated_at if last else records[end].scheduled_at
        events.append(_slice(SLICES[state], row, begins, ends, arguments))
    return events


def _slice(name: str, row: Row, begins: float, ends: float, arguments: dict[str, Any]) -> Event:
    return _event("X", name, begins, row.sequence_id, dur=_us(max(0.0, ends - begins)), args=arguments)


def _preemptions(row: Row, records: Tail[StepRecord]) -> list[Event]:
    events = []
    for column in (column for column in row.preemptions if column >= records.first):
        told = [sentence for at, sentence in row.decisions if at == column and "preempted" in sentence]
        arguments = {"why": "; ".join(told), "step": records[column].step}
        events.append(_event("i", "preempted", records[column].scheduled_at, row.sequence_id, s="t", args=arguments))
    return events


def _copies(one: StepRecord) -> list[Event]:
    by_slot = dict(zip(one.slots, one.sequence_ids, strict=True))
    events = []
    for copy in one.copies:
        arguments = {"source": copy.source, "target": copy.target, "block of its table": copy.index, "step": one.step}
        events.append(_event("i", "copy-on-write", one.scheduled_at, by_slot[copy.slot], s="t", args=arguments))
    return events


def _counters(column: Column, one: StepRecord, num_blocks: int) -> list[Event]:
    used = column.owned + column.shared
    at, tokens = one.scheduled_at, {"prefill": column.prefill, "decode": column.decode}
    if column.padding:
        tokens["padding"] = column.padding
    return [
        _counter("tokens a step", at, tokens),
        _counter("blocks", at, {"used": used, "cached": column.cached, "free": num_blocks - used - column.cached}),
        _counter("sequences", at, {"running": one.num_running, "waiting": one.num_waiting}),
    ]


def _swap_counters(column: Column, one: StepRecord, num_host_blocks: int) -> list[Event]:
    """The swap space after a step, and what the step moved."""
    at, used = one.scheduled_at, column.on_host
    return [
        _counter("swap space", at, {"used": used, "free": num_host_blocks - used}),
        _counter("blocks swapped", at, {"out": len(one.swapped_out), "in": len(one.swapped_in)}),
    ]


def _counter(name: str, at: float, values: dict[str, int]) -> Event:
    return {"ph": "C", "name": name, "ts": _us(at), "pid": ENGINE, "tid": 0, "args": values}


def _event(kind: str, name: str, at: float, sequence_id: int, **more: Any) -> Event:
    return {"ph": kind, "name": name, "ts": _us(at), "pid": SEQUENCES, "tid": sequence_id + 1, **more}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
