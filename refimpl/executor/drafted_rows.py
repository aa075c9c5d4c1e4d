"""DraftedRows: in a step with drafts, the model's law behind each draft is looked at, not only that behind the last token.

::

    rows of the batch that draw (S)      a, 2 drafts      b, none      c, 1 draft
    laws looked at (R)                   a0  a1  a2       b0           c0  c1

Between the two lie ``row`` and ``place`` (of R), and ``spread_to`` (``[S, K + 1]``) the other way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from refimpl.kernels.transfer import array_to_device


@dataclass(frozen=True)
class DraftedRows:
    """The rows of a step that draw, ``S``, with their drafts; ``K`` is the most that one of them has."""

    batch_rows: np.ndarray
    """Their numbers in the batch."""
    planned: np.ndarray
    """Drafts that were planned for each."""
    first: np.ndarray
    """Where the first law of each is among the R."""
    slots_on_host: np.ndarray
    slots: Int64[Tensor, "S"]
    num_planned: Int64[Tensor, "S"]
    row: Int64[Tensor, "R"]
    """Whose law it is."""
    place: Int64[Tensor, "R"]
    """How many drafts are before it."""
    spread_to: Int64[Tensor, "S K1"]
    """Where the law behind j drafts of a row is among the R; beyond its own, its last one."""

    @property
    def most(self) -> int:
        """The most drafts of a row."""
        return self.spread_to.shape[1] - 1

    @classmethod
    def of(cls, batch_rows: np.ndarray, planned: np.ndarray, slots: np.ndarray, device: torch.device) -> DraftedRows:
        """From what the host knows of the rows that draw."""
        laws = planned + 1
        first = laws.cumsum() - laws
        row = np.repeat(np.arange(len(laws)), laws)
        place = np.arange(len(row)) - first[row]
        places = np.minimum(np.arange(planned.max(initial=0) + 1), planned[:, None])
        sent = [slots, planned, row, place, first[:, None] + places]
        on_device = [array_to_device(one, device, torch.int64) for one in sent]
        return cls(batch_rows, planned, first, slots, *on_device)

    def spread(self, rows: np.ndarray, last_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each law: its row of the batch, the number of drafts before it, and its token's place in the flat batch;
        ``last_tokens`` are those places of the rows' last tokens, which are drafts.
        """
        laws = self.planned + 1
        place = np.arange(laws.sum()) - np.repeat(laws.cumsum() - laws, laws)
        return np.repeat(rows, laws), place, np.repeat(last_tokens - self.planned, laws) + place
