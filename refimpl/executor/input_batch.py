"""InputBatch: the running sequences by slot, as tensors that are updated by difference.

A step names slots and counts; everything else stays here: token ids, lengths, block tables, sampling parameters. Lengths
are also kept by the host, which needs them to shape a step. The ids of drawn tokens are written on the device, so the next
step can be prepared before the host has seen them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from refimpl.attention.backend import AttentionMetadata
from refimpl.executor.drafted_rows import DraftedRows
from refimpl.executor.pending import PendingOutput
from refimpl.executor.readout import Read, Readout
from refimpl.executor.table import Table
from refimpl.executor.unsettled import Unsettled
from refimpl.kernels.transfer import array_to_device
from refimpl.outputs import Admission, Batch, NewBlocks, SchedulerOutput
from refimpl.row_extras import RowExtras
from refimpl.sampling.sampler import SamplingRows
from refimpl.sampling.slots import SamplingSlots
from refimpl.speculative.rejection_sampler import Verdict


@dataclass(frozen=True)
class ModelInputs:
    """What the model needs for one step, on its device."""

    input_ids: Int64[Tensor, "T"]
    positions: Int64[Tensor, "T"]
    attention: AttentionMetadata


@dataclass(frozen=True)
class StepInputs:
    """What is to be done in one step: which rows, how far, and who of them draws."""

    row_slots: np.ndarray
    """The slot of each row of the batch."""
    contexts: np.ndarray
    """How far each row's sequence is computed after the step, drafts included."""
    exact: bool
    """Whether ``contexts`` are; else they are bounds, which the device lowers."""
    bounds: np.ndarray
    """The bounds, in any case."""
    query_lens: np.ndarray
    """How many tokens of each row are computed."""
    one_token_each: bool
    drawing: list[int]
    """Rows of the batch that have caught up with their last token, and draw the next."""
    last_tokens: Int64[Tensor, "distinct"]
    """Their last tokens' places in the flat batch, each once: the hidden states to draw from."""
    logits_row: Int64[Tensor, "R"] | None
    """Which of these each of them draws from; None where it is one each. Samples that begin together share one."""
    slots: Int64[Tensor, "R"]
    """Of the rows that draw."""
    slots_on_host: np.ndarray
    num_tokens: np.ndarray
    """Tokens before the one that each of them draws; bounds, as ``contexts``."""
    sampling: SamplingRows
    logprobs: dict[int, int]
    """How many most probable tokens are reported beside the one drawn, for those of the drawing rows that ask."""
    drafted: DraftedRows | None
    """In a step with drafts: every draft's row draws too, to be compared. Then all else that is told of drawing rows is of
    these, one after the other, and ``drawing`` names a row of the batch as often."""


@dataclass(frozen=True)
class _Drawing:
    """The rows of a batch that draw, and what of them stays the same from step to step."""

    mask: np.ndarray
    """Which rows they are, one entry a row."""
    rows: list[int]
    drafted: DraftedRows | None
    place: np.ndarray | int
    """In a step with drafts, of each the number of drafts before it."""
    slots: np.ndarray
    slots_on_device: Int64[Tensor, "R"]
    last_tokens: Int64[Tensor, "distinct"]
    logits_row: Int64[Tensor, "R"] | None
    sampling: SamplingRows


@dataclass
class _Rows:
    """What stays the same as long as a batch does: most steps only go on one token in each row."""

    batch: Batch
    slots: np.ndarray
    counts: np.ndarray
    num_drafts: np.ndarray | int
    query_lens: list[int]
    one_token_each: bool
    offsets: np.ndarray
    """Where each row's tokens begin in the flat batch."""
    slots_on_device: Int64[Tensor, "S"]
    place_in_row: np.ndarray
    """Of each token, counted from 0."""
    first_token_id: Int64[Tensor, "T"]
    """Where the slot of each token has its first one, in all of ``token_ids`` laid end to end (an index of one number is
    several times as fast as one of two)."""
    first_block: Int64[Tensor, "T"]
    """The same in ``block_table``."""
    slot_of_token: Int64[Tensor, "T"]
    drawing: _Drawing | None = None
    """Of the last step."""


