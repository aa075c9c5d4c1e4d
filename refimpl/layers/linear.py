"""Linear: ``y = x Wᵀ``. On a CPU the weight is laid out once as its products read it fastest (see :mod:`cpu_products`).

On a GPU products of a few tokens in 16 bits are a kernel's where that is the faster (:mod:`refimpl.kernels.linear`), all
others are cuBLAS's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.kernels.by_triton import by_triton
from refimpl.layers.cpu_products import Product, fastest_product

MOST_BYTES_TWICE = 2**30
"""Weights that may be kept in two layouts: those of a small model, for which memory is no matter."""


class Linear(nn.Module):
    """A matrix ``[out_features, in_features]`` without bias."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False)
        self._product: Product | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What it multiplies in: x is brought to it, and the product has it."""
        return self.weight.dtype if self._product is None else self._product.dtype

    def parts(self, *sizes: int) -> Sequence[Tensor]:
        """The weight in pieces of so many outputs each, to be filled; without sizes, in one."""
        return torch.split(self.weight, list(sizes) or [len(self.weight)])

    def pack(self, keep_plain: bool = False, twice: bool = False) -> None:
        """Move the weight into the layouts that are fastest on this CPU, where there are any; else leave it as it is.

        ``keep_plain`` keeps the usual tensor beside them, for a weight that is tied to an embedding; ``twice`` allows a
        layout for several tokens and another one for few.
        """
        self._product = fastest_product(self.weight.data, twice)
        if self._product is not None and not keep_plain:
            self.weight.data = self.weight.data.new_empty(0)

    def release(self) -> None:
        """Drop the packed weight."""
        self._product = None

    def forward(self, x: Float[Tensor, "T in_features"]) -> Float[Tensor, "T out_features"]:
        """``x Wᵀ``, in :attr:`dtype`."""
        if self._product is not None:
            return self._product(x)
        if by_triton(x):
            from refimpl.kernels import linear as kernel

            if kernel.serves(x, self.weight):
                return kernel.linear(x, self.weight)
        return F.linear(x.to(self.weight.dtype), self.weight)


def new_bias(size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An empty bias. Who has one adds it in place to what a matrix gives, however that is held.

    On a GPU this is a launch beside the product's, some 2 µs a layer by arithmetic. In 16 bits the product is rounded before
    the sum too, where a product that adds the bias itself rounds once.
    """
    return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)


def one_token_by_triton(x: Float[Tensor, "T in_features"]) -> bool:
    """Whether SwiGLU's two products are a kernel's, with what follows them: of one token, in 16 bits."""
    return len(x) == 1 and x.element_size() == 2 and by_triton(x)
