"""RMSNorm: scales each token's vector to unit root mean square, then by a learned weight; and the residual add before it."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.kernels.by_triton import by_triton


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self._root_eps = torch.full((1, 1), math.sqrt(eps), dtype=torch.promote_types(dtype, torch.float32), device=device)

    def forward(
        self, x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None = None
    ) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
        """The normalised rows of ``x + residual``, and that sum; without a residual, of x, and x.

        ``residual`` must not be used again: the sum may take its place.
        """
        if by_triton(x):
            return self._by_triton(x, residual)
        summed = x if residual is None else residual.add_(x)
        return self._normed(summed), summed

    def _by_triton(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        from refimpl.kernels.rms_norm import add_rms_norm, rms_norm

        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def _normed(self, x: Float[Tensor, "T H"]) -> Float[Tensor, "T H"]:
        # torch's takes eight passes on a CPU. √(mean(x²) + ε) = hypot(|x| / √H, √ε) takes one over the row.
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        root_mean_square = length.mul_(x.shape[-1] ** -0.5).hypot_(self._root_eps)
        normed: Tensor = (x / root_mean_square).to(x.dtype)
        return normed.mul_(self.weight)
