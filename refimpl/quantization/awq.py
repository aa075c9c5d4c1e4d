"""Awq: weights of 4 bits, a scale and a zero point for each group of 32 to 128 inputs; activations stay as they are.

A quarter of the bytes of 16-bit weights, for everything that reads them. AWQ (Lin et al. 2023) and GPTQ (Frantar et al.
2022) differ in how the numbers are found, and in how a checkpoint lays them out (:mod:`refimpl.quantization.awq_layout`);
both are brought into one form as they are loaded, the one that the kernels read (:mod:`refimpl.kernels.awq_reference`).

Who multiplies: on a GPU, :mod:`refimpl.kernels.awq_gemm` for few tokens; for more the weights are written out in 16 bits and
a library multiplies. On a CPU they are widened once, when all is loaded, and multiplied as any weights are, where memory
allows; else they are widened for each product, slowly.

Weights that come in 16 bits, not quantised, are rounded to the nearest of the 16 numbers as they are loaded: without samples
of activations, so with more loss than AWQ's own search has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.errors import CheckpointError
from refimpl.kernels import awq_reference
from refimpl.kernels.by_triton import by_triton
from refimpl.layers.activation import silu_mul
from refimpl.layers.linear import Linear
from refimpl.layers.norm import RMSNorm
from refimpl.quantization.awq_layout import GROUP_SIZES, SYMMETRIC_ZERO
from refimpl.quantization.awq_part import AwqPart
from refimpl.quantization.method import Destination, Matrix, Rows
from refimpl.quantization.plain import PLAIN

ROWS_AT_ONCE = 4096
"""Output channels that are widened together where a CPU widens them for each product; whole tiles."""


class AwqLinear(nn.Module):
    """A matrix ``[out_features, in_features]`` in 4 bits."""

    arrivals: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, group_size: int, dtype: torch.dtype, device: torch.device, widens: bool
    ) -> None:
        super().__init__()
        self.in_features, self.group_size, self.dtype, self.widens = in_features, group_size, dtype, widens
        groups = awq_reference.padded_groups(in_features, group_size)
        shape = awq_reference.words_shape(out_features, in_features, group_size)
        words = torch.zeros(shape, dtype=torch.int32, device=device)
        scales = awq_reference.pack_scales(torch.zeros(groups, out_features, dtype=torch.float16, device=device))
        zeros = awq_reference.pack_zeros(
            torch.full((groups, out_features), SYMMETRIC_ZERO, dtype=torch.uint8, device=device)
        )
        self.words, self.scales, self.zeros = (nn.Parameter(one, requires_grad=False) for one in (words, scales, zeros))
        self.register_buffer("arrivals", _arrivals(words, out_features), persistent=False)
        """Zeros by which the programs of a kernel find out who is the last."""
        self.wide: Linear | None = None
        """The matrix in ``dtype``, once it is widened."""

    @property
    def out_features(self) -> int:
        """Outputs."""
        return self.scales.shape[1]

    def parts(self, *sizes: int) -> Sequence[Destination]:
        """The matrix in pieces of so many outputs each; without sizes, in one."""
        found, first = [], 0
        for size in sizes or (self.out_features,):
            found.append(AwqPart(self.words, self.scales, self.zeros, first, size, self.in_features, self.group_size))
            first += size
        return found

    def pack(self, keep_plain: bool = False, twice: bool = False) -> None:
        """Once it is filled: widen it, if it is to be (``widens``), into the layout that this CPU multiplies fastest by."""
        if not self.widens:
            return
        wide = Linear(self.in_features, self.out_features, self.dtype, self.words.device)
        for part, rows in zip(wide.weight.split(ROWS_AT_ONCE), range(0, self.out_features, ROWS_AT_ONCE), strict=True):
            part.copy_(self._widened(rows, self.dtype))
        wide.pack(keep_plain, twice)
        self.wide = wide
        for held in (self.words, self.scales, self.zeros):
            held.data = held.data.new_empty(0)

    def forward(self, x: Rows) -> Float[Tensor, "T out_features"]:
        """``x Wᵀ``."""
        assert isinstance(x, Tensor)
        if self.wide is not None:
            product: Tensor = self.wide(x)
            return product
        if by_triton(x):
            return self._by_kernels(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        products = [wide @ self._widened(first, wide.dtype).T for first in range(0, max(1, self.out_features), ROWS_AT_ONCE)]
        return torch.cat(products, dim=1).to(self.dtype)

    def _by_kernels(self, x: Tensor) -> Tensor:
        from refimpl.kernels.awq_dequantise import awq_dequantise
        from refimpl.kernels.awq_gemm import awq_linear, serves

        weight = (self.words, self.scales, self.zeros, self.group_size)
        if x.element_size() == 2 and serves(len(x), x.device):
            return awq_linear(x, *weight, x.new_empty(len(x), self.out_features), self._arrivals_for(x))

        scratch = x.new_empty(self.out_features, self.in_features)
        return F.linear(x, awq_dequantise(*weight, self.in_features, scratch))

    def _arrivals_for(self, x: Tensor) -> Tensor | None:
        from refimpl.kernels.awq_gemm import WITH_ARRIVALS

        return self.arrivals if len(x) <= WITH_ARRIVALS else None

    def _widened(self, first: int, dtype: torch.dtype) -> Tensor:
        """Some outputs' weights, from one on, in a dtype."""
        rows = slice(first, first + ROWS_AT_ONCE)
        scales = self.scales[:, rows].to(torch.promote_types(dtype, torch.float32))
        tiles = slice(first // awq_reference.ROWS_IN_A_TILE, rows.stop // awq_reference.ROWS_IN_A_TILE)
        return awq_reference.dequantise(
            self.words[tiles], scales, self.zeros[:, rows], self.group_size, self.in_features
        ).to(dtype)


def _arrivals(words: Tensor, out_features: int) -> Tensor | None:
    if not by_triton(words):
        return None
    from refimpl.kernels.awq_gemm import num_arrivals

    return words.new_zeros(num_arrivals(out_features), dtype=torch.int32)


def kernel_group(in_features: int, group_size: int) -> int:
    """Inputs of a group as it is held: the checkpoint's, or where that is one of all inputs, the largest that divides them.

    Raises:
        CheckpointError: the kernels have none.

    """
    wanted = group_size if group_size != -1 else in_features
    for size in GROUP_SIZES:
        if wanted % size == 0 and in_features % size == 0:
            return size
    raise CheckpointError(
        f"a matrix has {in_features} inputs in groups of {wanted}; groups must be a multiple of {GROUP_SIZES[-1]} inputs "
        "that divides them: use fp8, or weights in 16 bits"
    )


class Awq:
    """A matrix in 4 bits takes plain tensors, and gives such.

    Args:
        group_size: of the checkpoint; -1 where all inputs share a scale, and for weights that come in 16 bits or by chance:
            the largest that divides the inputs.
        name: awq or gptq, as the checkpoint's.
        widens: on a CPU: hold the weights in the model's dtype once they are loaded.

    """

    def __init__(self, group_size: int = -1, name: str = "awq", widens: bool = False) -> None:
        self.group_size, self.name, self.widens = group_size, name, widens

    def _group(self, in_features: int) -> int:
        return kernel_group(in_features, self.group_size)

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> AwqLinear:
        """An empty matrix."""
        return AwqLinear(in_features, out_features, self._group(in_features), dtype, device, self.widens)

    def normed(
        self, norm: RMSNorm, x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None
    ) -> tuple[Rows, Float[Tensor, "T H"]]:
        """``norm(x, residual)``."""
        return PLAIN.normed(norm, x, residual)

    def gated(self, gate_up: Matrix, x: Rows) -> Rows:
        """SwiGLU's product."""
        assert isinstance(x, Tensor)
        if isinstance(gate_up, Linear):  # a layer that the checkpoint leaves in 16 bits
            return PLAIN.gated(gate_up, x)
        return silu_mul(gate_up(x))

    def weight_bytes(self, in_features: int, out_features: int, bytes_per_value: int) -> int:
        """Half a byte a weight, and a scale and a zero point a group; where it is widened, what plain weights take."""
        if self.widens:
            return PLAIN.weight_bytes(in_features, out_features, bytes_per_value)
        return self.bytes_of_any_dtype(in_features, out_features)

    def bytes_of_any_dtype(self, in_features: int, out_features: int) -> int:
        """All of it, or nothing."""
        if self.widens:
            return 0
        return awq_reference.weight_bytes(out_features, in_features, self._group(in_features))
