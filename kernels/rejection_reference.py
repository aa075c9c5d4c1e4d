"""The check of drafted tokens as the papers write it down: sequence by sequence, draft by draft.

The twin of the kernels in rejection.py, and the second opinion on :mod:`refimpl.speculative.rejection_sampler`.
Sources: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from refimpl.kernels import reference
from refimpl.kernels.philox import Purpose, uniform

NO_TOKEN = -1
"""Behind the last token of a round."""


def verify(
    logits: Float[Tensor, "R V"],
    rows: Int64[Tensor, "S K1"],
    draft_ids: Int64[Tensor, "S K"],
    draft_logits: Float[Tensor, "S K V"],
    num_drafts: Int64[Tensor, "S"],
    temperature: Float[Tensor, "R"],
    seed: Int64[Tensor, "R"],
    path: Int64[Tensor, "R"],
    position: Int64[Tensor, "R"],
    raw: Float[Tensor, "R V"] | None = None,
    top_k: Int64[Tensor, "R"] | None = None,
    top_p: Float[Tensor, "R"] | None = None,
    min_p: Float[Tensor, "R"] | None = None,
) -> tuple[Int64[Tensor, "S K1"], Int64[Tensor, "S"]]:
    """The tokens of each round, ``NO_TOKEN`` behind them, and how many of them are accepted drafts.

    ``rows`` says which of the target's rows judges each draft, and, behind the drafts that count, which draws the token
    after them; the rest is padding, and may be any rows. Parameters of a row hold for both sides, whose logits are adjusted
    already; ``raw`` is what the target's were made of. Where a round ends without a rejection, or
    in a greedy row, the token is that of :func:`reference.sample`, its failures included.
    """
    (S, K1), V, K = rows.shape, logits.shape[1], draft_ids.shape[1]
    filters = None if top_k is None or top_p is None or min_p is None else (top_k, top_p, min_p)
    own, _ = reference.sample(logits, temperature, seed, path, position, Purpose.TARGET, raw, top_k, top_p, min_p)
    accept, redraw = (uniform(seed, path, position, purpose) for purpose in (Purpose.ACCEPT, Purpose.TARGET))
    token_ids, num_accepted = torch.full_like(rows, NO_TOKEN), torch.zeros_like(num_drafts)
    for s in range(S):
        for i in range(K1):
            row, draft = int(rows[s, i]), int(draft_ids[s, i]) if i < min(K, int(num_drafts[s])) else NO_TOKEN
            token_ids[s, i] = own[row]
            if not 0 <= draft < V or own[row] < 0:
                break  # nothing to check
            if temperature[row] < reference.GREEDY_BELOW:
                accepted = bool(own[row] == draft)
            else:
                if not draft_logits[s, i].amax().isfinite():
                    break  # no distribution, no draft
                p, q = (law(one, row, temperature, filters) for one in (logits[row], draft_logits[s, i]))
                accepted = bool(accept[row] * q[draft] < p[draft])
                residual = (p - q).clamp(min=0).cumsum(0)
                if not accepted and residual[-1] > 0:
                    token_ids[s, i] = torch.searchsorted(residual, redraw[row] * residual[-1:], right=True).clamp(max=V - 1)
            if not accepted:
                break
            token_ids[s, i] = draft
            num_accepted[s] += 1
    return token_ids, num_accepted


def law(
    logits: Float[Tensor, "V"],
    row: int,
    temperature: Float[Tensor, "R"],
    filters: tuple[Tensor, Tensor, Tensor] | None,
) -> Float64[Tensor, "V"]:
    """The probabilities that a row's parameters make of logits whose largest is finite."""
    scaled = ((logits - logits.amax()).double() / temperature[row].double()).unsqueeze(0)
    masses = scaled.exp()
    if filters is not None:
        top_k, top_p, min_p = (one[row : row + 1] for one in filters)
        masses = reference.kept_masses(scaled, top_k, top_p.double(), min_p.double())
    return (masses / masses.sum()).squeeze(0)
