"""DraftModelProposer: a second, smaller model of the same vocabulary drafts (Leviathan et al. 2023; Chen et al. 2023).

Its keys and values lie in tensors of its own, in the blocks that the sequences have already: block i of the draft model
holds the same tokens as block i of the model, so allocation, sharing and eviction are decided once for both. A block that
is copied on write is copied in both.

**No gaps.** A sequence's ``lag`` is the number of its last tokens that the draft model may not have computed. It computes
these first, in one pass that also gives the first draft, then one token more for each further draft. Of K drafts it
computes the first K − 1, so after a round in which all K were accepted two tokens are missing, the last draft and the one
drawn behind it; after any other round one is. Which of the two it was only the device knows; computing a token again
changes nothing, so the lag after a round is 2. After steps without drafts, a preemption, a fork or a prefix hit it is more,
up to the whole sequence, and caught up with before the next draft, as the budget of a step allows.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.attention.backend import AttentionBackend, AttentionMetadata
from refimpl.cache.kv_cache import KVCache
from refimpl.kernels.transfer import array_to_device, to_device
from refimpl.models.llama import LlamaForCausalLM
from refimpl.outputs import SchedulerOutput
from refimpl.speculative.head_proposer import stacked
from refimpl.speculative.proposer import DraftRows, Drafts, Proposer


@runtime_checkable
class RecordedSteps(Protocol):
    """CUDA graphs of the draft model (``executor.check_graphs.DraftGraphs``)."""

    def hidden(self, slots: np.ndarray, contexts: np.ndarray, count: int) -> Float[Tensor, "S H"] | None:
        """Hidden states of the rows' last tokens, of ``count`` that each computes; None where that is not recorded."""

    def release(self) -> None:
        """Give their memory back."""


class DraftModelProposer(Proposer):
    """Drafts by a model with a cache of its own.

    Args:
        model: the draft model, loaded.
        kv_cache: its keys and values, as many blocks as the model's.
        backend: attention over them.
        max_num_seqs: slots.
        max_num_batched_tokens: the most tokens that it computes in one pass.

    """

    name = "draft_model"
    on_every_rank = True

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: KVCache,
        backend: AttentionBackend,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.model, self.kv_cache, self.backend = model, kv_cache, backend
        self.graphs: RecordedSteps | None = None
        """Recorded passes of one and of two tokens a row; on a GPU, once they are there."""
        self.max_len = model.config.context_limit()
        self._budget = max_num_batched_tokens
        self.lag = np.zeros(max_num_seqs, dtype=np.int64)
        """By slot: how many of the last tokens are to be computed before anything is drafted."""

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Who takes a slot has computed nothing here; copied blocks are copied."""
        for admission in scheduler_output.admitted:
            self.lag[admission.slot] = len(admission.token_ids)
        self.kv_cache.copy_blocks([(copy.source, copy.target) for copy in scheduler_output.copies])

    def observe(self, slots: np.ndarray, on_device: Int64[Tensor, "S"], states: Float[Tensor, "S H"]) -> None:
        """Sequences that were not drafted for are one token further on."""
        self.lag[slots] += 1

    def propose(self, rows: DraftRows) -> Drafts:
        """Catch up, then draft one token after the other."""
        counts = self._share(np.where(rows.planned > 0, self.lag[rows.slots_on_host], 0))
        left = self.lag[rows.slots_on_host] - counts
        drafting = np.flatnonzero((rows.planned > 0) & (left == 0))
        hidden = self._forward(rows, np.flatnonzero(counts), counts, left)
        num = np.where(np.isin(np.arange(len(counts)), drafting), rows.planned, 0)
        self.lag[rows.slots_on_host] = np.where(num > 0, 1, left)  # and one more in ``observe``, for the token drawn
        drafted: list[Tensor] = []
        laws: list[Tensor | None] = []
        for place in range(int(num.max(initial=0))):
            if place:
                going_on = np.flatnonzero(num > place)
                hidden = self._forward(rows, going_on, np.ones_like(counts), np.full_like(counts, -place))
            token_ids, law = rows.draw(self.model.compute_logits(hidden), place)
            drafted.append(token_ids)
            laws.append(law)
        table = torch.stack(drafted, 1) if drafted else rows.slots.new_zeros(len(counts), 0)
        return Drafts(table, array_to_device(num, rows.slots.device), stacked(laws))

    def _share(self, wanted: np.ndarray) -> np.ndarray:
        """What of each row's lag is computed in this step: the budget, to one row after the other."""
        before = wanted.cumsum() - wanted
        shares: np.ndarray = np.clip(self._budget - before, 0, wanted)
        return shares

    def _forward(self, rows: DraftRows, chosen: np.ndarray, counts: np.ndarray, left: np.ndarray) -> Float[Tensor, "S H"]:
        """Compute ``counts[i]`` tokens of each chosen row i, of which ``left[i]`` known ones follow (a draft: −1).

        Gives the hidden state of each one's last token; that of rows which are not chosen means nothing.
        """
        if len(chosen) == len(counts) and (recorded := self._recorded(rows, counts, left)) is not None:
            return recorded
        device, B = rows.slots.device, rows.block_size
        count, ends = counts[chosen], (rows.lengths - left)[chosen]
        row_of = np.repeat(chosen, count)
        before_end = np.repeat(count.cumsum(), count) - np.arange(len(row_of)) + left[row_of]  # 1: the last known token
        sent = torch.from_numpy(np.stack((row_of, before_end)))
        row, distance = to_device(sent, device)
        slots, positions = rows.slots[row], rows.positions[row] - distance
        block_ids = rows.block_table[slots, positions // B].long()
        picked = array_to_device(chosen, device)
        attention = AttentionMetadata.of(
            query_lens=count.tolist(),
            context_lens=ends.tolist(),
            block_size=B,
            block_table=rows.block_table[rows.slots[picked], : -(-int(ends.max()) // B)],
            slot_mapping=block_ids * B + positions % B,
        ).with_contexts(rows.positions[picked] - array_to_device(left[chosen], device))
        hidden: Tensor = self.model(
            rows.token_ids[slots, positions], positions, self.kv_cache.layers, self.backend.begin_step(attention)
        )
        last = hidden[array_to_device(count.cumsum() - 1, device)]
        if len(chosen) == len(counts):
            return last
        return last.new_zeros(len(counts), last.shape[1]).index_copy_(0, picked, last)

    def _recorded(self, rows: DraftRows, counts: np.ndarray, left: np.ndarray) -> Float[Tensor, "S H"] | None:
        """The same by a recorded pass, if there is one: for all rows alike, one or two tokens each."""
        count = int(counts[0])
        if self.graphs is None or (counts != count).any():
            return None
        return self.graphs.hidden(rows.slots_on_host, rows.bounds - left, count)

    def release(self) -> None:
        """Weights and cache."""
        if self.graphs is not None:
            self.graphs.release()
        self.model.release()
        self.kv_cache.release()
