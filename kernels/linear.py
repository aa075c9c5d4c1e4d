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
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.attention_tiles import operand
from refimpl.kernels.launch import check_last_axis, check_same, device_of, dtypes_for, pointer, power_of_two
from refimpl.kernels.overlap import OVERLAPS_FROM, after_previous, overlapping, prefetch
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

COLUMNS = 1024
ROWS = 4
"""Rows of weights a program; with ``GATED`` they are pairs, of gate and of up."""
NUM_WARPS = 4
AHEAD = 1024
"""Numbers of each row that are asked for while the kernel before still runs."""


@dataclass(frozen=True)
class Tiles:
    """How a product of several tokens is cut."""

    tokens: int
    """Tokens there is room for."""
    rows: int
    columns: int
    num_warps: int
    num_stages: int
    ahead: int
    """Numbers of each row that are asked for while the kernel before still runs."""


def few_tokens_tiles(tokens: int) -> Tiles:
    """The cut for 2 to 16 tokens."""
    return Tiles(max(8, power_of_two(tokens)), 32, 256, 2, 5, 1024)


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
def _prefetch_weights(rows: tl.tensor, in_features: tl.tensor, AHEAD: tl.constexpr) -> None:
    """The first ``AHEAD`` numbers of each row, by cache lines of 128 bytes."""
    SIZE: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    column = tl.minimum(tl.arange(0, AHEAD * SIZE // 128) * (128 // SIZE), in_features - 1)
    prefetch(rows.to(tl.int64)[:, None] + (column * SIZE)[None, :])


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
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """``ROWS`` rows of weights times one token.

    The next weights are on their way while one tile is multiplied; the first are before the kernel before has ended.
    """
    rows, inside = _weight_rows(weight, weight_stride, out_features, GATED, ROWS)
    if AHEAD:
        _prefetch_weights(rows, in_features, AHEAD)
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
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """``ROWS`` rows of weights times up to ``TOKENS`` tokens, which are the columns, by tensor cores."""
    rows, inside = _weight_rows(weight, weight_stride, out_features, GATED, ROWS)
    if AHEAD:
        _prefetch_weights(rows, in_features, AHEAD)
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
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (ROWS // 2, 2, TOKENS)), (0, 2, 1)))  # [ROWS / 2, TOKENS] each
        sums = gate / (1.0 + tl.exp(-gate)) * up
    output = tl.program_id(0) * sums.shape[0] + tl.arange(0, sums.shape[0])
    places = result + token[None, :] * result_stride + output[:, None]
    tl.store(places, sums.to(result.dtype.element_ty), mask=exists & (output < out_features)[:, None])


def linear(x: Tensor, weight: Tensor, result: Tensor | None = None) -> Tensor:
    """:func:`reference.linear` of up to 16 tokens ``x [T, in_features]``: ``[T, out_features]``, in ``result`` if given.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    return _launch(x, weight, result, gated=False)


def gated_linear(x: Tensor, weight: Tensor, result: Tensor | None = None) -> Tensor:
    """:func:`reference.gated_linear` of up to 16 tokens by gate's and up's weights ``[2·I, in_features]``: ``[T, I]``.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    return _launch(x, weight, result, gated=True)


def _launch(x: Tensor, weight: Tensor, result: Tensor | None, gated: bool) -> Tensor:
    tokens, out_features, in_features = len(x), weight.shape[0] // (2 if gated else 1), weight.shape[1]
    result = x.new_empty(tokens, out_features) if result is None else result
    check_last_axis(x=x, weight=weight, result=result)
    check_same("sizes", x=x.shape[1], weight=in_features)
    check_same("sizes", result=tuple(result.shape), x_and_weight=(tokens, out_features))
    if not out_features or not tokens:
        return result
    options = {"GATED": gated} | overlapping(x)
    sizes = (out_features, in_features)
    with device_of(x):
        if tokens == 1:
            one_token_kernel[(triton.cdiv(weight.shape[0], ROWS),)](
                x, weight, result, weight.stride(0), *sizes,
                ROWS=ROWS, COLUMNS=COLUMNS, AHEAD=AHEAD * options["OVERLAP"], num_warps=NUM_WARPS, **options,
            )  # fmt: skip
        else:
            tiles = few_tokens_tiles(tokens)
            few_tokens_kernel[(triton.cdiv(weight.shape[0], tiles.rows),)](
                x, weight, result, x.stride(0), weight.stride(0), result.stride(0), tokens, *sizes,
                TOKENS=tiles.tokens, ROWS=tiles.rows, COLUMNS=tiles.columns, OPERAND=operand(x.dtype),
                AHEAD=tiles.ahead * options["OVERLAP"], num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options,
            )  # fmt: skip
    return result


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
        options = {"GATED": gated, "OVERLAP": overlaps}
        one = {"ROWS": ROWS, "COLUMNS": COLUMNS, "AHEAD": AHEAD * overlaps}
        found = [Compile(one_token_kernel, signature, options | one, NUM_WARPS, label=f"1 token {signature['x'][1:]}")]
        signature |= dict.fromkeys(("x_stride", "result_stride", "tokens"), "i32")
        for tokens in (8, 16) if capability >= 80 else ():
            tiles = few_tokens_tiles(tokens)
            cut = {"TOKENS": tiles.tokens, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "AHEAD": tiles.ahead * overlaps}
            few = options | cut | {"OPERAND": operand(dtype)}
            label = f"{tokens} tokens {signature['x'][1:]}"
            odd = frozenset({"tokens"})
            found.append(Compile(few_tokens_kernel, signature, few, tiles.num_warps, tiles.num_stages, odd, label))
        return tuple(found)

    return compiles


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
            {"T": 2, "out_features": 9, "in_features": 80, "gap": 3},
            {"T": 9, "out_features": 35, "in_features": 300},
            {"T": 16, "out_features": 64, "in_features": 256},
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
