"""From logits to drafts and verdicts: by Triton kernels where there are, else by probabilities in plain torch.

The two take different things for the law of a draft, and neither waits for the device: kernels take the adjusted logits,
which they have a law's masses and cuts of in two launches or five; torch takes the probabilities that were drawn from.
"""

from __future__ import annotations

import math

from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.kernels.by_triton import by_triton
from refimpl.kernels.philox import Purpose, uniform
from refimpl.kernels.reference import at_least_float32
from refimpl.sampling.adjustments import adjust
from refimpl.sampling.probabilities import probabilities
from refimpl.sampling.sampler import SamplingRows, draw
from refimpl.speculative.rejection_sampler import Verdict, round_uniforms, verify


def draw_drafts(
    logits: Float[Tensor, "S V"], rows: SamplingRows, purpose: Purpose = Purpose.DRAFT
) -> tuple[Int64[Tensor, "S"], Float[Tensor, "S V"]]:
    """A token drawn from each row of a draft's logits, and what :func:`check_drafts` must be told of its law.

    A row of no distribution draws a token that the check takes for none.
    """
    if by_triton(logits):
        from refimpl.kernels.sampling import sample

        adjusted = logits if rows.adjustments is None else adjust(at_least_float32(logits), rows.adjustments)[0]
        numbers = (rows.temperature, rows.seed, rows.path, rows.position)
        return sample(adjusted, *numbers, purpose, **_filters(rows))[0].clamp_(min=0), adjusted
    law, _ = probabilities(logits, rows)
    return draw(law, uniform(rows.seed, rows.path, rows.position, purpose)), law


def check_drafts(
    logits: Float[Tensor, "R V"],
    rows: SamplingRows,
    places: Int64[Tensor, "S K1"],
    draft_ids: Int64[Tensor, "S K"],
    draft_laws: Float[Tensor, "S K V"],
    num_drafts: Int64[Tensor, "S"],
) -> tuple[Verdict, dict[int, str]]:
    """The verdict of :func:`refimpl.speculative.rejection_sampler.verify`, and the failures of logits hooks by row.

    Args:
        logits: of the target, as the model made them.
        rows: the sampling parameters of each, its position among them.
        places: which row judges each draft, and which stands behind the last; beyond a sequence's own they may be any.
        draft_ids: what was drafted.
        draft_laws: what each was drawn from, as :func:`draw_drafts` told it.
        num_drafts: how many count of each sequence's.

    A row whose hook failed ends a round with ``NOTHING_LEFT``.

    """
    if by_triton(logits):
        return _check_by_kernels(logits, rows, places, draft_ids, draft_laws, num_drafts)
    p, failures = probabilities(logits, rows)
    if failures:
        p[list(failures)] = 0
    first = places[:, 0]
    uniforms = round_uniforms(rows.seed[first], rows.path[first], rows.position[first], draft_ids.shape[1])
    return verify(p[places], draft_ids, draft_laws, num_drafts, uniforms.accept, uniforms.draw), failures


def _check_by_kernels(
    logits: Float[Tensor, "R V"],
    rows: SamplingRows,
    places: Int64[Tensor, "S K1"],
    draft_ids: Int64[Tensor, "S K"],
    draft_laws: Float[Tensor, "S K V"],
    num_drafts: Int64[Tensor, "S"],
) -> tuple[Verdict, dict[int, str]]:
    from refimpl.kernels.rejection import verify as verify_by_kernels

    failures: dict[int, str] = {}
    raw = None
    if rows.adjustments is not None:
        raw = at_least_float32(logits)
        logits, failures = adjust(raw, rows.adjustments)
        if failures:
            logits[list(failures)] = -math.inf
    numbers = (rows.temperature, rows.seed, rows.path, rows.position)
    drafts = (draft_ids, draft_laws, num_drafts)
    return Verdict(*verify_by_kernels(logits, places, *drafts, *numbers, raw=raw, **_filters(rows))), failures


def _filters(rows: SamplingRows) -> dict[str, Tensor]:
    """All filters, if any is on."""
    return {"top_k": rows.top_k, "top_p": rows.top_p, "min_p": rows.min_p} if rows.ranked or rows.min_p_on else {}
