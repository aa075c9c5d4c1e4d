"""Proposer: who drafts the tokens that a step checks. One protocol for n-grams, draft models, heads, and your own.

Once a step, before the model runs, the proposer is asked for up to ``K`` tokens behind the last one of each row::

    tokens so far of the rows ── propose ──► drafts [S, K], how many are real [S], and the laws q that they were drawn from

Whatever it answers, the check keeps the model's own law (:mod:`refimpl.speculative.rejection_sampler`): a bad proposer costs
time, never a wrong token. Drafts that were drawn from no law, as n-grams are, count as certain (q is one-hot).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor

from refimpl.outputs import SchedulerOutput


@runtime_checkable
class DrawDraft(Protocol):
    """Draws the drafts at one place, by the parameters of their requests."""

    def __call__(self, logits: Float[Tensor, "S V"], place: int) -> tuple[Int64[Tensor, "S"], Float[Tensor, "S V"] | None]:
        """The tokens behind ``place`` drafts of each row, and their laws, for ``Drafts.laws``; None where all are greedy."""


@dataclass(frozen=True)
class DraftRows:
    """The rows of a step for which tokens are drafted."""

    slots_on_host: np.ndarray
    slots: Int64[Tensor, "S"]
    planned: np.ndarray
    """The most drafts of each row; 0 for those that only draw."""
    lengths: np.ndarray
    """Tokens known of each, as the host has them: exact without overlap, else bounds."""
    bounds: np.ndarray
    """The same as bounds in any case: what a recorded graph lowers by itself."""
    positions: Int64[Tensor, "S"]
    """The position of each row's first draft, that is its length, exactly."""
    token_ids: Int64[Tensor, "N L"]
    """The tokens of all slots. Drafts are written behind those that are known, as soon as they are drawn."""
    block_table: Int[Tensor, "N max_blocks"]
    block_size: int
    draw: DrawDraft

    @property
    def most(self) -> int:
        """The most drafts of a row."""
        return int(self.planned.max(initial=0))


@dataclass(frozen=True)
class Drafts:
    """What was drafted."""

    token_ids: Int64[Tensor, "S K"]
    num: Int64[Tensor, "S"]
    """How many of each row's are real; the others may be anything."""
    laws: Float[Tensor, "S K V"] | None = None
    """What :class:`DrawDraft` told of each one's q. None: q is one-hot, or told by ``probs``."""
    probs: Float[Tensor, "S K V"] | None = None
    """q, up to a factor a row, of drafts that were drawn by a proposer itself."""

    def padded(self, K: int) -> Drafts:
        """The same in tables of ``K`` places, wider or narrower; what is beyond ``num`` may be anything."""
        more = K - self.token_ids.shape[1]
        if not more:
            return self
        laws, probs = (None if one is None else F.pad(one, (0, 0, 0, more)) for one in (self.laws, self.probs))
        return Drafts(F.pad(self.token_ids, (0, more)), self.num.clamp(max=K), laws, probs)


class Proposer(ABC):
    """Drafts tokens. Subclass it, and give an object to the engine: ``speculative_config={"method": mine, …}``."""

    name = "proposer"
    max_len: int | None = None
    """The most tokens of a sequence that it can read; None: as many as the model."""
    needs_token_ids = False
    """Whether it reads tokens on the host. Then steps are not planned ahead of the last one's tokens."""

    on_every_rank = False
    """Where several ranks hold the model: whether each of them asks its own proposer, since these compute together. Else
    rank 0 alone is asked, and tells the others."""

    @abstractmethod
    def propose(self, rows: DraftRows) -> Drafts:
        """Up to ``rows.planned`` tokens for each row."""

    def apply(self, scheduler_output: SchedulerOutput) -> None:  # noqa: B027, not every proposer keeps something
        """A step is about to run: sequences take slots, blocks are copied. For who keeps something by slot or block."""

    def observe(  # noqa: B027
        self, slots: np.ndarray, on_device: Int64[Tensor, "S"], states: Float[Tensor, "S H"]
    ) -> None:
        """The sequences in these slots took tokens; ``states`` are the model's, from which the last one was drawn."""

    def release(self) -> None:  # noqa: B027
        """Give memory back."""
