"""HeadProposer: drafts by a small trained head over the model's own hidden states (``speculative.head_model``)."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.attention.backend import AttentionBackend, AttentionMetadata
from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels.transfer import to_device
from refimpl.models.llama import LlamaForCausalLM
from refimpl.outputs import SchedulerOutput
from refimpl.speculative.head_model import DraftHead, PagedContext
from refimpl.speculative.proposer import DraftRows, Drafts, Proposer


class HeadProposer(Proposer):
    """Keeps, by slot, the hidden state that each sequence's last token was drawn from. It has no cache of its own."""

    name = "head"
    on_every_rank = True

    def __init__(
        self,
        head: DraftHead,
        target: LlamaForCausalLM,
        layers: list[LayerKV],
        backend: AttentionBackend,
        max_num_seqs: int,
    ) -> None:
        self._head, self._target, self._layers, self._backend = head, target, layers, backend
        self._known = np.zeros(max_num_seqs, dtype=bool)
        """Slots whose state is that of the sequence in it."""
        shape, device = (max_num_seqs, head.config.hidden_size), head.embed_tokens.device
        self._states = torch.zeros(shape, dtype=target.activations, device=device)

    def propose(self, rows: DraftRows) -> Drafts:
        """``K`` steps of the head, each from the state that the one before it left."""
        last = rows.positions - 1  # the token drawn last: not computed yet
        context = PagedContext(self._target, self._layers, self._backend.begin_step(_reads(rows)))
        state, token_ids = self._states[rows.slots], rows.token_ids[rows.slots, last]
        drafted, laws = [], []
        for place in range(rows.most):
            state = self._head(state, token_ids, last + place, context)
            token_ids, law = rows.draw(self._head.full_logits(state), place)
            drafted.append(token_ids)
            laws.append(law)
        num = torch.from_numpy(np.where(self._known[rows.slots_on_host], rows.planned, 0))
        return Drafts(torch.stack(drafted, 1), to_device(num, rows.slots.device), stacked(laws))

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Who takes a slot has drawn nothing here yet, a fork least of all."""
        self._known[[admission.slot for admission in scheduler_output.admitted]] = False

    def observe(self, slots: np.ndarray, on_device: Int64[Tensor, "S"], states: Float[Tensor, "S H"]) -> None:
        """Keep the states."""
        self._known[slots] = True
        self._states[on_device] = states

    def release(self) -> None:
        """The head's weights, and the states."""
        self._head.release()
        self._states.untyped_storage().resize_(0)


def _reads(rows: DraftRows) -> AttentionMetadata:
    """One query a row over all of its tokens but the last; nothing is written."""
    computed = (rows.lengths - 1).tolist()
    table = rows.block_table[rows.slots, : -(-max(computed) // rows.block_size)]
    metadata = AttentionMetadata.of([1] * len(computed), computed, rows.block_size, table, torch.full_like(rows.slots, -1))
    return metadata.with_contexts(rows.positions - 1)


def stacked(laws: list[Float[Tensor, "S V"] | None]) -> Float[Tensor, "S K V"] | None:
    """The laws of all places; None where all are greedy, at every place alike."""
    found = [law for law in laws if law is not None]
    return torch.stack(found, 1) if found else None
