"""Checks of drafted tokens that are wrong, each in one way that was seen in the field or is easily fallen into.

A check is made of pieces here, so that each mistake stands alone beside what would be right. They are for the tests that
must find them out, and for notebook 06.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from refimpl.exercises.rounds import DraftFunction, VerifyFunction, drawn_draft
from refimpl.outputs import NO_TOKEN
from refimpl.sampling.sampler import draw


@dataclass(frozen=True)
class Pieces:
    """A right check; give other pieces for a wrong one."""

    accepts: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda p, q, u: u < p / q
    """By p(x), q(x) and a uniform number, each ``[S, K]``."""
    redraws_from: Callable[[Tensor, Tensor], Tensor] = lambda p, q: (p - q).clamp(min=0)
    """Weights after a rejection, by p and q where it happened, each ``[S, V]``."""
    redraw: Callable[[Tensor, Tensor], Tensor] = draw
    """From such weights and a uniform number to a token."""
    bonus_from: Callable[[Tensor, Tensor], Tensor] = lambda p, q: p
    """Weights of the last token after K accepted drafts, by p there, and q of the last draft."""
    has_bonus: bool = True
    has_guard: bool = True
    """Whether a token is drawn from p where rounding leaves nothing of p − q."""
    redraw_number: Callable[[Tensor, Tensor], Tensor] = lambda accept, own: own
    """The uniform number of a redraw, by the one that rejected, and the one that is for it."""

    def verify(
        self,
        target_probs: Float[Tensor, "S K1 V"],
        draft_ids: Int64[Tensor, "S K"],
        draft_probs: Float[Tensor, "S K V"],
        accept_uniforms: Float64[Tensor, "S K"],
        draw_uniforms: Float64[Tensor, "S K1"],
    ) -> Int64[Tensor, "S K1"]:
        """The tokens of a round, -1 behind them."""
        K = draft_ids.shape[1]
        p, q = (law[:, :K].gather(-1, draft_ids.unsqueeze(-1)).squeeze(-1) for law in (target_probs, draft_probs))
        end = self.accepts(p, q, accept_uniforms).long().cumprod(-1).sum(-1)
        texts, full, place = torch.arange(len(end)), end == K, end.clamp(max=K - 1)
        p_end, q_end = target_probs[texts, end], draft_probs[texts, place]
        u = draw_uniforms[texts, end]
        weights = self.redraws_from(p_end, q_end)
        if self.has_guard:
            weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, p_end)
        redrawn = self.redraw(weights, self.redraw_number(accept_uniforms[texts, place], u))
        bonus = draw(self.bonus_from(p_end, q_end), u) if self.has_bonus else torch.full_like(end, NO_TOKEN)
        token_ids = torch.cat((draft_ids, draft_ids[:, :1]), 1).masked_fill(torch.arange(K + 1) > end[:, None], NO_TOKEN)
        return token_ids.scatter(-1, end[:, None], torch.where(full, bonus, redrawn)[:, None])


RIGHT = Pieces()


def _argmax(weights: Float[Tensor, "S V"], u: Float64[Tensor, "S"]) -> Int64[Tensor, "S"]:
    return weights.argmax(-1)


def _one_row_late(p: Tensor, ids: Tensor, q: Tensor | None, accept: Tensor, drawn: Tensor) -> Tensor:
    """Logits of the position before: row i of the target's output is the law of token i + 1."""
    return RIGHT.verify(p.roll(1, dims=1), ids, _given(q), accept, drawn)


def _drawn_first(p: Tensor, ids: Tensor, q: Tensor | None, accept: Tensor, drawn: Tensor) -> Tensor:
    """The drawn token is written down before the accepted ones."""
    token_ids = RIGHT.verify(p, ids, _given(q), accept, drawn)
    last = (token_ids != NO_TOKEN).sum(-1, keepdim=True) - 1
    index = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    return token_ids.gather(-1, torch.where(index > last, index, (index - 1) % (last + 1)))


def _in_place(p: Tensor, ids: Tensor, q: Tensor | None, accept: Tensor, drawn: Tensor) -> Tensor:
    """The residual is made in p's own memory, and then p is compared with q."""
    p[:, :-1].sub_(_given(q)).clamp_(min=0)
    p.div_(p.sum(-1, keepdim=True).clamp(min=1e-12))
    return RIGHT.verify(p, ids, _given(q), accept, drawn)


def _given(q: Tensor | None) -> Tensor:
    assert q is not None  # mistakes are looked for with drafts that have a q
    return q


def _argmax_draft(q: Float[Tensor, "S V"], u: Float64[Tensor, "S"]) -> tuple[Tensor, Tensor]:
    return q.argmax(-1), q


def _other_temperature(q: Float[Tensor, "S V"], u: Float64[Tensor, "S"]) -> tuple[Tensor, Tensor]:
    """Drawn at the draft's temperature, told at half of it."""
    return draw(q, u), q.square() / q.square().sum(-1, keepdim=True)


def _with(**pieces: object) -> tuple[VerifyFunction, DraftFunction]:
    verify: VerifyFunction = replace(RIGHT, **pieces).verify  # type: ignore[arg-type, assignment]
    return verify, drawn_draft


WRONG: dict[str, tuple[VerifyFunction, DraftFunction]] = {
    "accept all": _with(accepts=lambda p, q, u: u < 1),
    "accept iff p ≥ q": _with(accepts=lambda p, q, u: p >= q),
    "ratio inverted": _with(accepts=lambda p, q, u: u < q / p),
    "redraw from p": _with(redraws_from=lambda p, q: p),
    "argmax of the residual": _with(redraw=_argmax),
    "|p − q| as residual": _with(redraws_from=lambda p, q: (p - q).abs()),
    "residual not normalised": _with(redraw=lambda weights, u: draw(weights, u / weights.sum(-1).clamp(min=1e-12))),
    "redrawn by the number that rejected": _with(redraw_number=lambda accept, own: accept),
    "bonus from q": _with(bonus_from=lambda p, q: q),
    "no bonus": _with(has_bonus=False),
    "argmax draft with softmax q": (_with()[0], _argmax_draft),
    "different temperatures": (_with()[0], _other_temperature),
    "off-by-one logits": (_one_row_late, drawn_draft),
    "redrawn token first": (_drawn_first, drawn_draft),
    "in-place normalisation": (_in_place, drawn_draft),
}
"""A check and a draft by name; all but one piece of each is right."""
