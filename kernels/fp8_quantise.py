"""Rows to e4m3 with a scale each, alone and with what makes them: RMSNorm with its residual add, and SwiGLU's product.

::

    row [C] ─┬─ max |x| ─► scale = max / 448 ─┐
             └──────────────────────────── / ─┴─► values [C], one byte each

The largest magnitude must be known before the first value is written, so a program takes a whole row and keeps it in
registers. Behind a norm the row is there anyway: to quantise it too costs no more traffic, and the byte written takes
the place of two. Alone it is a launch more, and two bytes read. All of it is bound by memory.

Rows too long for registers are read twice, the second time from the cache. What is quantised is what the unfused kernel
would have written: rounded to the model's dtype first. Source of the format: Micikevicius et al. 2022, "FP8 Formats for
Deep Learning".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, power_of_two
from refimpl.kernels.overlap import after_previous, overlapping
from refimpl.kernels.rms_norm import normed_row, tile
from refimpl.kernels.silu_mul import swiglu

FP8_MAX = tl.constexpr(reference.FP8_MAX)
LEAST_SCALE = tl.constexpr(reference.LEAST_SCALE)
LONGEST_KEPT = 32768
"""Numbers of SwiGLU's product that a program keeps in registers; longer rows are made twice."""


@triton.jit
def _scale(largest: tl.tensor) -> tl.tensor:
    """The scale of a row whose largest magnitude is given."""
    return tl.maximum(largest / FP8_MAX, LEAST_SCALE)


