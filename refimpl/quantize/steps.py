"""Scales for levels that are fixed: with them, the outputs depend on the scales of a row's groups linearly.

A row is ``ŵ = Σ_g s_g q_g``, with q_g its levels in group g as distances from the zero point, and 0 elsewhere. So the error
``(ŵ − w)ᵀ H (ŵ − w)`` is least where ``Σ_h (q_gᵀ H q_h) s_h = q_gᵀ H w`` for every group g: least squares with H as its
weights, for the scales of all groups of a row at once.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.quantization.awq_layout import float16_above_0

NUMBERS_AT_ONCE = 2**26
"""In the normal equations of as many rows as are solved together: groups² a row."""
MOST = 2.0
"""By which a scale may change, up or down; one that would change more stays (a group of zeros has any scale)."""


def fitted_scales(
    weight: Float[Tensor, "O C"], signed: Float[Tensor, "C O"], scales: Float[Tensor, "groups O"], gram: Float[Tensor, "C C"]
) -> Float[Tensor, "groups O"]:
    """The scales of the least error, in float16. Rows are fitted apart from each other, so many of them at once.

    Args:
        weight: what is to be approached.
        signed: levels, as distances from the zero point.
        scales: those until now.
        gram: E[x xᵀ] of the inputs, positive definite.

    """
    rows = max(1, NUMBERS_AT_ONCE // len(scales) ** 2)
    parts = zip(weight.split(rows), signed.split(rows, dim=1), scales.split(rows, dim=1), strict=True)
    return torch.cat([_fitted_rows(*part, gram) for part in parts], dim=1)


def _fitted_rows(
    weight: Float[Tensor, "R C"], signed: Float[Tensor, "C R"], scales: Float[Tensor, "groups R"], gram: Float[Tensor, "C C"]
) -> Float[Tensor, "groups R"]:
    count = len(scales)
    size = len(signed) // count
    groups = signed.T.unflatten(1, (count, size))  # [O, groups, size]
    before = scales.T.to(weight.dtype)
    errors = weight - (groups * before.unsqueeze(2)).flatten(1)
    products, missing = weight.new_empty(len(weight), count, count), torch.empty_like(before)
    for g, own in enumerate(groups.unbind(1)):
        row = own @ gram[g * size : (g + 1) * size]
        products[:, g] = (row.view_as(groups) * groups).sum(2)
        missing[:, g] = (row * errors).sum(1)
    ridge = products.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30).mul(1e-4)
    products.diagonal(dim1=1, dim2=2).add_(ridge.unsqueeze(1))
    found = before + torch.linalg.solve(products, missing)
    kept = (found > before / MOST) & (found < before * MOST)
    return float16_above_0(torch.where(kept, found, before).T)
