"""``y = x Wᵀ`` for up to 16 tokens: most of what a decode of a few sequences does.

One token, by plain arithmetic::

    W [out, in]  ROWS rows of it are a program's ┌──────────┬──────────┬──
                                                 │ COLUMNS  │ COLUMNS  │ …     times x [in], added up place by place
                                                 └──────────┴──────────┴──
                                                 sums [ROWS, COLUMNS] in registers, added up at the end ─► y [ROWS]

Bound by memory: every weight is read once, for one multiplication. An H200 brings 2.2·10¹² weights of 16 bits a second and
multiplies 33·10¹² numbers, so plain arithmetic keeps up. A weight goes from memory to the register where it is used, with no
barrier in the loop: ``COLUMNS`` is 8 numbers for each thread, so that weights and x lie alike, and x need not be moved.

Several tokens would be several multiplications a weight: tensor cores make them, 16 weights' rows by 8 or 16 tokens at once.

Weights depend on no kernel, so the first of them are asked for while the kernel before still runs
(:mod:`refimpl.kernels.overlap`).

With ``GATED`` the rows are those of SwiGLU's two matrices (Shazeer 2020), a pair of rows side by side; what is written is
``silu(gate) · up``: neither is rounded or written on the way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.errors import RefimplError
from refimpl.kernels import cases, reference
from refimpl.kernels.attention_tiles import operand, target_of
from refimpl.kernels.launch import check_last_axis, check_same, device_of, dtypes_for, pointer, power_of_two
from refimpl.kernels.overlap import OVERLAPS_FROM, after_previous, overlapping
from refimpl.kernels.silu_mul import swiglu
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

MOST_TOKENS = 16
COLUMNS = 1024
ROWS = 4
"""Rows of weights a program; with ``GATED`` they are pairs, of gate and of up."""
NUM_WARPS = 4
FEW_COLUMNS = 256
FEW_ROWS = 32
FEW_WARPS = 2
FEW_STAGES = 5
"""Several tokens: 4 tiles of 16 kB of weights are on their way for each program, of which two fit a multiprocessor."""


@triton.jit
def _weight_rows(
    weight: tl.tensor, weight_stride: tl.tensor, out_features: tl.tensor, GATED: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where a program's rows of weights begin, and which of them exist, ``[ROWS]`` each.

    With ``GATED`` the matrix has twice ``out_features`` rows, gate's first; a program takes pairs, side by side.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = row // 2 if GATED else row
    number = tl.minimum(output, out_features - 1).to(tl.int64)
    if GATED:
        number += row % 2 * out_features
    return weight + number * weight_stride, output < out_features


@triton.jit
def _load_weights(rows: tl.tensor, inside: tl.tensor, column: tl.tensor, in_features: tl.tensor) -> tl.tensor:
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
    """``ROWS`` rows of weights times one token.

    The next weights are on their way while one tile is multiplied; the first are before the kernel before has ended.
    """
    rows, inside = _weight_rows(weight, weight_stride, out_features, GATED, ROWS)
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
        outputs = swiglu(gate, up)
    output = tl.program_id(0) * outputs.shape[0] + tl.arange(0, outputs.shape[0])
    tl.store(result + output, outputs.to(result.dtype.element_ty), mask=output < out_features)


@triton.jit
def few_tokens_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    result: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    result_stride: tl.tensor,
    tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """``ROWS`` rows of weights times up to ``TOKENS`` tokens, which are the columns, by tensor cores."""
    rows, inside = _weight_rows(weight, weight_stride, out_features, False, ROWS)
    token = tl.arange(0, TOKENS)
    exists = (token < tokens)[None, :]
    after_previous(OVERLAP)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, in_features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        weights = _load_weights(rows, inside, column, in_features).to(OPERAND)  # [ROWS, COLUMNS]
        there = exists & (column < in_features)[:, None]
        numbers = tl.load(x + token[None, :] * x_stride + column[:, None], mask=there, other=0.0).to(OPERAND)
        sums = tl.dot(weights, numbers, sums, input_precision="ieee")
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = result + token[None, :] * result_stride + output[:, None]
    tl.store(places, sums.to(result.dtype.element_ty), mask=exists & inside[:, None])


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear` is faster than cuBLAS, as measured on an H200 with the matrices of Llama-3-8B, in 16 bits.

    For one token it is. For up to 16 it is where cuBLAS leaves half of the bandwidth unused: where rows are so few that all
    programs run at once.
    """
    if x.element_size() != 2 or not 0 < len(x) <= MOST_TOKENS:
        return False
    target = target_of(x.device)
    return len(x) == 1 or (target.capability >= OVERLAPS_FROM and len(weight) <= FEW_ROWS * target.num_sms)


def linear(x: Tensor, weight: Tensor, result: Tensor | None = None) -> Tensor:
    """:func:`reference.linear` of up to 16 tokens ``x [T, in_features]``: ``[T, out_features]``, in ``result`` if given.

    Raises:
        RefimplError: elements of a row lie apart, sizes differ, or there are more tokens.

    """
    tokens, sizes = len(x), weight.shape
    result = _checked(x, weight, result, sizes[0], MOST_TOKENS)
    if tokens == 1 and sizes[0]:
        _one_token(x, weight, result, gated=False)
    elif result.numel():
        strides = (x.stride(0), weight.stride(0), result.stride(0))
        room = max(8, power_of_two(tokens))
        with device_of(x):
            few_tokens_kernel[(triton.cdiv(sizes[0], FEW_ROWS),)](
                x, weight, result, *strides, tokens, *sizes,
                TOKENS=room, ROWS=FEW_ROWS, COLUMNS=FEW_COLUMNS, OPERAND=operand(x.dtype),
                num_warps=FEW_WARPS, num_stages=FEW_STAGES, **overlapping(x),
            )  # fmt: skip
    return result


