"""RMSNorm: scales each token's vector to unit root mean square, then by a learned weight; and the residual add before it.

:class:`HeadNorms` does the same to each head of the queries and the keys.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.kernels.by_triton import by_triton
from refimpl.kernels.native import by_native, function


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
        wide = residual is not None and residual.dtype == self.weight.dtype == torch.float32
        if residual is not None and wide and by_native(x, residual, self.weight):
            normed = torch.empty_like(residual)
            function("add_rms_norm", x.dtype)(
                *residual.shape, torch.get_num_threads(),
                x.data_ptr(), residual.data_ptr(), self.weight.data_ptr(), self.eps, normed.data_ptr(),
            )  # fmt: skip
            return normed, residual
        summed = x if residual is None else residual.add_(x)
        return self.plainly(summed), summed

    def _by_triton(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        from refimpl.kernels.rms_norm import add_rms_norm, rms_norm

        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def plainly(self, x: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """The normalised rows, by torch's operations."""
        # torch's takes eight passes on a CPU. √(mean(x²) + ε) = hypot(|x| / √H, √ε) takes one over the row.
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        root_mean_square = length.mul_(x.shape[-1] ** -0.5).hypot_(self._root_eps)
        normed: Tensor = (x / root_mean_square).to(x.dtype)
        return normed.mul_(self.weight)


class HeadNorms(nn.Module):
    """RMSNorm of every head of the queries and of the keys for itself (Henry et al. 2020, "Query-Key Normalization").

    However large queries and keys grow in training, their products stay in bounds. One weight ``[D]`` serves all heads of
    the queries and another all heads of the keys, so ranks that share the heads have both whole.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = RMSNorm(head_dim, eps, dtype, device)
        self.key = RMSNorm(head_dim, eps, dtype, device)

    def forward(self, heads: Float[Tensor, "T heads D"]) -> None:
        """Norm the heads in place: ``num_heads`` of queries, then those of keys. On a GPU by one launch for both."""
        if by_triton(heads):
            from refimpl.kernels.head_norm import norm_heads

            norm_heads(heads, self.query.weight, self.key.weight, self.query.eps, self.num_heads)
            return
        for part, norm in ((heads[:, : self.num_heads], self.query), (heads[:, self.num_heads :], self.key)):
            part.copy_(norm.plainly(part))
