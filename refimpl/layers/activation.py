"""The feed-forward layer of Llama: SwiGLU with the gate and up projections fused into one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.kernels.by_triton import by_triton
from refimpl.kernels.native import by_native, function
from refimpl.layers.linear import new_bias
from refimpl.quantization.method import Destination, LinearMethod, Rows
from refimpl.ranks import ALONE, Ranks


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) · up(x))`` (Shazeer 2020, "GLU Variants Improve Transformer").

    Where several ranks hold the model, ``intermediate_size`` is this rank's part of it, and the output is summed over them.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
        bias: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.intermediate_size = intermediate_size
        self.method = method
        self.gate_up_proj = method.linear(hidden_size, 2 * intermediate_size, dtype, device)
        self.down_proj = method.linear(intermediate_size, hidden_size, dtype, device)
        self.gate_up_bias = new_bias(2 * intermediate_size, dtype, device) if bias else None
        self.down_bias = new_bias(hidden_size, dtype, device) if bias else None

    def forward(self, x: Rows) -> Float[Tensor, "T H"]:
        """The feed-forward output."""
        if self.gate_up_bias is None or self.down_bias is None:
            return self.ranks.all_reduce(self.down_proj(self.method.gated(self.gate_up_proj, x)))
        gated = silu_mul(self.gate_up_proj(x).add_(self.gate_up_bias))  # between the product and SiLU no kernel adds
        return self.ranks.all_reduce(self.down_proj(gated)).add_(self.down_bias)

    def checkpoint_views(self) -> dict[str, Destination]:
        """Where each tensor of a checkpoint's ``mlp`` goes."""
        sizes = (self.intermediate_size, self.intermediate_size)
        [gate, up], [down] = self.gate_up_proj.parts(*sizes), self.down_proj.parts()
        views: dict[str, Destination] = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
        if self.gate_up_bias is not None and self.down_bias is not None:
            gate_bias, up_bias = self.gate_up_bias.split(sizes)
            views |= {"gate_proj.bias": gate_bias, "up_proj.bias": up_bias, "down_proj.bias": self.down_bias}
        return views


def silu_mul(gate_up: Float[Tensor, "T two_I"]) -> Float[Tensor, "T I"]:
    """The first half of the columns through SiLU, times the second half."""
    if by_triton(gate_up):
        from refimpl.kernels import silu_mul as kernel

        return kernel.silu_mul(gate_up)
    size = gate_up.shape[-1] // 2
    if by_native(gate_up):
        product = gate_up.new_empty(len(gate_up), size)
        threads = torch.get_num_threads()
        function("silu_mul", gate_up.dtype)(len(gate_up), size, threads, gate_up.data_ptr(), product.data_ptr())
        return product
    return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
