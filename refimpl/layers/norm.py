"""RMSNorm: scales each token's vector to unit root mean square, then by a learned weight."""

from __future__ import annotations

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

    def forward(self, x: Float[Tensor, "T H"]) -> Float[Tensor, "T H"]:
        """The normalised rows."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
