"""``y = x Wᵀ`` by weights of 4 bits for a few tokens: a quarter of the bytes of a decode step in 16 bits.

A weight is ``(value − zero) · scale``, its scale and zero point shared by a group of inputs; how they lie in memory is told
in :mod:`refimpl.kernels.awq_reference`. Within a group the scale leaves the sum::

    y[t, o] = Σ over groups of  scale[group, o] · Σ over the group of  x[t, i] · (value[o, i] − zero[group, o])

The inner sum is made by tensor cores, from whole numbers between -15 and 15, which 16 bits hold exactly; so nothing is
rounded but x, and the scale is one multiplication an output and group. What a weight costs beside its half byte is integer
work: a processor has four or five instructions for each weight that the memory brings. No number is converted: a nibble that
is set into the bits of 128 in bfloat16 (1,024 in float16) makes 128 + value, and one subtraction of 128 + zero, of two
weights at once, leaves the whole number (Kim et al. 2022, "Who Says Elephants Can't Run")::

    nibbles of a pair   w >> 4g & 0x000F000F │ 0x43004300     ─►  (128 + v₁, 128 + v₀) − (128 + z, 128 + z)

Matrices with few rows are cut along their inputs too, and SwiGLU's two matrices are taken at once:
:mod:`refimpl.kernels.few_tokens`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.errors import RefimplError
from refimpl.kernels.attention_tiles import operand, target_of
from refimpl.kernels.awq_reference import GROUPS_IN_A_CHUNK, TENSOR_CORES_FROM, most_tokens, padded_groups
from refimpl.kernels.few_tokens import all_parts, room_for_parts, rows_of, write_product
from refimpl.kernels.launch import check_last_axis, check_same, device_of, power_of_two
from refimpl.kernels.overlap import after_previous, overlapping

PROCESSORS = 132
"""Of an H200, for which the cuts are reckoned."""
LEAST_ROWS = 64
"""Of a weight in a tile, on any device."""
MOST_IN_A_TILE = 64
"""Tokens."""
GROUP_SIZES = (32, 64, 128)
# Two weights at once: a pair of nibbles at bits 0 and 16 into the bits of 128 (1,024), less 128 (1,024) + zero, twice. Said
# in PTX, since LLVM takes each register apart into its halves, and puts it together again: 4 instructions a weight, not 2.7.
IN_BFLOAT16 = tl.constexpr("""{
.reg .b32 pair, less;
mov.b32 less, 0xBF80BF80;
lop3.b32 pair, $1, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $2, less, pair;
}""")
IN_FLOAT16 = tl.constexpr("""{
.reg .b32 pair;
lop3.b32 pair, $1, 0x000F000F, 0x64006400, 0xEA;
sub.rn.f16x2 $0, pair, $2;
}""")


def serves(num_tokens: int, device: torch.device) -> bool:
    """Whether the kernel is expected to be no slower than a library's product (:func:`awq_reference.most_tokens`)."""
    return num_tokens <= most_tokens(target_of(device).capability)


class Cut(NamedTuple):
    """How a product is cut."""

    tokens: int
    """That a tile has room for."""
    rows: int
    """Of the weight in a tile."""
    num_stages: int
    """Tiles that are on their way."""
    splits: int
    """Programs that share a tile of outputs."""
    num_warps: int


def cut(num_tokens: int, num_rows: int, in_features: int, group_size: int, capability: int) -> Cut:
    """The cut for a number of tokens and a weight of ``num_rows`` rows; reckoned, and not measured yet.

    From 16 tokens on tiles are tall, so that what a program reads of x is half of what it reads of the weight. Programs are
    two or more for every processor, each of one chunk of four groups at least; and so many that they come in four waves
    where each keeps four chunks.
    """
    tokens = min(max(power_of_two(num_tokens), 8), MOST_IN_A_TILE)
    if capability < TENSOR_CORES_FROM:
        rows, num_warps, num_stages, at_once = LEAST_ROWS, 4, 2, 4
    elif tokens == 8:
        rows, num_warps, num_stages, at_once = LEAST_ROWS, 4, 3, 4
    else:
        rows, num_warps, num_stages, at_once = 128, 8, 3 if tokens == 16 else 2, 2
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(num_tokens, tokens)
    chunks, splits = padded_groups(in_features, group_size) // GROUPS_IN_A_CHUNK, 1
    while (programs * splits < 2 * PROCESSORS and chunks >= 2 * splits) or (
        2 * programs * splits <= 4 * at_once * PROCESSORS and chunks >= 8 * splits
    ):
        splits *= 2
    return Cut(tokens, rows, num_stages, splits, num_warps)


