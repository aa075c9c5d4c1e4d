"""What the launchers share: the device to launch on, its capability, tile sizes, and checks of what they are given."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from refimpl.errors import RefimplError

TRITON_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.float8_e4m3fn: "fp8e4nv",
}
"""How Triton's signatures name a dtype."""


def pointer(dtype: torch.dtype) -> str:
    """The type of a pointer to such elements, as a signature names it."""
    return f"*{TRITON_NAMES[dtype]}"


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches there, wherever the pointers lead."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def power_of_two(size: int) -> int:
    """The least power of two that is no less than ``size``; at least 1. Extents of a tile are powers of two."""
    return 1 << max(size - 1, 0).bit_length()


def dtypes_for(capability: int) -> tuple[torch.dtype, ...]:
    """The 16-bit dtypes that a target computes in; float32 it always does."""
    return (torch.float16,) if capability < 80 else (torch.bfloat16, torch.float16)


def check_last_axis(**tensors: Tensor) -> None:
    """A kernel steps by 1 along the last axis.

    Raises:
        RefimplError: a tensor's elements lie further apart there.

    """
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise RefimplError(
                f"{name} has stride {tensor.stride(-1)} along its last axis; it must be 1: call .contiguous()"
            )


def check_same(what: str, **values: object) -> None:
    """Several things must agree.

    Raises:
        RefimplError: they do not.

    """
    if len(set(values.values())) > 1:
        told = ", ".join(f"{name} {value}" for name, value in values.items())
        raise RefimplError(f"{what} must be equal; got {told}")
