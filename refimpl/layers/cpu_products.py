"""Products ``x Wᵀ`` on a CPU, each with the weight laid out once as it reads it fastest.

A decode step reads every weight once for a handful of tokens, so it is bound by memory bandwidth: by how many bytes a weight
has, and by how far a product reaches the bandwidth.

- Weights of 16 bits, where the CPU has no products of bfloat16 (which come with AVX-512): FBGEMM's, which reads the weights
  in float16 and multiplies in float32. float16 holds every bfloat16 number from 2⁻¹⁴ to 65,504 in magnitude as it is; a
  smaller one is rounded by less than 2⁻²⁵. A larger one leaves its matrix as it is.
- Other weights: oneDNN's own packed layout, read in the order in which the product wants it: up to twice as fast as a plain
  one for several tokens. A single token of float32 it multiplies at less than the bandwidth; a small model's weights are
  kept twice then, for that one ``Wᵀ`` where the output is the longer side (the product adds up whole rows of it), else ``W``
  as it is (a sum over a whole row for each output).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

PACK_FOR_TOKENS = 8
"""The number of rows that oneDNN's layout is chosen for; it serves any number."""


@runtime_checkable
class Product(Protocol):
    """``x Wᵀ`` with a weight of its own."""

    dtype: torch.dtype
    """What it multiplies in: x is brought to it, and the product has it."""

    def __call__(self, x: Float[Tensor, "T in_features"]) -> Float[Tensor, "T out_features"]:
        """The product."""


class ByFbgemm:
    """The weight in float16, products and sums in float32 (Khudia et al. 2021, "FBGEMM")."""

    dtype = torch.float32

    def __init__(self, weight: Float[Tensor, "out_features in_features"]) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Float[Tensor, "T in_features"]) -> Float[Tensor, "T out_features"]:
        """The product."""
        product: Tensor = self._multiply(x.float(), self._packed)
        return product

    @staticmethod
    def serves(weight: Float[Tensor, "out_features in_features"]) -> bool:
        """Whether there is such a product, and float16 holds the weights."""
        if weight.dtype not in (torch.bfloat16, torch.float16) or not runs(ByFbgemm, torch.float32):
            return False
        return weight.dtype == torch.float16 or float(weight.abs().max()) <= torch.finfo(torch.float16).max


class ByOneDNN:
    """The weight in oneDNN's packed layout and its own dtype."""

    def __init__(self, weight: Float[Tensor, "out_features in_features"]) -> None:
        self.dtype = weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_TOKENS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Float[Tensor, "T in_features"]) -> Float[Tensor, "T out_features"]:
        """The product."""
        product: Tensor = self._multiply(x.to(self.dtype), self._packed, None, "none", [], "")
        return product

    @staticmethod
    def serves(weight: Float[Tensor, "out_features in_features"]) -> bool:
        """Whether oneDNN packs this dtype on this CPU."""
        return weight.dtype in (torch.float32, torch.bfloat16) and runs(ByOneDNN, weight.dtype)


class OneTokenApart:
    """One token by a plain layout beside the packed one."""

    def __init__(self, weight: Float[Tensor, "out_features in_features"]) -> None:
        out_features, in_features = weight.shape
        self.dtype = weight.dtype
        self._transposed = weight.t().contiguous() if out_features >= in_features else weight.t()
        self._several = ByOneDNN(weight)

    def __call__(self, x: Float[Tensor, "T in_features"]) -> Float[Tensor, "T out_features"]:
        """The product."""
        return x.to(self.dtype) @ self._transposed if len(x) == 1 else self._several(x)


def fastest_product(weight: Float[Tensor, "out_features in_features"], twice: bool) -> Product | None:
    """The layout that this CPU multiplies fastest by; None where that is the plain one.

    ``twice`` allows a layout for several tokens and another one for a single one.
    """
    if weight.device.type != "cpu":
        return None
    if ByOneDNN.serves(weight):
        if not twice or weight.dtype != torch.float32:
            return ByOneDNN(weight)
        return OneTokenApart(weight)
    return ByFbgemm(weight) if ByFbgemm.serves(weight) else None


def runs(product: type[ByFbgemm] | type[ByOneDNN], dtype: torch.dtype) -> bool:
    """Whether a way to multiply exists in this build of torch, on this CPU, for this dtype: found by trying a tiny one."""
    try:
        product(torch.zeros(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (RuntimeError, AttributeError):
        return False
    return True
