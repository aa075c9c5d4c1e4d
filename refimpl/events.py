"""What happened in the engine: one record a step, and the log that keeps, sends, saves and replays them.

Widgets, ``explain`` and recorded traces read these records and nothing else. A record is columnar: parallel tuples, one
entry a row. Within a record, things happen in this order::

    arrived · reset · aborted, exhausted, preempted · evicted · admitted · swapped_in · allocated · copies · the batch
    published · tokens (accepted drafts, then the one drawn) · returned · finished

A record is written when its step's tokens are taken in, in the order of the steps. With overlap the next step has been
planned by then, and may hold rows and blocks of sequences that this one ends: whoever rebuilds tables skips what has ended.

On disk a log is JSON lines (gzipped where the name ends in .gz): a header, then a record a line.
"""

from __future__ import annotations

import gzip
import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from refimpl.errors import RefimplError
from refimpl.outputs import BlockCopy, CacheChanges, Decision, Finish, Preemption, PrefixHit

SCHEMA_VERSION = 1

log = logging.getLogger(__name__)


class ArrivalRecord(msgspec.Struct, frozen=True, gc=False):
    """A request joined the queue. Its tokens' texts are here since whoever replays a log has no tokenizer."""

    request_id: str
    sequence_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]


class StepRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """All that one step changed. Sequences are named by ``sequence_id``; times are seconds since the log's start."""

    step: int
    scheduled_at: float
    updated_at: float
    # the batch, one entry a row
    sequence_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    num_new_tokens: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Drawn and kept; -1 where the row drew none, or one too many after its end."""
    token_texts: tuple[str, ...] = ()
    # requests
    arrived: tuple[ArrivalRecord, ...] = ()
    aborted: tuple[Finish, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    exhausted: tuple[Finish, ...] = ()
    admitted: tuple[tuple[int, int, int], ...] = ()
    """(sequence, slot, tokens already in the cache)."""
    restarted: tuple[int, ...] = ()
    """Slots that compute again from position 0 (``enable_kv_cache=False``)."""
    finished: tuple[Finish, ...] = ()
    # blocks
    allocated: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, block ids appended to its table): new ones, cached ones, and those that a fork shares."""
    copies: tuple[BlockCopy, ...] = ()
    """Copy-on-write: a shared block of a table is replaced by a copy."""
    cache_changes: CacheChanges = CacheChanges()
    """What the prefix cache took in and forgot; a block of no table is cached if it was published, else free."""
    prefix_hits: tuple[PrefixHit, ...] = ()
    """Cached blocks at the head of a table, which are also in ``allocated``."""
    swapped_out: tuple[tuple[int, int], ...] = ()
    swapped_in: tuple[tuple[int, int], ...] = ()
    """(device block, host block)."""
    forks: tuple[tuple[int, int], ...] = ()
    """(parent sequence, child sequence)."""
    beams: tuple[tuple[int, ...], ...] = ()
    """The sequences of each beam search that moved on, best first. Forks among them are in the next record."""
    chosen: tuple[tuple[int, int, str], ...] = ()
    """(sequence, token, its text): what searches chose for their beams, whose rows draw nothing."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Token ids drafted for each row; empty where no row has any."""
    draft_texts: tuple[tuple[str, ...], ...] = ()
    num_drafts: tuple[int, ...] = ()
    """How many were planned for each row: all count as computed until their check is known."""
    num_accepted: tuple[int, ...] = ()
    """Of each row's drafts, the first so many were accepted, and taken before the row's token."""
    returned: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(sequence, block ids cut off its table): taken for drafts that were refused, and given back."""
    # the pool and the queue after planning
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    decisions: tuple[Decision, ...] = ()


class LogHeader(msgspec.Struct, frozen=True):
    """The first line of a saved log."""

    schema: int
    refimpl: str
    started_at: float
    """Wall-clock time of the log's second 0, in Unix seconds."""
    clock: str
    """What the times count: "monotonic" (a real engine) or "virtual" (a simulated one)."""
    config: dict[str, Any]
    """The engine's numbers: model, block_size, num_blocks, num_host_blocks, max_num_seqs, max_num_batched_tokens,
    max_model_len, and, where there is a model, device, weight_bytes and block_bytes (of a block over all layers); where
    tokens are drafted, num_speculative_tokens."""


class _Version(msgspec.Struct):
    """What every schema's header has."""

    schema: int
    refimpl: str = "its version is not noted"


