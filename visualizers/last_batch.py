"""LastBatch: a batch that does the same in step after step is taken in once, for all of those steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from refimpl.events import StepRecord
from refimpl.outputs import NO_TOKEN
from refimpl.visualizers.sequence_state import SequenceState


class LastBatch:
    """The batch of the newest record, and what it did in the steps that sequences have not been told of yet."""

    def __init__(self) -> None:
        self._rows: tuple[Sequence[int], Sequence[int]] = (), ()
        """Its sequences, and how many tokens each computed."""
        self._texts: list[Sequence[str]] = []
        """The tokens of each step that is not told yet."""
        self._slots: tuple[Sequence[int], Sequence[int]] = (), ()
        """The slots and the sequences for which ``_by_slot`` was made."""
        self._by_slot: dict[int, int] = {}

    @property
    def untold(self) -> bool:
        """Whether there are such steps."""
        return bool(self._texts)

    def goes_on(self, record: StepRecord) -> bool:
        """Whether a record computes the same as the last one and draws a token for each row, and nobody comes or goes."""
        comes_or_goes = record.admitted or record.preempted or record.forks or record.aborted or record.exhausted
        if comes_or_goes or record.finished or record.num_drafts:
            return False
        if record.chosen or record.restarted or NO_TOKEN in record.token_ids:
            return False
        same = (record.sequence_ids, record.num_new_tokens) == self._rows
        return same and len(record.token_texts) == len(record.sequence_ids)

    def add(self, record: StepRecord) -> None:
        """A step with which it goes on, of which nobody is told yet."""
        self._texts.append(record.token_texts)

    def begin(self, record: StepRecord) -> None:
        """Another batch, whose sequences are told by the caller."""
        self._rows = record.sequence_ids, record.num_new_tokens

    def tell(self, sequences: Mapping[int, SequenceState]) -> None:
        """Tell sequences what was computed and drawn for them."""
        if not self._texts:
            return
        steps, told = len(self._texts), zip(*self._texts, strict=True)
        self._texts = []
        for sequence_id, num_new_tokens, texts in zip(*self._rows, told, strict=True):
            sequence = sequences.get(sequence_id)
            if sequence is not None and sequence.phase != "finished":
                sequence.num_computed_tokens += steps * num_new_tokens
                sequence.texts += texts[len(sequence.texts) - sequence.num_tokens :]
                sequence.num_tokens += steps

    def by_slot(self, record: StepRecord) -> Mapping[int, int]:
        """Who holds each slot that a record's lists of blocks name: for one batch after the other, mostly the same."""
        if record.admitted or (record.slots, record.sequence_ids) != self._slots:
            admitted = {slot: sequence_id for sequence_id, slot, _ in record.admitted}
            self._by_slot = dict(zip(record.slots, record.sequence_ids, strict=True)) | admitted
            self._slots = record.slots, record.sequence_ids
        return self._by_slot
