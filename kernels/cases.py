"""What input builders share: random tensors that are the same on every device, odd strides, and poisoned memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    """A generator of the host, so that numbers do not depend on the device."""
    return torch.Generator().manual_seed(seed)


def normal(
    *shape: int, dtype: torch.dtype, device: torch.device, random: torch.Generator, scale: float = 1.0, gap: int = 0
) -> Tensor:
    """Random numbers; the elements between rows (``gap`` more to each row of the last axis) hold NaN."""
    values = (torch.randn(*shape, generator=random) * scale).to(dtype)
    return spaced(values.to(device), gap)


def spaced(values: Tensor, gap: int) -> Tensor:
    """The same values, with ``gap`` elements of NaN behind each row of the last axis."""
    if not gap:
        return values
    wide = torch.full((*values.shape[:-1], values.shape[-1] + gap), math.nan, dtype=values.dtype, device=values.device)
    wide[..., : values.shape[-1]] = values
    return wide[..., : values.shape[-1]]


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory to be written: NaN, or -1 in integers, so that what is read or left unwritten is seen."""
    return torch.full(shape, math.nan if dtype.is_floating_point else -1, dtype=dtype, device=device)


def poisoned_pool(
    blocks: int, B: int, Hkv: int, D: int, dtype: torch.dtype, device: torch.device, block_gap: int = 0
) -> Tensor:
    """``[blocks, B, Hkv, D]`` of NaN, with ``block_gap`` elements of untouched memory between blocks.

    A gap of 2³⁰ elements puts block 3 beyond what 32 bits can say. On a CPU memory that is never touched costs nothing;
    on a GPU it is taken.
    """
    stride = B * Hkv * D + block_gap
    memory = torch.empty((blocks - 1) * stride + B * Hkv * D, dtype=dtype, device=device)
    return memory.as_strided((blocks, B, Hkv, D), (stride, Hkv * D, D, 1)).fill_(math.nan)
