"""RMSNorm, plain and with the residual add before it, one row a program.

A row of H numbers is read once and stays in registers: the sum of squares is a reduction over the program's threads, so the
second use of the row costs no memory traffic::

    x [H] ─┬─ (+ residual [H] ─► new residual [H]) ─┬─ Σ square ─ rsqrt(mean + eps) ─┐
           │                                         └──────────────────────────── × ─┴─ × weight [H] ─► normed [H]

Alone the add moves 3 rows and the norm 2; together they move 4 instead of 5, and one launch is saved, which at one row a
step is what costs. All of it is bound by memory: 2 (or 4) rows of bytes for about 4 operations an element.

The quotient is rounded to x's dtype before it is multiplied by the weight, and the new residual before it is normed, as in
Hugging Face's Llama. Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import (
    check_last_axis,
    check_same,
    device_of,
    dtypes_for,
    pointer,
    power_of_two,
)
from refimpl.kernels.overlap import OVERLAPS_FROM, after_previous, overlapping
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance


@triton.jit
def normed_row(row: tl.tensor, weight: tl.tensor, H: tl.tensor, eps: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """``row`` and ``weight`` are [BLOCK_H] in float32, zero beyond H."""
    root = tl.rsqrt(tl.sum(row * row, axis=0) / H + eps)
    return (row * root).to(dtype).to(tl.float32) * weight


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    x_stride: tl.tensor,
    normed_stride: tl.tensor,
    H: tl.tensor,
    eps: tl.tensor,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Row ``program_id(0)`` of ``normed = x / rms(x) · weight``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    inside = column < H
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H]
    after_previous(OVERLAP)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H]
    result = normed_row(value, scale, H, eps, x.dtype.element_ty)
    tl.store(normed + row * normed_stride + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    new_residual: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    normed_stride: tl.tensor,
    new_residual_stride: tl.tensor,
    H: tl.tensor,
    eps: tl.tensor,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Row ``program_id(0)`` of ``new_residual = x + residual`` and of its norm. Outputs may be the inputs themselves."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    inside = column < H
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H]
    after_previous(OVERLAP)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H]
    value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(new_residual.dtype.element_ty)
    tl.store(new_residual + row * new_residual_stride + column, rounded, mask=inside)
    result = normed_row(rounded.to(tl.float32), scale, H, eps, x.dtype.element_ty)
    tl.store(normed + row * normed_stride + column, result.to(normed.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
    """:func:`reference.rms_norm` of ``x [T, H]``; rows may lie apart. The result is written to ``normed`` if it is given.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    T, H = x.shape
    normed = torch.empty_like(x, memory_format=torch.contiguous_format) if normed is None else normed
    check_last_axis(x=x, weight=weight, normed=normed)
    check_same("row lengths", x=H, weight=weight.shape[0], normed=normed.shape[1])
    if T:
        block, warps = tile(H)
        with device_of(x):
            rms_norm_kernel[(T,)](
                x, weight, normed, x.stride(0), normed.stride(0), H, eps, BLOCK_H=block, num_warps=warps, **overlapping(x)
            )
    return normed


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`reference.add_rms_norm`: the norm of ``x + residual``, and the sum. Each ``[T, H]``; rows may lie apart.

    ``normed`` may be ``x`` itself and ``new_residual`` ``residual`` itself: a program reads its row before it writes it.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    T, H = x.shape
    normed = torch.empty_like(x, memory_format=torch.contiguous_format) if normed is None else normed
    new_residual = torch.empty_like(normed) if new_residual is None else new_residual
    check_last_axis(x=x, residual=residual, weight=weight, normed=normed, new_residual=new_residual)
    check_same("sizes", x=x.shape, residual=residual.shape, normed=normed.shape, new_residual=new_residual.shape)
    check_same("row lengths", x=H, weight=weight.shape[0])
    if T:
        block, warps = tile(H)
        tensors = (x, residual, weight, normed, new_residual)
        strides = (x.stride(0), residual.stride(0), normed.stride(0), new_residual.stride(0))
        with device_of(x):
            add_rms_norm_kernel[(T,)](*tensors, *strides, H, eps, BLOCK_H=block, num_warps=warps, **overlapping(x))
    return normed, new_residual


