"""``y = x Wᵀ`` for one token: most of what a decode of one sequence does.

::

    W [out, in]  ROWS rows of it are a program's ┌──────────┬──────────┬──
                                                 │ COLUMNS  │ COLUMNS  │ …     times x [in], added up place by place
                                                 └──────────┴──────────┴──
                                                 sums [ROWS, COLUMNS] in registers, added up at the end ─► y [ROWS]

Bound by memory: every weight is read once, for one multiplication. An H200 brings 2.2·10¹² weights of 16 bits a second and
multiplies 33·10¹² numbers, so plain arithmetic keeps up. Tensor cores would multiply 15 tokens of zeros beside the one, and
want tiles of weights rearranged in shared memory; here a weight goes from memory to the register where it is used, and many
small programs keep enough loads under way.

With ``GATED`` the rows are those of SwiGLU's two matrices (Shazeer 2020); what is written is ``silu(gate) · up``: neither
is rounded or written on the way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, dtypes_for, pointer
from refimpl.kernels.overlap import OVERLAPS_FROM, after_previous, overlapping
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

COLUMNS = 512
ROWS = 8
"""Rows of weights a program; with ``GATED`` they are pairs, of gate and of up."""
NUM_WARPS = 4


@triton.jit
def _load_weights(
    rows: tl.tensor, inside: tl.tensor, column: tl.tensor, in_features: tl.tensor
) -> tl.tensor:
    """``[ROWS, COLUMNS]`` of the matrix, read for the only time; 0 outside."""
    there = inside[:, None] & (column < in_features)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def one_token_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    result: tl.tensor,
    weight_stride: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """``ROWS`` rows of weights; with ``GATED`` the matrix has twice ``out_features`` of them, gate's first.

    The next weights are on their way while one tile is multiplied; the first are before the kernel before has ended.
    """
    row = tl.arange(0, ROWS)
    if GATED:
        output = tl.program_id(0) * (ROWS // 2) + row // 2
        rows = weight + (output + row % 2 * out_features).to(tl.int64) * weight_stride
    else:
        output = tl.program_id(0) * ROWS + row
        rows = weight + output.to(tl.int64) * weight_stride
    inside = output < out_features
    weights = _load_weights(rows, inside, tl.arange(0, COLUMNS), in_features)
    after_previous(OVERLAP)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, in_features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        following = _load_weights(rows, inside, column + COLUMNS, in_features)
        numbers = tl.load(x + column, mask=column < in_features, other=0.0)
        sums += weights.to(tl.float32) * numbers.to(tl.float32)[None, :]
        weights = following
    outputs = tl.sum(sums, axis=1)  # [ROWS]
    if GATED:
        gate, up = tl.split(tl.reshape(outputs, (ROWS // 2, 2)))  # [ROWS / 2] each
        outputs = gate / (1.0 + tl.exp(-gate)) * up
        output = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    tl.store(result + output, outputs.to(result.dtype.element_ty), mask=output < out_features)


def linear(x: Tensor, weight: Tensor, result: Tensor | None = None) -> Tensor:
    """:func:`reference.linear` of one token ``x [1, in_features]``. Written to ``result [1, out_features]`` if it is there.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    return _launch(x, weight, result, gated=False)


def gated_linear(x: Tensor, weight: Tensor, result: Tensor | None = None) -> Tensor:
    """:func:`reference.gated_linear` of one token by gate's and up's weights ``[2·I, in_features]``: ``[1, I]``.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    return _launch(x, weight, result, gated=True)


def _launch(x: Tensor, weight: Tensor, result: Tensor | None, gated: bool) -> Tensor:
    out_features, in_features = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    result = x.new_empty(1, out_features) if result is None else result
    check_last_axis(x=x, weight=weight, result=result)
    check_same("sizes", x=tuple(x.shape), weight=(1, in_features))
    check_same("sizes", result=tuple(result.shape), weight=(1, out_features))
    if out_features:
        with device_of(x):
            one_token_kernel[(triton.cdiv(weight.shape[0], ROWS),)](
                x,
                weight,
                result,
                weight.stride(0),
                out_features,
                in_features,
                GATED=gated,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                num_warps=NUM_WARPS,
                **overlapping(x),
            )
    return result


# ---------------------------------------------------------------------- what is registered


def _make(gated: bool) -> Callable[[Shape, torch.dtype, torch.device, int], Case]:
    def case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
        out_features, in_features = shape["out_features"], shape["in_features"]
        random = cases.generator(seed)
        x = cases.normal(1, in_features, dtype=dtype, device=device, random=random)
        rows, scale = out_features * (2 if gated else 1), in_features**-0.5
        gap = shape.get("gap", 0)
        weight = cases.normal(rows, in_features, dtype=dtype, device=device, random=random, scale=scale, gap=gap)
        return Case({"x": x, "weight": weight}, {"result": cases.poisoned(1, out_features, dtype=dtype, device=device)})

    return case


def _compiles(gated: bool) -> Callable[[int], tuple[Compile, ...]]:
    def compiles(capability: int) -> tuple[Compile, ...]:
        dtype = pointer(dtypes_for(capability)[0])
        signature = {
            "x": dtype,
            "weight": dtype,
            "result": dtype,
            "weight_stride": "i32",
            "out_features": "i32",
            "in_features": "i32",
        }
        compiled = {"GATED": gated, "ROWS": ROWS, "COLUMNS": COLUMNS, "OVERLAP": capability >= OVERLAPS_FROM}
        return (Compile(one_token_kernel, signature, compiled, NUM_WARPS, label=dtype[1:]),)

    return compiles


def _spec(name: str, summary: str, gated: bool) -> KernelSpec:
    matrices = 2 if gated else 1
    return KernelSpec(
        name=name,
        summary=summary,
        axes=("out_features", "in_features", "gap"),
        twin=reference.gated_linear if gated else reference.linear,
        launch=gated_linear if gated else linear,
        outputs=("result",),
        make_case=_make(gated),
        small_shapes=(
            {"out_features": 0, "in_features": 8},
            {"out_features": 1, "in_features": 1},
            {"out_features": 9, "in_features": 80, "gap": 3},
            {"out_features": 17, "in_features": 513},
            {"out_features": 8, "in_features": 1024},
        ),
        device_shapes=tuple(
            {"out_features": out_features, "in_features": in_features}
            for out_features, in_features in (
                [(14336, 4096), (1536, 576)]
                if gated
                else [(6144, 4096), (4096, 4096), (4096, 14336), (128_256, 4096), (49_152, 576)]
            )
        ),
        tolerance={
            torch.float32: Tolerance(1e-6, 4e-6, "sums of up to 14,336 products of about 1, in another order"),
            torch.bfloat16: Tolerance(1.02 * 2.0**-8, 4e-6, "one rounding, of such a sum"),
            torch.float16: Tolerance(1.02 * 2.0**-11, 4e-6, "one rounding, of such a sum"),
        },
        bytes_moved=lambda shape, dtype: matrices * shape["out_features"] * shape["in_features"] * dtype.itemsize,
        flops=lambda shape, dtype: 2 * matrices * shape["out_features"] * shape["in_features"],
        compiles=_compiles(gated),
    )


SPECS = (
    _spec("linear", "one token through a matrix", gated=False),
    _spec("gated_linear", "one token through SwiGLU's two matrices", gated=True),
)
