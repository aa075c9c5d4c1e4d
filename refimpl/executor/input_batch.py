"""InputBatch: the running sequences by slot, as tensors that are updated by difference.

A step names slots and counts; everything else stays here: token ids, lengths, block tables, sampling parameters. Lengths
are also kept by the host, which needs them to shape a step. The ids of drawn tokens are written on the device, so the next
step can be prepared before the host has seen them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from refimpl.attention.backend import AttentionMetadata
from refimpl.executor.readout import Read, Readout
from refimpl.outputs import NO_TOKEN, Admission, Batch, ModelRunnerOutput, NewBlocks, SchedulerOutput
from refimpl.row_extras import RowExtras
from refimpl.sampling.sampler import SamplingRows
from refimpl.sampling.slots import SamplingSlots


@dataclass(frozen=True)
class StepInputs:
    """What the model and the sampler need for one step."""

    input_ids: Int64[Tensor, "T"]
    positions: Int64[Tensor, "T"]
    attention: AttentionMetadata
    drawing: list[int]
    """Rows of the batch that have caught up with their last token, and draw the next."""
    last_tokens: Int64[Tensor, "distinct"]
    """Their last tokens' places in the flat batch, each once: the hidden states to draw from."""
    logits_row: Int64[Tensor, "R"] | None
    """Which of these each of them draws from; None where it is one each. Samples that begin together share one."""
    slots: Int64[Tensor, "R"]
    sampling: SamplingRows
    logprobs: dict[int, int]
    """How many most probable tokens are reported beside the one drawn, for those of the drawing rows that ask."""
    reads: list[Read]
    """What is read of the model at other positions than those that draw."""


class InputBatch:
    """State of ``max_num_seqs`` slots (``N``), each with room for ``max_model_len`` tokens (``L``)."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device, sampling: SamplingSlots
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.sampling = sampling
        self.readout = Readout(max_num_seqs)
        N, L = max_num_seqs, max_model_len
        self.token_ids = torch.zeros(N, L, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(N, -(-L // block_size), dtype=torch.int32, device=device)
        # The host's copies: what shapes a step.
        self.num_tokens = np.zeros(N, dtype=np.int64)
        self.num_computed_tokens = np.zeros(N, dtype=np.int64)
        self.num_blocks = np.zeros(N, dtype=np.int64)

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Take in a step's changes, in the order that SchedulerOutput promises."""
        for slot, token_id in scheduler_output.chosen:
            self.token_ids[slot, int(self.num_tokens[slot]) - 1] = token_id
        for admission in scheduler_output.admitted:
            self._admit(admission)
        for slot in scheduler_output.restarted:
            self.num_computed_tokens[slot] = 0
        for new_blocks in scheduler_output.new_blocks:
            self._append_blocks(new_blocks)
        for copy in scheduler_output.copies:
            self.block_table[copy.slot, copy.index] = copy.target

    def _admit(self, admission: Admission) -> None:
        slot, count = admission.slot, len(admission.token_ids)
        self.token_ids[slot, :count] = torch.tensor(admission.token_ids, device=self.device)
        self.num_tokens[slot] = count
        self.num_computed_tokens[slot] = admission.num_computed_tokens
        self.num_blocks[slot] = 0
        self.sampling.admit(admission)
        self.readout.admit(admission)

    def _append_blocks(self, new_blocks: NewBlocks) -> None:
        first = self.num_blocks[new_blocks.slot]
        last = first + len(new_blocks.block_ids)
        self.block_table[new_blocks.slot, first:last] = torch.tensor(new_blocks.block_ids, dtype=torch.int32)
        self.num_blocks[new_blocks.slot] = last

    def prepare(self, batch: Batch) -> StepInputs:
        """Shape a step, and count its tokens as computed."""
        slots, counts = np.asarray(batch.slots), np.asarray(batch.num_new_tokens)
        starts = self.num_computed_tokens[slots]
        contexts = starts + counts
        ends = counts.cumsum()
        token_slots = self._to_device(np.repeat(slots, counts))
        positions = self._to_device(np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1]))
        self.num_computed_tokens[slots] = contexts
        drawing = np.flatnonzero(contexts == self.num_tokens[slots])
        drawing_slots = self._to_device(slots[drawing])
        # A row of 0 tokens ends where the row before it does, so it draws from the same token.
        last_tokens, logits_row = np.unique(ends[drawing] - 1, return_inverse=True)
        return StepInputs(
            input_ids=self.token_ids[token_slots, positions],
            positions=positions,
            attention=AttentionMetadata.of(
                query_lens=counts.tolist(),
                context_lens=contexts.tolist(),
                block_size=self.block_size,
                block_table=self.block_table[self._to_device(slots), : -(-int(contexts.max()) // self.block_size)],
                slot_mapping=self._slot_mapping(token_slots, positions),
            ),
            drawing=drawing.tolist(),
            last_tokens=self._to_device(last_tokens),
            logits_row=self._to_device(logits_row) if len(last_tokens) < len(drawing) else None,
            slots=drawing_slots,
            sampling=self.sampling.rows(slots[drawing], self.num_tokens[slots[drawing]], drawing_slots, self.token_ids),
            logprobs=self.readout.logprob_counts(slots[drawing]),
            reads=self.readout.reads(slots, starts, counts, ends - counts),
        )

    def _slot_mapping(self, token_slots: Int[Tensor, "T"], positions: Int[Tensor, "T"]) -> Int64[Tensor, "T"]:
        """Where each token's key and value go in the cache: ``block_id * B + offset``."""
        block_ids = self.block_table[token_slots, positions // self.block_size].long()
        return block_ids * self.block_size + positions % self.block_size

    def commit(
        self, inputs: StepInputs, num_rows: int, token_ids: Int64[Tensor, "R"], extras: dict[int, RowExtras]
    ) -> ModelRunnerOutput:
        """Append the tokens drawn to their sequences, on the device, and bring their ids to the host."""
        drawn = [NO_TOKEN] * num_rows
        if inputs.drawing:
            self.token_ids[inputs.slots, inputs.sampling.position] = token_ids.clamp(min=0)
            self.num_tokens[inputs.slots.cpu().numpy()] += 1
            for row, token_id in zip(inputs.drawing, token_ids.tolist(), strict=True):
                drawn[row] = token_id
        return ModelRunnerOutput(tuple(drawn), extras)

    def _to_device(self, array: np.ndarray) -> Int64[Tensor, "size"]:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device, non_blocking=True)