RowKind = Literal["prefill", "decode"]


class RowKinds:
    """Tells the two kinds of rows apart, record by record in the order of the log.

    "prefill" computes tokens that are known, up to and with the row that draws a new one: those of a prompt, or all of them
    after a preemption. "decode" goes on from the token drawn last.
    """

    def __init__(self, prefilling: Iterable[int] = ()) -> None:
        self._prefilling = set(prefilling)
        """Sequences; at first, those of a log that begins in the middle of a run."""
        self._swapped: dict[int, bool] = {}
        """Whether each swapped sequence was prefilling when it left: it goes on with that."""

    def of(self, record: StepRecord) -> list[RowKind]:
        """The kind of each row of the next record."""
        prefilling = self._prefilling
        if not prefilling and not record.admitted and not record.preempted:
            return ["decode"] * len(record.sequence_ids)
        prefilling.difference_update(finish.sequence_id for finish in (*record.aborted, *record.exhausted))
        for preemption in record.preempted:
            self._swapped.pop(preemption.sequence_id, None)
            if preemption.mode == "swap":
                self._swapped[preemption.sequence_id] = preemption.sequence_id in prefilling
            prefilling.discard(preemption.sequence_id)
        parents = {child: parent for parent, child in record.forks}
        for sequence_id, _, _ in record.admitted:
            if not self._swapped.pop(sequence_id, True):
                continue
            parent = parents.get(sequence_id)
            if parent is None or parent in prefilling:  # a fork of one that decodes goes on decoding
                prefilling.add(sequence_id)
        kinds: list[RowKind] = ["prefill" if s in prefilling else "decode" for s in record.sequence_ids]
        drew = (s for s, token in zip(record.sequence_ids, record.token_ids, strict=False) if token >= 0)
        prefilling.difference_update(drew)
        prefilling.difference_update(finish.sequence_id for finish in record.finished)
        return kinds


