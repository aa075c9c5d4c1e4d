"""``y = x Wᵀ`` by FP8 weights for a few tokens: half the bytes of a decode step in 16 bits, at the memory's rate.

Weights have a scale for each output channel, activations one for each token (:mod:`refimpl.kernels.fp8_quantise`), so both
leave the sum and are multiplied in at its end::

    y[t, o] = scales[t] · weight_scales[o] · Σ values[t, i] · weight[o, i]          values, weight in e4m3

The weight is the taller side of a product on tensor cores, which take e4m3 as it is: even a single token is faster so, with
15 of 16 columns empty, than by plain arithmetic, which has to widen every weight first (kernels/NOTES.md)::

    weight [ROWS, COLUMNS] · (values [TOKENS, COLUMNS])ᵀ  added up over COLUMNS  ─►  [ROWS, TOKENS]

A matrix of 4,096 outputs is 64 tiles, too few for 132 processors: SPLITS programs share a tile's columns. How they add up,
and SwiGLU's two matrices at once: :mod:`refimpl.kernels.few_tokens`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels.few_tokens import all_parts, room_for_parts, rows_of, write_product
from refimpl.kernels.launch import check_last_axis, check_same, device_of, power_of_two
from refimpl.kernels.overlap import after_previous, overlapping

PROCESSORS = 132
"""Of an H200, on which the cuts were chosen."""
ROWS = 64
"""Of a weight in a tile: the least that tensor cores of sm_90 take."""
MOST_IN_A_TILE = 128
"""Tokens."""


def serves(num_tokens: int, num_rows: int) -> bool:
    """Whether the kernel is no slower than a library's product: up to 64 tokens, up to 128 where a weight has few rows."""
    return num_tokens <= (MOST_IN_A_TILE if num_rows <= 8192 else 64)


class Cut(NamedTuple):
    """How a product is cut."""

    tokens: int
    """That a tile has room for."""
    rows: int
    """Of the weight in a tile."""
    columns: int
    """Multiplied at a time."""
    num_stages: int
    """Tiles that are on their way."""
    splits: int
    """Programs that share a tile of outputs."""
    num_warps: int


def cut(num_tokens: int, num_rows: int, in_features: int) -> Cut:
    """The cut for a number of tokens and a weight of ``num_rows`` rows: the fastest of some dozens (kernels/NOTES.md)."""
    tokens = min(max(power_of_two(num_tokens), 16), MOST_IN_A_TILE)
    tiles = triton.cdiv(num_rows, ROWS)
    columns, num_stages = (256, 5) if tokens == 16 else (128, 6) if tokens < 128 else (128, 5)
    if PROCESSORS < tiles <= 2 * PROCESSORS and tokens < 128:
        # Some processors would have two tiles, others one: with tiles twice as tall all have one at most.
        return Cut(tokens, 2 * ROWS, 128, 6 if tokens == 16 else 5, 1, 4)
    shared = 2 * tiles <= PROCESSORS and in_features >= (4096 if tokens in (32, 64) else 8192)
    return Cut(tokens, ROWS, columns, num_stages, 2 if shared else 1, 4)


@triton.jit(do_not_specialize=["num_tokens"])  # one compilation for any number that a tile has room for
def fp8_linear_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    result: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    values_stride: tl.tensor,
    weight_stride: tl.tensor,
    result_stride: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tokens ``program_id(0) · TOKENS …`` times rows ``program_id(1) · ROWS …``, part ``program_id(2)`` of the columns."""
    row, inside = rows_of(out_features, GATED, ROWS)
    rows = weight + row.to(tl.int64) * weight_stride
    each = tl.cdiv(in_features, SPLITS * COLUMNS) * COLUMNS
    first = tl.program_id(2) * each
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    numbers = values + token.to(tl.int64) * values_stride
    scale = tl.load(weight_scales + row)
    after_previous(OVERLAP)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(first, tl.minimum(first + each, in_features), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        within = (column < in_features)[None, :]
        tile = tl.load(
            rows[:, None] + column[None, :], mask=inside[:, None] & within, other=0.0, eviction_policy="evict_first"
        )
        number = tl.load(numbers[:, None] + column[None, :], mask=there[:, None] & within, other=0.0)  # [TOKENS, COLUMNS]
        sums = tl.dot(tile, tl.trans(number), sums)
    last = True
    if SPLITS > 1:
        sums, last = all_parts(sums, parts, arrivals, SPLITS)
    if last:
        product = sums * scale[:, None] * tl.load(scales + token, mask=there, other=0.0)[None, :]
        write_product(product, result, result_stride, token, there, out_features, GATED)


def fp8_linear(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    result: Tensor,
    arrivals: Tensor | None = None,
) -> Tensor:
    """:func:`reference.fp8_linear` of ``values [T, in_features]``, written to ``result [T, out_features]``.

    It takes any number of tokens, but reads the weights once for every tile of them. ``arrivals`` are zeros, int32, of
    :func:`num_arrivals`, and zeros again when it is done; without them they are made for the call.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    check_same("sizes", result=tuple(result.shape), product=(len(values), len(weight)))
    return _launch(values, scales, weight, weight_scales, result, arrivals, gated=False)


def fp8_gated_linear(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    result: Tensor,
    arrivals: Tensor | None = None,
) -> Tensor:
    """:func:`reference.fp8_gated_linear` by gate's and up's weights ``[2·I, in_features]``, likewise: ``[T, I]``.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    check_same("sizes", twice_result=(len(values), 2 * result.shape[1]), product=(len(values), len(weight)))
    return _launch(values, scales, weight, weight_scales, result, arrivals, gated=True)


def num_arrivals(num_rows: int, num_tokens: int = MOST_IN_A_TILE) -> int:
    """How many tiles of outputs there are for so many tokens, or fewer."""
    return int(triton.cdiv(num_rows, ROWS) * triton.cdiv(num_tokens, MOST_IN_A_TILE))


def _launch(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    result: Tensor,
    arrivals: Tensor | None,
    gated: bool,
) -> Tensor:
    (T, in_features), num_rows = values.shape, len(weight)
    check_last_axis(values=values, scales=scales, weight=weight, weight_scales=weight_scales, result=result)
    check_same("row lengths", values=in_features, weight=weight.shape[1])
    check_same("sizes", scales=tuple(scales.shape), tokens=(T,))
    check_same("sizes", weight_scales=tuple(weight_scales.shape), rows=(num_rows,))
    if not T or not num_rows:
        return result
    one = cut(T, num_rows, in_features)
    grid = (triton.cdiv(T, one.tokens), triton.cdiv(num_rows, one.rows), one.splits)
    parts, arrivals = room_for_parts(scales, grid, one.rows * one.tokens, arrivals)
    with device_of(values):
        fp8_linear_kernel[grid](
            *(values, scales, weight, weight_scales, result, parts, arrivals),
            *(values.stride(0), weight.stride(0), result.stride(0), T, result.shape[1], in_features),
            GATED=gated,
            **compiled_in(one),
            num_warps=one.num_warps,
            num_stages=one.num_stages,
            **overlapping(values),
        )
    return result


def compiled_in(one: Cut) -> dict[str, int]:
    """The kernel's constants."""
    return {"TOKENS": one.tokens, "ROWS": one.rows, "COLUMNS": one.columns, "SPLITS": one.splits}