def operand_of(dtype: torch.dtype) -> tl.dtype:
    """What the operands of the products are held in: x's dtype, and float32 in Triton's interpreter, which has no PTX."""
    return tl.float32 if triton.knobs.runtime.interpret else operand(dtype)


@triton.jit
def load_chunk(rows: tl.tensor, chunk: tl.tensor, WORDS: tl.constexpr) -> tl.tensor:
    """A chunk's words of some rows, whose pointers are ``rows [ROWS]``, in order: ``[ROWS, WORDS]``."""
    ROWS: tl.constexpr = rows.shape[0]
    words = tl.load(rows[:, None] + chunk * WORDS + tl.arange(0, WORDS)[None, :], eviction_policy="evict_first")
    squares = tl.reshape(words, (ROWS, WORDS // 16, 4, 4))
    return tl.reshape(tl.permute(squares, (0, 1, 3, 2)), (ROWS, WORDS))


@triton.jit
def whole_numbers(words: tl.tensor, zeros: tl.tensor, GROUP: tl.constexpr, OPERAND: tl.constexpr) -> tl.tensor:
    """``value − zero`` of the weights of group GROUP (0 to 3) of a chunk: ``[ROWS, WORDS]`` to ``[ROWS, 2 · WORDS]``.

    ``zeros [ROWS]`` are the chunk's. Words and zeros come straight from loads, and nothing that hangs on a row's or a
    column's number takes part: so the compiler can have the words lie among the threads as tensor cores want them.
    """
    pairs, zero = words >> (4 * GROUP), (zeros >> (4 * GROUP)) & 15
    if OPERAND == tl.float32:  # noqa: SIM300 - a constexpr is no constant to Python
        first, second = (pairs & 15).to(OPERAND), ((pairs >> 16) & 15).to(OPERAND)
        less = zero.to(OPERAND)[:, None]
        first, second = first - less, second - less
    else:
        both = zero.to(tl.int32) * 0x00010001
        if OPERAND == tl.bfloat16:  # noqa: SIM300
            pairs = tl.inline_asm_elementwise(
                IN_BFLOAT16, "=r,r,r", [pairs, (both | 0x43004300)[:, None]], tl.int32, True, 1
            )
        else:
            pairs = tl.inline_asm_elementwise(IN_FLOAT16, "=r,r,r", [pairs, (both | 0x64006400)[:, None]], tl.int32, True, 1)
        first = (pairs & 0xFFFF).to(tl.int16).to(OPERAND, bitcast=True)
        second = (pairs >> 16).to(tl.int16).to(OPERAND, bitcast=True)
    return tl.reshape(tl.join(first, second), (words.shape[0], 2 * words.shape[1]))


@triton.jit(do_not_specialize=["num_tokens"])  # one compilation for any number that a tile has room for
def awq_linear_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    result: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    x_stride: tl.tensor,
    words_stride: tl.tensor,
    scales_stride: tl.tensor,
    zeros_stride: tl.tensor,
    result_stride: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    OPERAND: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tokens ``program_id(0) · TOKENS …`` times rows ``program_id(1) · ROWS …``, part ``program_id(2)`` of the chunks."""
    row, _ = rows_of(out_features, GATED, ROWS)
    rows = words + row.to(tl.int64) * words_stride
    chunks = tl.cdiv(in_features, 4 * GROUP)
    each = tl.cdiv(chunks, SPLITS)
    first = tl.program_id(2) * each
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    numbers = x + token.to(tl.int64) * x_stride
    after_previous(OVERLAP)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for chunk in range(first, tl.minimum(first + each, chunks)):
        tile = load_chunk(rows, chunk, GROUP // 2)
        zero = tl.load(zeros + chunk * zeros_stride + row)
        for group in tl.static_range(4):
            number_of_group = 4 * chunk + group
            scale = tl.load(scales + number_of_group * scales_stride + row).to(tl.float32)
            column = number_of_group * GROUP + tl.arange(0, GROUP)
            mask = there[None, :] & (column < in_features)[:, None]
            number = tl.load(numbers[None, :] + column[:, None], mask=mask, other=0.0).to(OPERAND)  # [GROUP, TOKENS]
            weight = whole_numbers(tile, zero, group, OPERAND)
            sums += scale[:, None] * tl.dot(weight, number, input_precision="ieee")
    last = True
    if SPLITS > 1:
        sums, last = all_parts(sums, parts, arrivals, SPLITS)
    if last:
        write_product(sums, result, result_stride, token, there, out_features, GATED)


def awq_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    result: Tensor,
    arrivals: Tensor | None = None,
) -> Tensor:
    """:func:`awq_reference.awq_linear` of ``x [T, in]``, written to ``result [T, out]``.

    It takes any number of tokens, but reads the weights once for every tile of them. ``arrivals`` are zeros, int32, of
    :func:`num_arrivals`, and zeros again when it is done; without them they are made for the call.

    Raises:
        RefimplError: x is not in 16 bits, elements of a row lie apart, sizes differ, or groups are not of 32, 64 or 128.

    """
    check_same("sizes", result=tuple(result.shape), product=(len(x), len(words)))
    return _launch(x, words, scales, zeros, group_size, result, arrivals, gated=False)


def awq_gated_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    result: Tensor,
    arrivals: Tensor | None = None,
) -> Tensor:
    """:func:`awq_reference.awq_gated_linear` by gate's and up's weights, one above the other, likewise: ``[T, I]``.

    Raises:
        RefimplError: x is not in 16 bits, elements of a row lie apart, sizes differ, or groups are not of 32, 64 or 128.

    """
    check_same("sizes", twice_result=(len(x), 2 * result.shape[1]), product=(len(x), len(words)))
    return _launch(x, words, scales, zeros, group_size, result, arrivals, gated=True)


def num_arrivals(num_rows: int, num_tokens: int = MOST_IN_A_TILE) -> int:
    """How many tiles of outputs there are for so many tokens, or fewer."""
    return int(triton.cdiv(num_rows, LEAST_ROWS) * triton.cdiv(num_tokens, MOST_IN_A_TILE))


def check_weights(words: Tensor, scales: Tensor, zeros: Tensor, group_size: int, in_features: int) -> None:
    """See that the tensors of a weight fit each other.

    Raises:
        RefimplError: they do not, or the kernels have no such groups.

    """
    if group_size not in GROUP_SIZES:
        raise RefimplError(
            f"groups are of {group_size} inputs; the kernels have those of {', '.join(map(str, GROUP_SIZES))}"
        )
    groups = padded_groups(in_features, group_size)
    check_last_axis(words=words, scales=scales, zeros=zeros)
    check_same("sizes", words=tuple(words.shape), rows=(len(words), groups * group_size // 8))
    check_same("sizes", scales=tuple(scales.shape), groups=(groups, len(words)))
    check_same("sizes", zeros=tuple(zeros.shape), chunks=(groups // GROUPS_IN_A_CHUNK, len(words)))


def _launch(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    result: Tensor,
    arrivals: Tensor | None,
    gated: bool,
) -> Tensor:
    (T, in_features), num_rows = x.shape, len(words)
    if x.element_size() != 2:
        raise RefimplError(f"x is {x.dtype}; the kernel takes 16 bits: write the weights out by awq_dequantise for others")
    check_last_axis(x=x, result=result)
    check_weights(words, scales, zeros, group_size, in_features)
    if not T or not num_rows:
        return result
    one = cut(T, num_rows, in_features, group_size, target_of(x.device).capability)
    grid = (triton.cdiv(T, one.tokens), triton.cdiv(num_rows, one.rows), one.splits)
    parts, arrivals = room_for_parts(scales, grid, one.rows * one.tokens, arrivals)
    strides = (x.stride(0), words.stride(0), scales.stride(0), zeros.stride(0), result.stride(0))
    with device_of(x):
        awq_linear_kernel[grid](
            *(x, words, scales, zeros, result, parts, arrivals),
            *(*strides, T, result.shape[1], in_features),
            GATED=gated,
            **compiled_in(one, group_size),
            OPERAND=operand_of(x.dtype),
            num_warps=one.num_warps,
            num_stages=one.num_stages,
            **overlapping(x),
        )
    return result


def compiled_in(one: Cut, group_size: int) -> dict[str, int]:
    """The kernel's constants."""
    return {"TOKENS": one.tokens, "ROWS": one.rows, "GROUP": group_size, "SPLITS": one.splits}
