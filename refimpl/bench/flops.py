"""Counting the floating-point operations of a region: torch's counter, taught two CPU operations that it does not know."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _linear_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """A product with a weight packed by oneDNN: 2 · rows · in · out."""
    rows = 1
    for size in x[:-1]:
        rows *= size
    return int(2 * rows * weight[0] * weight[1])


def _fbgemm_flops(x: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """A product with a weight packed by FBGEMM, which tells no shape: 2 · rows · in · out."""
    return int(2 * math.prod(x) * out_shape[-1])


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores and weighted sum: 2 · 2 · batch · heads · queries · keys · head_dim."""
    batch, heads, queries, head_dim = query
    return int(2 * batch * heads * queries * key[2] * (head_dim + value[3]))


def flop_counter() -> FlopCounterMode:
    """A context manager; ``get_total_flops()`` tells the count after it."""
    known: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        known[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    if hasattr(torch.ops.quantized, "linear_dynamic_fp16"):
        known[torch.ops.quantized.linear_dynamic_fp16] = _fbgemm_flops
    return FlopCounterMode(display=False, custom_mapping=known)