def tile(H: int) -> tuple[int, int]:
    """Extent of a row's tile and warps a program: 16 numbers a thread, up to 16 warps."""
    block = power_of_two(H)
    return block, min(max(block // 512, 1), 16)


# ---------------------------------------------------------------------- what is registered

EPS = 1e-5


def _case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, fused: bool) -> Case:
    T, H, gap = shape["T"], shape["H"], shape.get("gap", 0)
    random = cases.generator(seed)
    inputs = {"x": cases.normal(T, H, dtype=dtype, device=device, random=random, scale=3.0, gap=gap)}
    if fused:
        inputs["residual"] = cases.normal(T, H, dtype=dtype, device=device, random=random, scale=3.0, gap=gap)
    weight = cases.normal(H, dtype=dtype, device=device, random=random)
    names = ("normed", "new_residual") if fused else ("normed",)
    out = {name: cases.poisoned(T, H, dtype=dtype, device=device) for name in names}
    return Case(inputs | {"weight": weight, "eps": EPS}, out)


def _plain_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    return _case(shape, dtype, device, seed, fused=False)


def _fused_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    return _case(shape, dtype, device, seed, fused=True)


def _compiles(capability: int, fused: bool) -> tuple[Compile, ...]:
    names = ("x", "residual", "weight", "normed", "new_residual") if fused else ("x", "weight", "normed")
    strides = {f"{name}_stride": "i32" for name in names if name != "weight"}
    block, warps = tile(8192)
    signature = dict.fromkeys(names, pointer(dtypes_for(capability)[0])) | strides | {"H": "i32", "eps": "fp32"}
    kernel = add_rms_norm_kernel if fused else rms_norm_kernel
    return (
        Compile(
            kernel,
            signature,
            {"BLOCK_H": block, "OVERLAP": capability >= OVERLAPS_FROM},
            warps,
            label=f"H=8192 {signature['x'][1:]}",
        ),
    )


def _tolerances(roundings: int) -> dict[torch.dtype, Tolerance]:
    """Each rounding to 16 bits is off by half a unit in the last place, relative; an eleventh more where errors multiply."""
    why = f"{roundings} roundings to the dtype"
    return {
        torch.float32: Tolerance(4e-6, 1e-30, "a sum of up to 16,384 squares in another order, a root, three products"),
        torch.bfloat16: Tolerance(1.1 * roundings * 2.0**-8, 1e-30, why),
        torch.float16: Tolerance(1.1 * roundings * 2.0**-11, roundings * 2.0**-24, f"{why}; atol: numbers below 2**-14"),
    }


SMALL: tuple[Shape, ...] = (
    {"T": 0, "H": 8},
    {"T": 1, "H": 1},
    {"T": 3, "H": 80},
    {"T": 2, "H": 576, "gap": 3},
    {"T": 5, "H": 64, "gap": 1},
)
SERVED: tuple[Shape, ...] = (
    {"T": 1, "H": 4096},
    {"T": 64, "H": 4096},
    {"T": 256, "H": 8192},
    {"T": 8192, "H": 4096},
    {"T": 777, "H": 576, "gap": 8},
)

SPECS = (
    KernelSpec(
        name="rms_norm",
        summary="x / rms(x) · weight, by rows",
        axes=("T", "H", "gap"),
        twin=reference.rms_norm,
        launch=rms_norm,
        outputs=("normed",),
        make_case=_plain_case,
        small_shapes=SMALL,
        device_shapes=SERVED,
        tolerance=_tolerances(2),
        bytes_moved=lambda shape, dtype: (2 * shape["T"] * shape["H"] + shape["H"]) * dtype.itemsize,
        flops=lambda shape, dtype: 4 * shape["T"] * shape["H"],
        compiles=lambda capability: _compiles(capability, fused=False),
    ),
    KernelSpec(
        name="add_rms_norm",
        summary="x + residual, and its norm",
        axes=("T", "H", "gap"),
        twin=reference.add_rms_norm,
        launch=add_rms_norm,
        outputs=("normed", "new_residual"),
        make_case=_fused_case,
        small_shapes=SMALL,
        device_shapes=SERVED,
        tolerance=_tolerances(3),
        bytes_moved=lambda shape, dtype: (4 * shape["T"] * shape["H"] + shape["H"]) * dtype.itemsize,
        flops=lambda shape, dtype: 5 * shape["T"] * shape["H"],
        compiles=lambda capability: _compiles(capability, fused=True),
    ),
)