def gated_linear(x: Tensor, weight: Tensor, result: Tensor | None = None) -> Tensor:
    """:func:`reference.gated_linear` of one token by gate's and up's weights ``[2·I, in_features]``: ``[1, I]``.

    Raises:
        RefimplError: elements of a row lie apart, sizes differ, or there are more tokens.

    """
    result = _checked(x, weight, result, weight.shape[0] // 2, 1)
    if result.numel():
        _one_token(x, weight, result, gated=True)
    return result


def _checked(x: Tensor, weight: Tensor, result: Tensor | None, out_features: int, most_tokens: int) -> Tensor:
    result = x.new_empty(len(x), out_features) if result is None else result
    check_last_axis(x=x, weight=weight, result=result)
    check_same("sizes", x=x.shape[1], weight=weight.shape[1])
    check_same("sizes", result=tuple(result.shape), x_and_weight=(len(x), out_features))
    if len(x) > most_tokens:
        raise RefimplError(f"x has {len(x)} tokens; the kernel takes up to {most_tokens}: use torch's product for more")
    return result


def _one_token(x: Tensor, weight: Tensor, result: Tensor, gated: bool) -> None:
    with device_of(x):
        one_token_kernel[(triton.cdiv(len(weight), ROWS),)](
            x, weight, result, weight.stride(0), result.shape[1], weight.shape[1],
            GATED=gated, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS, **overlapping(x),
        )  # fmt: skip


# ---------------------------------------------------------------------- what is registered


def _make(gated: bool) -> Callable[[Shape, torch.dtype, torch.device, int], Case]:
    def case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
        tokens, out_features, in_features = shape.get("T", 1), shape["out_features"], shape["in_features"]
        random = cases.generator(seed)
        x = cases.normal(tokens, in_features, dtype=dtype, device=device, random=random, gap=shape.get("gap", 0))
        rows, scale = out_features * (2 if gated else 1), in_features**-0.5
        gap = shape.get("gap", 0)
        weight = cases.normal(rows, in_features, dtype=dtype, device=device, random=random, scale=scale, gap=gap)
        return Case({"x": x, "weight": weight}, {"result": cases.poisoned(tokens, out_features, dtype=dtype, device=device)})

    return case


def _compiles(gated: bool) -> Callable[[int], tuple[Compile, ...]]:
    def compiles(capability: int) -> tuple[Compile, ...]:
        dtype = dtypes_for(capability)[0]
        overlaps = capability >= OVERLAPS_FROM
        signature = dict.fromkeys(("x", "weight", "result"), pointer(dtype))
        signature |= dict.fromkeys(("weight_stride", "out_features", "in_features"), "i32")
        one = {"GATED": gated, "ROWS": ROWS, "COLUMNS": COLUMNS, "OVERLAP": overlaps}
        found = [Compile(one_token_kernel, signature, one, NUM_WARPS, label=f"1 token {signature['x'][1:]}")]
        several = signature | dict.fromkeys(("x_stride", "result_stride", "tokens"), "i32")
        odd = frozenset({"tokens"})
        for room in () if gated or capability < 80 else (8, 16):
            few = {"TOKENS": room, "ROWS": FEW_ROWS, "COLUMNS": FEW_COLUMNS, "OPERAND": operand(dtype), "OVERLAP": overlaps}
            label = f"{room} tokens {signature['x'][1:]}"
            found.append(Compile(few_tokens_kernel, several, few, FEW_WARPS, FEW_STAGES, odd, label))
        return tuple(found)

    return compiles


FEW_TOKENS: tuple[Shape, ...] = (
    {"T": 2, "out_features": 9, "in_features": 80, "gap": 3},
    {"T": 9, "out_features": 35, "in_features": 300},
    {"T": 16, "out_features": 64, "in_features": 256},
)


def _spec(name: str, summary: str, gated: bool) -> KernelSpec:
    matrices = 2 if gated else 1
    return KernelSpec(
        name=name,
        summary=summary,
        axes=("T", "out_features", "in_features", "gap"),
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
            {"T": 0, "out_features": 8, "in_features": 8},
            *(() if gated else FEW_TOKENS),
        ),
        device_shapes=tuple(
            {"out_features": out_features, "in_features": in_features}
            for out_features, in_features in (
                [(14336, 4096), (1536, 576)]
                if gated
                else [(6144, 4096), (4096, 4096), (4096, 14336), (128_256, 4096), (49_152, 576)]
            )
        )
        + (
            ()
            if gated
            else tuple({"T": T, "out_features": 4096, "in_features": H} for T in (2, 8, 16) for H in (4096, 14336))
        ),
        tolerance={
            torch.float32: Tolerance(1e-6, 4e-5, "sums of up to 14,336 products of about 0.01, one after the other"),
            torch.bfloat16: Tolerance(1.02 * 2.0**-8, 4e-5, "one rounding, of such a sum"),
            torch.float16: Tolerance(1.02 * 2.0**-11, 4e-5, "one rounding, of such a sum"),
        },
        bytes_moved=lambda shape, dtype: matrices * shape["out_features"] * shape["in_features"] * dtype.itemsize,
        flops=lambda shape, dtype: 2 * matrices * shape["out_features"] * shape["in_features"],
        compiles=_compiles(gated),
    )


SPECS = (
    _spec("linear", "one token through a matrix", gated=False),
    _spec("gated_linear", "one token through SwiGLU's two matrices", gated=True),
)
