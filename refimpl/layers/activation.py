"""The feed-forward layer of Llama: SwiGLU with the gate and up projections fused into one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.layers.linear import Linear


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) · up(x))`` (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, dtype, device)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, device)

    def forward(self, x: Float[Tensor, "T H"]) -> Float[Tensor, "T H"]:
        """The feed-forward output."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        down: Tensor = self.down_proj(F.silu(gate).mul_(up))
        return down