@triton.jit
def _rounded(row: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """``row`` over its scale, in e4m3. A quotient that comes out above 448 by a rounding is no number there."""
    return tl.clamp(row / scale, -FP8_MAX, FP8_MAX).to(tl.float8e4nv)


@triton.jit
def quantise_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    values_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Row ``program_id(0)``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    after_previous(OVERLAP)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    scale = _scale(tl.max(tl.abs(value), axis=0))
    tl.store(values + row * values_stride + column, _rounded(value, scale), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def rms_norm_quantise_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    new_residual: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    values_stride: tl.tensor,
    new_residual_stride: tl.tensor,
    H: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Row ``program_id(0)``: its norm; with ``ADD`` the norm of ``new_residual = x + residual``, which is written too."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    inside = column < H
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H]
    after_previous(OVERLAP)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H]
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        added = value.to(new_residual.dtype.element_ty)
        tl.store(new_residual + row * new_residual_stride + column, added, mask=inside)
        value = added.to(tl.float32)
    normed = normed_row(value, gain, H, eps, x.dtype.element_ty)
    normed = normed.to(x.dtype.element_ty).to(tl.float32)
    scale = _scale(tl.max(tl.abs(normed), axis=0))
    tl.store(values + row * values_stride + column, _rounded(normed, scale), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _silu_mul(gate_up: tl.tensor, column: tl.tensor, size: tl.tensor) -> tl.tensor:
    """``silu(gate) · up`` at some columns of a row, rounded to the dtype; 0 beyond it. float32."""
    inside = column < size
    gate = tl.load(gate_up + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + size + column, mask=inside, other=0.0).to(tl.float32)
    return swiglu(gate, up).to(gate_up.dtype.element_ty).to(tl.float32)


@triton.jit
def silu_mul_quantise_kernel(
    gate_up: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    gate_up_stride: tl.tensor,
    values_stride: tl.tensor,
    size: tl.tensor,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Row ``program_id(0)``, ``size`` is I; with ``WHOLE`` a tile holds the row, else it is made twice, tile by tile."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    start, target = gate_up + row * gate_up_stride, values + row * values_stride
    after_previous(OVERLAP)
    if WHOLE:
        product = _silu_mul(start, column, size)
        scale = _scale(tl.max(tl.abs(product), axis=0))
        tl.store(target + column, _rounded(product, scale), mask=column < size)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for first in range(0, size, BLOCK):
            largest = tl.maximum(largest, tl.abs(_silu_mul(start, first + column, size)))
        scale = _scale(tl.max(largest, axis=0))
        for first in range(0, size, BLOCK):
            product = _silu_mul(start, first + column, size)
            tl.store(target + first + column, _rounded(product, scale), mask=first + column < size)
    tl.store(scales + row, scale)


def quantise(x: Tensor, values: Tensor | None = None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`reference.quantise` of ``x [T, C]``; rows may lie apart: ``values [T, C]`` in e4m3, ``scales [T]`` in float32.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    values, scales = _outputs(x, x.shape[1], values, scales)
    if x.numel():
        block = power_of_two(x.shape[1])
        with device_of(x):
            quantise_kernel[(len(x),)](
                *(x, values, scales, x.stride(0), values.stride(0), x.shape[1]),
                BLOCK=block,
                num_warps=warps_for(block),
                **overlapping(x),
            )
    return values, scales


def rms_norm_quantise(
    x: Tensor, weight: Tensor, eps: float, values: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`reference.rms_norm_quantise` of ``x [T, H]``.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    values, scales = _outputs(x, x.shape[1], values, scales)
    _launch_norm(x, x, weight, eps, values, scales, x, add=False)
    return values, scales


def add_rms_norm_quantise(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    values: Tensor | None = None,
    scales: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`reference.add_rms_norm_quantise`: the quantised norm of ``x + residual``, and the sum; each ``[T, H]``.

    ``new_residual`` may be ``residual`` itself: a program reads its row before it writes it.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    values, scales = _outputs(x, x.shape[1], values, scales)
    if new_residual is None:
        new_residual = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_same("sizes", x=x.shape, residual=residual.shape, new_residual=new_residual.shape)
    check_last_axis(residual=residual, new_residual=new_residual)
    _launch_norm(x, residual, weight, eps, values, scales, new_residual, add=True)
    return values, scales, new_residual


def silu_mul_quantise(gate_up: Tensor, values: Tensor | None = None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`reference.silu_mul_quantise` of ``gate_up [T, 2·I]``: ``values [T, I]`` and ``scales [T]``.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    size = gate_up.shape[1] // 2
    check_same("sizes", gate_up=gate_up.shape[1], twice=2 * size)
    values, scales = _outputs(gate_up, size, values, scales)
    if len(gate_up) and size:
        block, whole, warps = silu_tile(size)
        with device_of(gate_up):
            silu_mul_quantise_kernel[(len(gate_up),)](
                *(gate_up, values, scales, gate_up.stride(0), values.stride(0), size),
                WHOLE=whole,
                BLOCK=block,
                num_warps=warps,
                **overlapping(gate_up),
            )
    return values, scales


def silu_tile(size: int) -> tuple[int, bool, int]:
    """For rows of ``size`` products: extent of a tile, whether it holds a whole row, and warps a program."""
    block = power_of_two(size)
    if block > LONGEST_KEPT:
        return 4096, False, 8
    return block, True, min(2 * warps_for(block), 32)


def warps_for(block: int) -> int:
    """32 numbers a thread, up to 32 warps."""
    return min(max(block // 1024, 1), 32)


def _outputs(x: Tensor, size: int, values: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where to write: what was given, checked, or new."""
    values = x.new_empty(len(x), size, dtype=torch.float8_e4m3fn) if values is None else values
    scales = x.new_empty(len(x), dtype=torch.float32) if scales is None else scales
    check_last_axis(x=x, values=values, scales=scales)
    check_same("sizes", values=tuple(values.shape), rows=(len(x), size))
    check_same("sizes", scales=tuple(scales.shape), rows=(len(x),))
    return values, scales


def _launch_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, values: Tensor, scales: Tensor, new: Tensor, add: bool
) -> None:
    T, H = x.shape
    check_last_axis(weight=weight)
    check_same("row lengths", x=H, weight=weight.shape[0])
    if T:
        block, warps = tile(H)
        strides = (x.stride(0), residual.stride(0), values.stride(0), new.stride(0))
        with device_of(x):
            rms_norm_quantise_kernel[(T,)](
                *(x, residual, weight, values, scales, new, *strides, H, eps),
                ADD=add,
                BLOCK_H=block,
                num_warps=warps,
                **overlapping(x),
            )
