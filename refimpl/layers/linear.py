"""Linear: ``y = x Wᵀ``. On a CPU the weight is laid out once as its products read it fastest.

A decode step reads every weight once for a handful of tokens, so it is bound by memory bandwidth, and by how far a product
reaches it:

- Several tokens: oneDNN's own packed layout, read in the order in which the product wants it: up to twice as fast.
  Without AVX-512 there is none for bfloat16; the weights of a small model are packed in float32 then, and the product is
  rounded to bfloat16, as that of bfloat16 would be.
- One token, without AVX-512, where oneDNN reaches half the bandwidth: in float32 ``Wᵀ`` where the output is the longer side
  (the product adds up whole rows of it), else ``W`` as it is (a sum over a whole row for each output).

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

PACK_FOR_TOKENS = 8
"""The number of rows that the packed layout is chosen for; it serves any number."""
MOST_BYTES_TWICE = 2**30
"""Weights that may be kept in two layouts: those of a small model, for which memory is no matter."""


class Linear(nn.Module):
    """A matrix ``[out_features, in_features]`` without bias."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False)
        self._packed: Tensor | None = None
        self._for_one_token: Tensor | None = None

    def parts(self, *sizes: int) -> Sequence[Tensor]:
        """The weight in pieces of so many outputs each, to be filled; without sizes, in one."""
        return torch.split(self.weight, list(sizes) or [len(self.weight)])

    def pack(self, keep_plain: bool = False, twice: bool = False) -> None:
        """Move the weight into the layouts that are fastest on this CPU, where there are any; else leave it as it is.

        ``keep_plain`` keeps the usual tensor beside them, for a weight that is tied to an embedding; ``twice`` allows a
        layout for several tokens and another one for a single token.
        """
        plain = self.weight.data
        if can_pack(plain):
            if twice and _without_avx512():
                out_features, in_features = plain.shape
                self._for_one_token = plain.t().contiguous() if out_features >= in_features else plain.t()
        elif twice and plain.dtype == torch.bfloat16 and can_pack(plain.new_empty(0, dtype=torch.float32)):
            self._for_one_token = plain.t()
            plain = plain.float()
        else:
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain, PACK_FOR_TOKENS)
        if not keep_plain:
            self.weight.data = self.weight.data.new_empty(0)

    def release(self) -> None:
        """Drop the packed weights."""
        self._packed = self._for_one_token = None

    def forward(self, x: Float[Tensor, "T in_features"]) -> Float[Tensor, "T out_features"]:
        """``x Wᵀ``."""
        if by_triton(x):
            from refimpl.kernels import linear as kernel

            if kernel.serves(x, self.weight):
                return kernel.linear(x, self.weight)
        if self._packed is None:
            return F.linear(x, self.weight)
        if self._for_one_token is not None and len(x) == 1:
            return x @ self._for_one_token
        wide = x.to(self._packed.dtype)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(wide, self._packed, None, "none", [], "")
        return product.to(x.dtype)


def one_token_by_triton(x: Float[Tensor, "T in_features"]) -> bool:
    """Whether SwiGLU's two products are a kernel's, with what follows them: of one token, in 16 bits."""
    return len(x) == 1 and x.element_size() == 2 and by_triton(x)


def _without_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by a packed weight of this dtype on this CPU: found by trying on a tiny one."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        probe = torch.ops.mkldnn._reorder_linear_weight(weight.new_zeros(16, 16), PACK_FOR_TOKENS)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, 16), probe, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True