class InputBatch:
    """State of ``max_num_seqs`` slots (``N``), each with room for ``max_model_len`` tokens (``L``).

    ``reads_lengths``: whether the attention backend must be told exact lengths by the host, not only on the device.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        sampling: SamplingSlots,
        reads_lengths: bool = True,
    ) -> None:
        self.device = device
        self._reads_lengths = reads_lengths
        self.block_size = block_size
        self.sampling = sampling
        self.readout = Readout(max_num_seqs)
        N, L = max_num_seqs, max_model_len
        self._tokens = Table(N, L, torch.int64, device)
        self._blocks = Table(N, -(-L // block_size), torch.int32, device)
        self.token_ids, self.block_table = self._tokens.on_device, self._blocks.on_device
        self.unsettled = Unsettled(N, device)
        # The host's copies: what shapes a step. With drafts in flight they are bounds, see ``unsettled``.
        self.num_tokens = np.zeros(N, dtype=np.int64)
        self.num_computed_tokens = np.zeros(N, dtype=np.int64)
        self.num_blocks = np.zeros(N, dtype=np.int64)
        self._rows: _Rows | None = None

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Take in a step's changes, in the order that SchedulerOutput promises."""
        for refusal in scheduler_output.refused:
            self.num_tokens[refusal.slot] -= refusal.num_tokens
            self.num_computed_tokens[refusal.slot] -= refusal.num_tokens
            self.num_blocks[refusal.slot] -= refusal.num_blocks
        self.unsettled.settle(scheduler_output.refused)
        self.unsettled.forget([admission.slot for admission in scheduler_output.admitted])
        for slot, token_id in scheduler_output.chosen:
            self._tokens.write(slot, int(self.num_tokens[slot]) - 1, (token_id,))
        self._tokens.send()  # the slot of one may be given to another sequence
        for admission in scheduler_output.admitted:
            self._admit(admission)
        for slot in scheduler_output.restarted:
            self.num_computed_tokens[slot] = 0
        for new_blocks in scheduler_output.new_blocks:
            self._append_blocks(new_blocks)
        self._blocks.send()  # a new block may be copied at once
        for copy in scheduler_output.copies:
            self._blocks.write(copy.slot, copy.index, (copy.target,))
        self._tokens.send()
        self._blocks.send()

    def _admit(self, admission: Admission) -> None:
        self._rows = None  # what is kept of them holds the parameters of their slots
        slot, count = admission.slot, len(admission.token_ids)
        self._tokens.write(slot, 0, admission.token_ids)
        self.num_tokens[slot] = count
        self.num_computed_tokens[slot] = admission.num_computed_tokens
        self.num_blocks[slot] = 0
        self.sampling.admit(admission)
        self.readout.admit(admission)

    def _append_blocks(self, new_blocks: NewBlocks) -> None:
        self._blocks.write(new_blocks.slot, int(self.num_blocks[new_blocks.slot]), new_blocks.block_ids)
        self.num_blocks[new_blocks.slot] += len(new_blocks.block_ids)

    def prepare(self, batch: Batch) -> StepInputs:
        """Shape a step, and count its tokens as computed."""
        if self._rows is None or self._rows.batch is not batch:
            self._rows = self._make_rows(batch)
        rows = self._rows
        starts = self.num_computed_tokens[rows.slots]
        contexts = starts + rows.counts
        self.num_computed_tokens[rows.slots] = contexts
        drawing = self._draw(rows, contexts - rows.num_drafts == self.num_tokens[rows.slots])
        num_tokens = self.num_tokens[drawing.slots] + drawing.place
        bounds = contexts
        exact = self._reads_lengths or self.sampling.asks(drawing.slots)
        if exact:
            contexts = contexts - self.unsettled.on_host(rows.slots)
            num_tokens = num_tokens - self.unsettled.on_host(drawing.slots)
        sampling = self.sampling.at(drawing.sampling, drawing.slots, num_tokens, self.token_ids)
        if not exact:
            sampling = replace(sampling, position=self.unsettled.lowered(sampling.position, drawing.slots_on_device))
        return StepInputs(
            row_slots=rows.slots,
            contexts=contexts,
            exact=exact,
            bounds=bounds,
            query_lens=rows.counts,
            one_token_each=rows.one_token_each,
            drawing=drawing.rows,
            last_tokens=drawing.last_tokens,
            logits_row=drawing.logits_row,
            slots=drawing.slots_on_device,
            slots_on_host=drawing.slots,
            num_tokens=num_tokens,
            sampling=sampling,
            logprobs=self.readout.logprob_counts(drawing.slots),
            drafted=drawing.drafted,
        )

    def model_inputs(self, inputs: StepInputs) -> ModelInputs:
        """The tokens of the step that was prepared last, for the model."""
        rows = self._rows
        assert rows is not None
        assert rows.slots is inputs.row_slots, "another step was prepared since"
        starts = np.repeat(inputs.contexts - rows.counts, rows.counts)
        positions = self._to_device(starts + rows.place_in_row)
        if not inputs.exact:
            positions = self.unsettled.lowered(positions, rows.slot_of_token)
        attention = AttentionMetadata.of(
            query_lens=rows.query_lens,
            context_lens=inputs.contexts.tolist(),
            block_size=self.block_size,
            block_table=self.block_table[rows.slots_on_device, : -(-int(inputs.contexts.max()) // self.block_size)],
            slot_mapping=self._slot_mapping(rows.first_block, positions),
        )
        if not inputs.exact:
            seqused_k = self.unsettled.lowered(attention.seqused_k.long(), rows.slots_on_device)
            attention = attention.with_contexts(seqused_k)
        input_ids = self.token_ids.view(-1).index_select(0, rows.first_token_id + positions)
        return ModelInputs(input_ids, positions, attention)

    def reads(self, inputs: StepInputs) -> list[Read]:
        """What is read of the model at other positions than those that draw, in the step that was prepared last."""
        rows = self._rows
        assert rows is not None
        return self.readout.reads(rows.slots, inputs.contexts - rows.counts, rows.counts, rows.offsets)

    def with_drafts(self, inputs: StepInputs) -> StepInputs:
        """The step, once its drafts are written: penalties and bad words behind them count them."""
        if not self.sampling.asks(inputs.slots_on_host):
            return inputs
        rows = self.sampling.at(inputs.sampling, inputs.slots_on_host, inputs.num_tokens, self.token_ids)
        return replace(inputs, sampling=rows)

    def take_back(self, batch: Batch, num: np.ndarray) -> Batch:
        """Undo :meth:`prepare`, since of the drafts planned for the rows there are only ``num``. Gives a batch of these.

        The host goes on to count all that were planned: the others are refused, unseen.
        """
        slots, planned, counts = (np.asarray(one) for one in (batch.slots, batch.num_drafts, batch.num_new_tokens))
        missing = planned - num
        self.num_computed_tokens[slots] -= counts - missing
        self.num_tokens[slots] += missing
        self.unsettled.refuse(self._to_device(slots), self._to_device(missing))
        drafts = tuple(num.tolist()) if num.any() else ()
        return Batch(-1, batch.sequence_ids, batch.slots, tuple((counts - missing).tolist()), drafts)

    def _make_rows(self, batch: Batch) -> _Rows:
        slots, counts = np.asarray(batch.slots), np.asarray(batch.num_new_tokens)
        num_drafts = np.asarray(batch.num_drafts) if batch.num_drafts else 0
        offsets = counts.cumsum() - counts
        slot_of_token = np.repeat(slots, counts)
        return _Rows(
            batch=batch,
            slots=slots,
            counts=counts,
            num_drafts=num_drafts,
            query_lens=counts.tolist(),
            one_token_each=bool((counts == 1).all()),
            offsets=offsets,
            slots_on_device=self._to_device(slots),
            place_in_row=np.arange(len(slot_of_token)) - np.repeat(offsets, counts),
            first_token_id=self._to_device(slot_of_token * self.token_ids.shape[1]),
            first_block=self._to_device(slot_of_token * self.block_table.shape[1]),
            slot_of_token=self._to_device(slot_of_token),
        )

    def _draw(self, rows: _Rows, mask: np.ndarray) -> _Drawing:
        """The rows that draw; those of the last step, if they are the same."""
        if rows.drawing is None or not np.array_equal(rows.drawing.mask, mask):
            drawing = np.flatnonzero(mask)
            place: np.ndarray | int = 0
            # A row of 0 tokens ends where the row before it does, so it draws from the same token.
            last_tokens, drafted = (rows.offsets + rows.counts)[drawing] - 1, None
            if not isinstance(rows.num_drafts, int):
                drafted = DraftedRows.of(drawing, rows.num_drafts[drawing], rows.slots[drawing], self.device)
                drawing, place, last_tokens = drafted.spread(drawing, last_tokens)
            slots = rows.slots[drawing]
            distinct, logits_row = np.unique(last_tokens, return_inverse=True)
            on_device = self._to_device(slots)
            rows.drawing = _Drawing(
                mask=mask,
                rows=drawing.tolist(),
                drafted=drafted,
                place=place,
                slots=slots,
                slots_on_device=on_device,
                last_tokens=self._to_device(distinct),
                logits_row=self._to_device(logits_row) if len(distinct) < len(drawing) else None,
                sampling=self.sampling.rows(slots, on_device),
            )
        return rows.drawing

    def _slot_mapping(self, first_block: Int[Tensor, "T"], positions: Int[Tensor, "T"]) -> Int64[Tensor, "T"]:
        """Where each token's key and value go in the cache: ``block_id * B + offset``."""
        block_ids = self.block_table.view(-1).index_select(0, first_block + positions // self.block_size)
        return block_ids.long() * self.block_size + positions % self.block_size

    def commit(
        self,
        inputs: StepInputs,
        token_ids: Int64[Tensor, "R"],
        extras: dict[int, RowExtras],
        draft_failure: str | None = None,
    ) -> PendingOutput:
        """Append the tokens drawn to their sequences, on the device, and have their ids brought to the host."""
        num_rows = len(inputs.row_slots)
        if not inputs.drawing:
            return PendingOutput(num_rows, [], None, extras, draft_failure)
        self.token_ids[inputs.slots, inputs.sampling.position] = token_ids.clamp(min=0)
        self.num_tokens[inputs.slots_on_host] += 1
        return PendingOutput(num_rows, inputs.drawing, token_ids, extras, draft_failure)

    def commit_checked(self, inputs: StepInputs, drafted: DraftedRows, verdict: Verdict) -> None:
        """Append accepted drafts and the token behind them, on the device. What the host counts beyond is unsettled."""
        token_ids = verdict.token_ids[drafted.row, drafted.place]
        self.token_ids[inputs.slots, inputs.sampling.position] = token_ids.clamp(min=0)
        np.add.at(self.num_tokens, inputs.slots_on_host, 1)
        self.unsettled.refuse(drafted.slots, drafted.num_planned - verdict.num_accepted)

    def _to_device(self, array: np.ndarray) -> Int64[Tensor, "size"]:
        return array_to_device(array, self.device, torch.int64)