class EventLog:
    """A ring buffer of step records with subscribers.

    ``capacity`` is in steps; 0 keeps nothing, and then the engine makes no records unless someone subscribes.
    """

    def __init__(self, header: LogHeader, capacity: int) -> None:
        self.header = header
        self.records: deque[StepRecord] = deque(maxlen=capacity)
        self._subscribers: list[Callable[[StepRecord], None]] = []

    @property
    def wanted(self) -> bool:
        """Whether anybody would see a record."""
        return bool(self._subscribers) or self.records.maxlen != 0

    def append(self, record: StepRecord) -> None:
        """Keep a record and hand it to each subscriber. A subscriber that raises is dropped, with a warning."""
        self.records.append(record)
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(record)
            except Exception:
                log.warning("an event subscriber raised and gets no more events: %r", subscriber, exc_info=True)
                self._unsubscribe(subscriber)

    def subscribe(self, subscriber: Callable[[StepRecord], None]) -> Callable[[], None]:
        """Call ``subscriber(record)`` after each step, in the engine's thread. Returns what ends the subscription.

        The engine waits for it. Of that engine it may abort requests and look into it, and order nothing else.
        """
        self._subscribers.append(subscriber)
        return lambda: self._unsubscribe(subscriber)

    def _unsubscribe(self, subscriber: Callable[[StepRecord], None]) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def save(self, path: str | Path) -> None:
        """Write the header and the records that are kept, as JSON lines (gzipped if the name ends in .gz)."""
        with self.saving(path) as write:
            for record in tuple(self.records):
                write(record)

    @contextmanager
    def saving(self, path: str | Path) -> Iterator[Callable[[StepRecord], object]]:
        """Write the header, and then each record that is given to the function yielded; the same log, the same bytes."""
        encode, path = msgspec.json.encode, Path(path)
        with path.open("wb") as raw, _zipped(raw) if path.suffix == ".gz" else nullcontext(raw) as file:
            file.write(encode(self.header) + b"\n")
            yield lambda record: file.write(encode(record) + b"\n")

    @classmethod
    def load(cls, path: str | Path, partial: bool = False) -> EventLog:
        """Read a saved log. With ``partial``, one that was cut off within its last record is read up to there (logged).

        Raises:
            RefimplError: it is no event log, is cut short, or was written by another schema version.

        """
        path = Path(path)
        try:
            with _open(path) as file:
                first_line = file.readline()
                written_by = msgspec.json.decode(first_line, type=_Version)  # alone: another schema has other fields
                if written_by.schema != SCHEMA_VERSION:
                    raise RefimplError(
                        f"{path} has event schema {written_by.schema}; this refimpl reads {SCHEMA_VERSION}. "
                        f"Read it with the refimpl that wrote it ({written_by.refimpl})"
                    )
                header = msgspec.json.decode(first_line, type=LogHeader)
                records = _read_records(file, path if partial else None)
        except OSError as error:
            if isinstance(error, gzip.BadGzipFile):
                raise RefimplError(f"{path} is no event log, or is damaged: {error}") from error
            raise RefimplError(f"{path} cannot be read: {error}") from error
        except (msgspec.MsgspecError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise RefimplError(f"{path} is no event log, or is damaged: {error}") from error
        loaded = cls(header, capacity=max(1, len(records)))
        loaded.records.extend(records)
        return loaded

    def to_pandas(self) -> Any:
        """One row a step and sequence in its batch, as a ``pandas.DataFrame``.

        Columns: step, scheduled_at, updated_at, sequence_id, request_id (missing where the arrival is not in the log any
        more), slot, num_new_tokens, token_id and token_text (missing where the row drew none), kind (prefill or decode),
        num_drafts (tokens drafted for the row) and num_accepted (how many of them it took before ``token_id``).

        Raises:
            RefimplError: pandas is not installed.

        """
        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise RefimplError("to_pandas needs pandas, which is not installed: pip install pandas") from error
        kinds, requests, rows = RowKinds(), dict[int, str](), []
        for record in tuple(self.records):
            requests |= {s: arrival.request_id for arrival in record.arrived for s in arrival.sequence_ids}
            none = (0,) * len(record.sequence_ids)
            drafts = tuple(map(len, record.drafts)) or none, record.num_accepted or none
            tokens = (record.num_new_tokens, record.token_ids, record.token_texts)
            columns = (record.slots, *tokens, kinds.of(record), *drafts)
            times = (record.step, record.scheduled_at, record.updated_at)
            for sequence_id, slot, number, token, text, *more in zip(record.sequence_ids, *columns, strict=True):
                drawn = (token, text) if token >= 0 else (None, None)
                rows.append((*times, sequence_id, requests.get(sequence_id), slot, number, *drawn, *more))
        frame = pd.DataFrame(rows, columns=list(_TABLE))
        return frame.astype({name: kind for name, kind in _TABLE.items() if kind})

    def replay(self, speed: float | None = None) -> Iterator[StepRecord]:
        """The records in order: at once, or waiting between them as they were apart, ``speed`` times as fast.

        Raises:
            RefimplError: ``speed`` is not above 0.

        """
        if speed is not None and not speed > 0:
            raise RefimplError(f"speed is {speed}; it must be above 0 (2 is twice as fast), or None to wait for nothing")
        previous: float | None = None
        for record in tuple(self.records):
            if speed is not None and previous is not None:
                time.sleep(max(0.0, (record.updated_at - previous) / speed))
            previous = record.updated_at
            yield record


def _read_records(file: IO[Any], partial: Path | None) -> list[StepRecord]:
    """The rest of a log's lines. ``partial`` is the name of a file that may end within one."""
    records: list[StepRecord] = []
    decode, line = msgspec.json.Decoder(StepRecord).decode, b"\n"
    try:
        for line in file:
            records.append(decode(line))
    except (msgspec.DecodeError, EOFError) as error:
        cut = isinstance(error, EOFError) or not line.endswith(b"\n")
        if partial is None or not cut:
            raise
        log.warning(
            "%s ends in the middle of a record: its writer was cut off. %d records before that were read",
            partial,
            len(records),
        )
    return records


_TABLE = {
    "step": "int64",
    "scheduled_at": "float64",
    "updated_at": "float64",
    "sequence_id": "int64",
    "request_id": None,
    "slot": "int64",
    "num_new_tokens": "int64",
    "token_id": "Int64",
    "token_text": None,
    "kind": None,
    "num_drafts": "int64",
    "num_accepted": "int64",
}
"""The columns of ``to_pandas`` and their types; without one it is text."""


def _open(path: Path) -> IO[Any]:
    opened: IO[Any] = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[assignment]  # noqa: SIM115
    return opened


def _zipped(raw: IO[bytes]) -> gzip.GzipFile:
    """Without the time and the name that gzip would put into the file."""
    return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
