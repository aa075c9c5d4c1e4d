"""Plain: weights in the model's dtype."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.layers.activation import silu_mul
from refimpl.layers.linear import Linear, one_token_by_triton
from refimpl.layers.norm import RMSNorm
from refimpl.quantization.method import Matrix, Rows


class Plain:
    """Every number as the model computes with it: a :class:`Linear`, and tensors between them."""

    name = ""

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> Linear:
        """An empty matrix."""
        return Linear(in_features, out_features, dtype, device)

    def normed(
        self, norm: RMSNorm, x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None
    ) -> tuple[Rows, Float[Tensor, "T H"]]:
        """``norm(x, residual)``."""
        normed: tuple[Tensor, Tensor] = norm(x, residual)
        return normed

    def gated(self, gate_up: Matrix, x: Rows) -> Rows:
        """SwiGLU's product; of one token by the same launch as the matrices before it."""
        assert isinstance(gate_up, Linear)
        assert isinstance(x, Tensor)
        if one_token_by_triton(x):
            from refimpl.kernels.linear import gated_linear

            return gated_linear(x, gate_up.weight)
        return silu_mul(gate_up(x))

    def weight_bytes(self, in_features: int, out_features: int, bytes_per_value: int) -> int:
        """Each weight, in the model's dtype."""
        return in_features * out_features * bytes_per_value

    def bytes_of_any_dtype(self, in_features: int, out_features: int) -> int:
        """None."""
        return 0


PLAIN = Plain()
