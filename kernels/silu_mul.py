"""SwiGLU's product: the first half of each row through SiLU, times the second half.

::

    gate_up [T, 2·I]  ─  gate = columns [0, I), up = columns [I, 2·I)  ─►  gate / (1 + exp(−gate)) · up  [T, I]

Elementwise and bound by memory: three numbers moved for about five operations. A program takes ``BLOCK`` columns of one row;
eight numbers a thread make loads of 16 bytes in 16-bit dtypes. Programs follow each other along a row, so that what runs at
the same time reads memory in one piece (4% faster than down the columns). Everything between load and store is in float32,
so there is one rounding. Source: Shazeer 2020, "GLU Variants Improve Transformer".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, dtypes_for, pointer
from refimpl.kernels.overlap import OVERLAPS_FROM, after_previous, overlapping
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def swiglu(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """``silu(gate) · up``, of float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor,
    product: tl.tensor,
    gate_up_stride: tl.tensor,
    product_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One piece of a row, and the next program the next one; ``size`` is I."""
    pieces = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    start = gate_up + row * gate_up_stride
    after_previous(OVERLAP)
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(start + size + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    result = swiglu(gate, up)
    tl.store(product + row * product_stride + column, result.to(product.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, product: Tensor | None = None) -> Tensor:
    """:func:`reference.silu_mul` of ``gate_up [T, 2·I]``; rows may lie apart. Written to ``product [T, I]`` if it is given.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    T, size = gate_up.shape[0], gate_up.shape[1] // 2
    product = gate_up.new_empty(T, size) if product is None else product
    check_last_axis(gate_up=gate_up, product=product)
    check_same("sizes", gate_up=(T, 2 * (gate_up.shape[1] // 2)), twice_product=(product.shape[0], 2 * product.shape[1]))
    if T and size:
        with device_of(gate_up):
            silu_mul_kernel[(T * triton.cdiv(size, BLOCK),)](
                gate_up, product, gate_up.stride(0), product.stride(0), size, BLOCK=BLOCK, num_warps=NUM_WARPS,
                **overlapping(gate_up),
            )  # fmt: skip
    return product


# ---------------------------------------------------------------------- what is registered


def _case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    T, size = shape["T"], shape["I"]
    random = cases.generator(seed)
    gate_up = cases.normal(T, 2 * size, dtype=dtype, device=device, random=random, scale=4.0, gap=shape.get("gap", 0))
    return Case({"gate_up": gate_up}, {"product": cases.poisoned(T, size, dtype=dtype, device=device)})


def _compiles(capability: int) -> tuple[Compile, ...]:
    dtype = pointer(dtypes_for(capability)[0])
    numbers = {"gate_up_stride": "i32", "product_stride": "i32", "size": "i32"}
    signature = {"gate_up": dtype, "product": dtype} | numbers
    return (
        Compile(
            silu_mul_kernel, signature, {"BLOCK": BLOCK, "OVERLAP": capability >= OVERLAPS_FROM}, NUM_WARPS, label=dtype[1:]
        ),
    )


SPECS = (
    KernelSpec(
        name="silu_mul",
        summary="silu(gate) · up",
        axes=("T", "I", "gap"),
        twin=reference.silu_mul,
        launch=silu_mul,
        outputs=("product",),
        make_case=_case,
        small_shapes=(
            {"T": 0, "I": 8},
            {"T": 1, "I": 1},
            {"T": 3, "I": 80},
            {"T": 2, "I": 1536, "gap": 3},
            {"T": 2, "I": 1025},
        ),
        device_shapes=(
            {"T": 1, "I": 14336},
            {"T": 64, "I": 14336},
            {"T": 256, "I": 28672},
            {"T": 8192, "I": 14336},
            {"T": 777, "I": 1536, "gap": 8},
        ),
        tolerance={
            torch.float32: Tolerance(
                4e-6, 1e-30, "exp by a power of 2, off by 6e-8 for each unit of gate; a quotient, a product"
            ),
            torch.bfloat16: Tolerance(1.02 * 2.0**-8, 1e-30, "one rounding"),
            torch.float16: Tolerance(1.02 * 2.0**-11, 2.0**-24, "one rounding; atol: numbers below 2**-14"),
        },
        bytes_moved=lambda shape, dtype: 3 * shape["T"] * shape["I"] * dtype.itemsize,
        flops=lambda shape, dtype: 5 * shape["T"] * shape["I"],
        compiles=_compiles,
    ),
)
