"""Levels by error feedback: what a channel's rounding makes wrong is mended by the channels that are still to be rounded.

Channels are rounded one after the other. After each, those that are left move to where they make up for its error best
(Frantar et al. 2022, "GPTQ", section 4). By how much is told by the inverse of H = E[x xᵀ] over the channels that are left,
whose rows are those of the upper Cholesky factor U of H⁻¹, UᵀU = H⁻¹, but for a factor::

    w_k ← w_k − U_jk / U_jj · (w_j − ŵ_j)        for every k after j

Channels of large activations come first, as long as many are left to make up for them ("act-order").
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from refimpl.quantization.awq_layout import LARGEST

CHANNELS_AT_ONCE = 64
"""Input channels that are mended after each rounding; those behind them by one product."""


def rounded_in_turn(
    weight: Float[Tensor, "O C"], steps: Float[Tensor, "C O"], zeros: Float[Tensor, "C O"], gram: Float[Tensor, "C C"]
) -> UInt8[Tensor, "C O"]:
    """Levels from 0 to 15 of given scales and zero points.

    Args:
        weight: what is to be approached.
        steps: the scale of each weight.
        zeros: its zero point.
        gram: E[x xᵀ] of the inputs, positive definite.

    """
    order = gram.diagonal().argsort(descending=True)
    # Each of these is as large as H: none is kept longer than the next one needs it.
    shares = torch.cholesky_inverse(torch.linalg.cholesky(gram[order][:, order]))
    shares = torch.linalg.cholesky(shares, upper=True)
    shares /= shares.diagonal().clone().unsqueeze(1)
    wanted, steps, zeros = weight.T[order], steps[order], zeros[order]
    levels = torch.empty_like(wanted)
    for start in range(0, len(wanted), CHANNELS_AT_ONCE):
        block = slice(start, start + CHANNELS_AT_ONCE)
        rest = slice(start + CHANNELS_AT_ONCE, None)
        own, errors = wanted[block], torch.empty_like(wanted[block])
        for channel, row in enumerate(shares[block, block]):
            step, zero = steps[start + channel], zeros[start + channel]
            level = (own[channel] / step).round_().clamp_(-zero, LARGEST - zero)
            levels[start + channel] = level + zero
            errors[channel] = own[channel] - level * step
            own[channel + 1 :].addr_(row[channel + 1 :], errors[channel], alpha=-1)
        wanted[rest].addmm_(shares[block, rest].T, errors, alpha=-1)
    found = torch.empty_like(levels, dtype=torch.uint8)
    found[order] = levels.to(torch.uint8)
    return found
