"""RMSNorm: scales each token's vector to unit root mean square, then by a learned weight."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self._root_eps = torch.full((1, 1), math.sqrt(eps), dtype=torch.promote_types(dtype, torch.float32))

    def forward(self, x: Float[Tensor, "T H"]) -> Float[Tensor, "T H"]:
        """The normalised rows."""
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # torch's takes eight passes on a CPU. √(mean(x²) + ε) = hypot(|x| / √H, √ε) takes one over the row.
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        root_mean_square = length.mul_(x.shape[-1] ** -0.5).hypot_(self._root_eps)
        normed: Tensor = (x / root_mean_square).to(x.dtype) * self.weight
        return normed
