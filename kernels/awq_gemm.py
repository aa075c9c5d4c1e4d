"""``y = x Wᵀ`` by weights of 4 bits for a few tokens: a quarter of the bytes of a decode step in 16 bits.

A weight is ``(value − zero) · scale``, its scale and zero point shared by a group of inputs; how they lie in memory is told
in :mod:`refimpl.kernels.awq_reference`. Within a group the scale leaves the sum::

    y[t, o] = Σ over groups of  scale[group, o] · Σ over the group of  x[t, i] · (value[o, i] − zero[group, o])

The inner sum is made by tensor cores, from whole numbers between -15 and 15, which 16 bits hold exactly; so nothing is
rounded but x, and the scale is one multiplication an output and group. How words become such numbers is told in
:mod:`refimpl.kernels.awq_operand`.

Words, scales and zero points of a chunk are asked for one chunk ahead, into registers, and those of the first before the
launch waits for the one before it; what is used in the turn that loads it queues behind all words on their way.

Up to 8 tokens are multiplied with a warp for each 16 rows (``mma``), more by all four warps (``wgmma``, sm_90), of which
each reads its rows alone and x but once; Triton 3.9 has ``wgmma`` for all. The operand lies among threads alike in both.

Matrices with few rows are cut along their inputs too: :mod:`refimpl.kernels.few_tokens`. SwiGLU is a launch of its own:
gate's and up's rows in one program lie far apart, which takes registers that the loop needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.errors import RefimplError
from refimpl.kernels.attention_tiles import target_of
from refimpl.kernels.awq_operand import operand_of, operand_of_words, scale_of, whole_numbers
from refimpl.kernels.awq_reference import GROUPS_IN_A_CHUNK, TENSOR_CORES_FROM, most_tokens, padded_groups, words_shape
from refimpl.kernels.few_tokens import all_parts, room_for_parts, write_product
from refimpl.kernels.launch import check_last_axis, check_same, device_of, power_of_two
from refimpl.kernels.overlap import after_previous, overlapping

PROCESSORS = 132
"""Of an H200, for which the cuts are reckoned."""
ROWS = 64
"""Of a weight in a program: two tiles of 32."""
NUM_WARPS = 4
MOST_IN_A_TILE = 32
"""Tokens, from sm_90 on."""
MOST_BEFORE = 16
"""Tokens in a tile of an older device, where registers are short."""
WITH_ARRIVALS = 128
"""Tokens for whose tiles a weight keeps zeros to count arrivals by."""
REGISTERS = {8: 128, 16: 168}
"""A thread's, by a tile's tokens, on sm_90 with Triton 3.6: so that a processor holds four programs, or three."""
MOST_SPLITS = 16
FEW_BY_MMA = tuple(int(number) for number in triton.__version__.split(".")[:2]) <= (3, 6)
"""Whether this Triton multiplies by 8 tokens with ``mma``; seen of 3.6, and not of 3.9, where registers are short then."""
GROUP_SIZES = (32, 64, 128)


def serves(num_tokens: int, device: torch.device) -> bool:
    """Whether the kernel is expected to be no slower than a library's product (:func:`awq_reference.most_tokens`)."""
    return num_tokens <= most_tokens(target_of(device).capability)


class Cut(NamedTuple):
    """How a product is cut."""

    tokens: int
    """That a tile has room for."""
    num_stages: int
    """Tiles of x that are on their way."""
    splits: int
    """Programs that share a tile of outputs."""
    registers: int | None
    """A thread has at most."""


