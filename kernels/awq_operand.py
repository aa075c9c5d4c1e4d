"""Words of 4-bit weights as operands of tensor cores: whole numbers, without a conversion and without an exchange.

What a weight costs beside its half byte is integer work: a processor has four or five instructions for each weight that the
memory brings. No number is converted: a nibble that is set into the bits of 128 in bfloat16 (1,024 in float16) makes 128 +
value, and one subtraction of 128 + zero, of two weights at once, leaves the whole number (Kim et al. 2022, "Who Says
Elephants Can't Run")::

    nibbles of a pair   w >> 4g & 0x000F000F │ 0x43004300     ─►  (128 + v₁, 128 + v₀) − (128 + z, 128 + z)

How words lie in memory is told in :mod:`refimpl.kernels.awq_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from refimpl.kernels.attention_tiles import operand

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


def operand_of(dtype: torch.dtype) -> tl.dtype:
    """What the operands of the products are held in: x's dtype, and float32 in Triton's interpreter, which has no PTX."""
    return tl.float32 if triton.knobs.runtime.interpret else operand(dtype)


@triton.jit
def load_chunk(words: tl.tensor, row: tl.tensor, chunk: tl.tensor, chunks: tl.tensor, WORDS: tl.constexpr) -> tl.tensor:
    """A chunk's words of some rows ``[ROWS]``, in order: ``[ROWS, WORDS]``."""
    ROWS: tl.constexpr = row.shape[0]
    word = tl.arange(0, WORDS)
    first = (row // 32).to(tl.int64) * chunks * (32 * WORDS) + row % 32 * 16
    place = first[:, None] + chunk * (32 * WORDS) + (word // 16 * 512 + word % 16)[None, :]
    by_threads = tl.reshape(tl.load(words + place, eviction_policy="evict_first"), (ROWS, WORDS // 16, 4, 2, 2))
    return tl.reshape(tl.permute(by_threads, (0, 1, 3, 2, 4)), (ROWS, WORDS))


@triton.jit
def operand_of_words(flat: tl.tensor, WORDS: tl.constexpr, IN_PAIRS: tl.constexpr) -> tl.tensor:
    """A chunk of two tiles as it was read, piece by piece, ``[64 · WORDS]``, as tensor cores want it: ``[64, WORDS]``.

    Only the names of the axes change: what a thread has read stays with it. Warp w has rows 8w … 8w + 7 of both tiles.
    """
    if IN_PAIRS:
        named = tl.reshape(flat, (WORDS // 16, 2, 4, 8, 4, 4))
        return tl.reshape(tl.permute(named, (2, 1, 3, 0, 5, 4)), (64, WORDS))
    paired = tl.reshape(flat, (WORDS // 16, 2, 4, 8, 4, 2, 2))
    return tl.reshape(tl.permute(paired, (2, 1, 3, 0, 5, 4, 6)), (64, WORDS))


@triton.jit
def inputs_in_order(GROUP: tl.constexpr, IN_PAIRS: tl.constexpr) -> tl.tensor:
    """Which input of a group stands where in the operand: ``[GROUP]``."""
    place = tl.arange(0, GROUP)
    if IN_PAIRS:  # 2t, 2t + 1, 2t + 8, 2t + 9 of 16 are a thread's four neighbours
        return place // 16 * 16 + place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2
    return place


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


@triton.jit
def scale_of(scales: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """One of four float16 in an int64."""
    return (scales >> (16 * GROUP)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
