"""Embedding and logits where each rank holds some rows of the vocabulary (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.model_shares import held_tokens, rows_of_vocabulary
from refimpl.ranks import Ranks


class Vocabulary:
    """Which rows this rank holds of ``vocab_size``, and how ranks make one of them all."""

    def __init__(self, vocab_size: int, ranks: Ranks) -> None:
        self._ranks = ranks
        self._vocab_size = vocab_size
        self.rows = rows_of_vocabulary(vocab_size, ranks.size)
        """Of each rank's matrices; the last ranks' may belong to no token."""
        self.held = held_tokens(vocab_size, ranks.rank, ranks.size)
        """The tokens whose rows are here, the first ones of the matrix."""

    def embed(self, weight: Float[Tensor, "rows H"], ids: Int[Tensor, "T"], dtype: torch.dtype) -> Float[Tensor, "T H"]:
        """The rows of tokens, in ``dtype``: each rank looks up its own, and the sum with the others' zeros is whole."""
        if self._ranks.size == 1:
            return F.embedding(ids, weight).to(dtype)
        row = ids - self._ranks.rank * self.rows
        elsewhere = (row < 0) | (row >= self.rows)
        found = F.embedding(row.masked_fill(elsewhere, 0), weight).to(dtype)
        return self._ranks.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0))

    def whole(self, logits: Float[Tensor, "R rows"]) -> Float[Tensor, "R V"]:
        """The logits of all tokens, from every rank's; those of rows that belong to no token are left out."""
        if self._ranks.size == 1:
            return logits
        parts = self._ranks.all_gather(logits)
        spans = (held_tokens(self._vocab_size, rank, self._ranks.size) for rank in range(self._ranks.size))
        return torch.cat([part[:, : len(span)] for part, span in zip(parts, spans, strict=True)], dim=1)