def cut(num_tokens: int, num_rows: int, in_features: int, group_size: int, capability: int) -> Cut:
    """The cut for a number of tokens and a weight of ``num_rows`` rows.

    Programs come in waves of as many as the processors hold. A program takes as long as its chunks and 1.5 more, to start; a
    last wave 0.4 of that, and the rest by how full it is. (Of 2 to 5 splits of each of Llama-3-70B's matrices, measured at
    1, 8 and 16 tokens, it chooses the fastest, or one within 3% of it. Beyond, other splits than its own were measured.)
    """
    tokens = min(max(power_of_two(num_tokens), 8), MOST_IN_A_TILE if capability >= 90 else MOST_BEFORE)
    registers = REGISTERS.get(tokens) if capability >= 90 and FEW_BY_MMA else None
    at_once = PROCESSORS * (65536 // (32 * NUM_WARPS * (registers or 255)))
    programs = triton.cdiv(num_rows, ROWS) * triton.cdiv(num_tokens, tokens)
    chunks = int(padded_groups(in_features, group_size)) // GROUPS_IN_A_CHUNK

    def time(splits: int) -> tuple[float, int]:
        full, rest = divmod(programs * splits, at_once)
        waves = full + (0.4 + 0.6 * rest / at_once if rest else 0)
        return round(waves * (triton.cdiv(chunks, splits) + 1.5), 1), splits

    splits = min(range(1, min(chunks, MOST_SPLITS) + 1), key=time)
    stages = 3 if capability >= TENSOR_CORES_FROM else 2
    return Cut(tokens, stages, splits, registers)


@triton.jit
def words_of_program(num_rows: tl.tensor, chunks: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Where the halves of words of a program's rows are, in its first chunk, piece by piece: ``[64 · GROUP]``."""
    half = tl.arange(0, 64 * GROUP)
    row = tl.program_id(1) * 64 + half // 1024 % 2 * 32 + half // 32 % 32
    tile = tl.minimum(row // 32, (num_rows - 1) // 32)
    return tile.to(tl.int64) * (chunks * 32 * GROUP) + half // 2048 * 1024 + row % 32 * 32 + half % 32


@triton.jit
def rows_of_operand(num_rows: tl.tensor) -> tl.tensor:
    """Which row of the weight each of the operand's 64 is; of those that do not exist, row 0."""
    place = tl.arange(0, 64)
    row = tl.program_id(1) * 64 + place // 8 % 2 * 32 + place // 16 * 8 + place % 8
    return tl.where(row < num_rows, row, 0)


@triton.jit
def in_order(sums: tl.tensor) -> tl.tensor:
    """The operand's rows in the order of the weight's."""
    TOKENS: tl.constexpr = sums.shape[1]
    named = tl.reshape(sums, (4, 2, 8, TOKENS))  # warp, tile, row
    return tl.reshape(tl.permute(named, (1, 0, 2, 3)), (64, TOKENS))


@triton.jit
def load_x(
    rows: tl.tensor, there: tl.tensor, column: tl.tensor, in_features: tl.tensor, WHOLE: tl.constexpr, OPERAND: tl.constexpr
) -> tl.tensor:
    """Some inputs of some tokens: ``[GROUP, TOKENS]``. WHOLE: chunks are whole, so no column is too far."""
    mask = there[None, :]
    if not WHOLE:
        mask = mask & (column < in_features)[:, None]
    return tl.load(rows[None, :] + column[:, None], mask=mask, other=0.0).to(OPERAND)


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
    result_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    in_features: tl.tensor,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    OPERAND: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tokens ``program_id(0) · TOKENS …`` times 64 rows, part ``program_id(2)`` of the chunks; ``scales`` four in one."""
    row = rows_of_operand(num_rows)
    chunks = tl.cdiv(in_features, 4 * GROUP)
    each = tl.cdiv(chunks, SPLITS)
    first = tl.program_id(2) * each
    end = tl.minimum(first + each, chunks)
    start = tl.minimum(first, chunks - 1)  # of a part without a chunk: another's, unused
    place = words + words_of_program(num_rows, chunks, GROUP)
    scale = tl.load(scales + start * num_rows + row)
    zero = tl.load(zeros + start * num_rows + row)
    flat = tl.load(place + start * (32 * GROUP), eviction_policy="evict_first")
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    after_previous(OVERLAP)
    sums = tl.zeros([64, TOKENS], tl.float32)
    for chunk in range(first, end):
        later = tl.minimum(chunk + 1, end - 1)
        next_scale = tl.load(scales + later * num_rows + row)
        next_zero = tl.load(zeros + later * num_rows + row)
        held = operand_of_words(flat, GROUP)
        flat = tl.load(place + later * (32 * GROUP), eviction_policy="evict_first")
        for group in tl.static_range(4):
            column = (4 * chunk + group) * GROUP + tl.arange(0, GROUP)
            weight = whole_numbers(held, zero, group, OPERAND)
            factor = scale_of(scale, group)[:, None]
            rows = x + token.to(tl.int64) * x_stride
            some = load_x(rows, token < num_tokens, column, in_features, WHOLE, OPERAND)
            sums += factor * tl.dot(weight, some, input_precision="ieee")
        scale, zero = next_scale, next_zero
    product, last = in_order(sums), True
    if SPLITS > 1:
        product, last = all_parts(product, parts, arrivals, SPLITS)
    if last:
        write_product(product, result, result_stride, token, token < num_tokens, num_rows, False)


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
    (T, in_features), num_rows = x.shape, scales.shape[1]
    if x.element_size() != 2:
        raise RefimplError(f"x is {x.dtype}; the kernel takes 16 bits: write the weights out by awq_dequantise for others")
    check_same("sizes", result=tuple(result.shape), product=(T, num_rows))
    check_last_axis(x=x, result=result)
    check_weights(words, scales, zeros, group_size, in_features)
    if not T or not num_rows:
        return result
    one = cut(T, num_rows, in_features, group_size, target_of(x.device).capability)
    grid = (triton.cdiv(T, one.tokens), triton.cdiv(num_rows, ROWS), one.splits)
    parts, arrivals = room_for_parts(scales, grid, ROWS * one.tokens, arrivals)
    with device_of(x):
        awq_linear_kernel[grid](
            *(x, words.view(torch.int16), scales.view(torch.int64), zeros, result, parts, arrivals),
            *(x.stride(0), result.stride(0), T, num_rows, in_features),
            **compiled_in(one, in_features, group_size),
            OPERAND=operand_of(x.dtype),
            num_warps=NUM_WARPS,
            num_stages=one.num_stages,
            maxnreg=one.registers,
            **overlapping(x),
        )
    return result


def num_arrivals(num_rows: int, num_tokens: int = WITH_ARRIVALS) -> int:
    """How many tiles of outputs there are for so many tokens, or fewer."""
    return int(triton.cdiv(num_rows, ROWS) * triton.cdiv(num_tokens, MOST_BEFORE))


def check_weights(words: Tensor, scales: Tensor, zeros: Tensor, group_size: int, in_features: int) -> None:
    """See that the tensors of a weight fit each other.

    Raises:
        RefimplError: they do not, or the kernels have no such groups.

    """
    if group_size not in GROUP_SIZES:
        raise RefimplError(
            f"groups are of {group_size} inputs; the kernels have those of {', '.join(map(str, GROUP_SIZES))}"
        )
    out_features, chunks = scales.shape[1], padded_groups(in_features, group_size) // GROUPS_IN_A_CHUNK
    check_same("sizes", words=tuple(words.shape), tiles=words_shape(out_features, in_features, group_size))
    check_same("sizes", scales=tuple(scales.shape), groups=(chunks, out_features, GROUPS_IN_A_CHUNK))
    check_same("sizes", zeros=tuple(zeros.shape), chunks=(chunks, out_features))
    for name, tensor in (("words", words), ("scales", scales), ("zeros", zeros)):
        if not tensor.is_contiguous():
            raise RefimplError(f"{name} are not in one piece: call .contiguous()")


def compiled_in(one: Cut, in_features: int, group_size: int) -> dict[str, int]:
    """The kernel's constants."""
    return {
        "TOKENS": one.tokens,
        "GROUP": group_size,
        "SPLITS": one.splits,
        "WHOLE": in_features % (GROUPS_IN_A_CHUNK * group_size) == 0,
    }
