"""Words of 4-bit weights as operands of tensor cores: whole numbers, without a conversion and without an exchange.

What a weight costs beside its half byte is integer work: a processor has four or five instructions for each weight that the
memory brings. No number is converted: a nibble that is set into the bits of 128 in bfloat16 (1,024 in float16) makes 128 +
value, and one subtraction of 128 + zero, of two weights at once, leaves the whole number (Kim et al. 2022, "Who Says
Elephants Can't Run")::

    nibbles of a pair   w >> 4g & 0x000F000F │ 0x43004300     ─►  (128 + v₁, 128 + v₀) − (128 + z, 128 + z)

Kernels read a word as its two halves, int16, each the nibbles of one input in four groups: so an element of what is read is
an element of the operand, and Triton hands both to PTX in one register. (Numbers joined of two tensors make it choose
another order of inputs for ``mma`` than for ``wgmma``.) How words lie in memory is told in
:mod:`refimpl.kernels.awq_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from refimpl.kernels.attention_tiles import operand


# Two weights at once: a group's nibbles, 4 · group bits above 0 and 16, into the bits of 128 (1,024), less 128 (1,024) +
# zero, twice. Said in PTX, since LLVM takes each register apart into its halves, and puts it together again.
@triton.constexpr_function
def in_bfloat16(number: int) -> str:
    """PTX for ``value − zero`` of two weights of a group; ``$2`` is 128 + zero, twice."""
    return f"""{{
.reg .b32 pair, less;
mov.b32 less, 0xBF80BF80;
shr.u32 pair, $1, {4 * number};
lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $2, less, pair;
}}"""


@triton.constexpr_function
def in_float16(number: int) -> str:
    """The same in float16; ``$2`` is 1,024 + zero, twice."""
    return f"""{{
.reg .b32 pair;
shr.u32 pair, $1, {4 * number};
lop3.b32 pair, pair, 0x000F000F, 0x64006400, 0xEA;
sub.rn.f16x2 $0, pair, $2;
}}"""


def operand_of(dtype: torch.dtype) -> tl.dtype:
    """What the operands of the products are held in: x's dtype, and float32 in Triton's interpreter, which has no PTX."""
    return tl.float32 if triton.knobs.runtime.interpret else operand(dtype)


@triton.jit
def load_chunk(halves: tl.tensor, row: tl.tensor, chunk: tl.tensor, chunks: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """A chunk's halves of words of some rows ``[ROWS]``, in the order of inputs: ``[ROWS, GROUP]``."""
    ROWS: tl.constexpr = row.shape[0]
    half = tl.arange(0, GROUP)
    first = (row // 32).to(tl.int64) * chunks * (32 * GROUP) + row % 32 * 32
    place = first[:, None] + chunk * (32 * GROUP) + (half // 32 * 1024 + half % 32)[None, :]
    by_threads = tl.reshape(tl.load(halves + place, eviction_policy="evict_first"), (ROWS, GROUP // 32, 4, 4, 2))
    return tl.reshape(tl.permute(by_threads, (0, 1, 3, 2, 4)), (ROWS, GROUP))


@triton.jit
def operand_of_words(flat: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """A chunk of two tiles as it was read, piece by piece, ``[64 · GROUP]``, as tensor cores want it: ``[64, GROUP]``.

    Only the names of the axes change: what a thread has read stays with it. Warp w has rows 8w … 8w + 7 of both tiles.
    """
    named = tl.reshape(flat, (GROUP // 32, 2, 4, 8, 4, 4, 2))  # piece, tile, warp, row, thread, word, half
    return tl.reshape(tl.permute(named, (2, 1, 3, 0, 5, 4, 6)), (64, GROUP))


@triton.jit
def whole_numbers(halves: tl.tensor, zeros: tl.tensor, NUMBER: tl.constexpr, OPERAND: tl.constexpr) -> tl.tensor:
    """``value − zero`` of the weights of group NUMBER (0 to 3) of a chunk: ``[ROWS, GROUP]``.

    ``zeros [ROWS]`` are the chunk's. Halves and zeros come straight from loads, and nothing that hangs on a row's or a
    column's number takes part: so the compiler can have them lie among the threads as tensor cores want them.
    """
    zero = (zeros >> (4 * NUMBER)) & 15
    if OPERAND == tl.bfloat16:  # noqa: SIM300 - a constexpr is no constant to Python
        less = (zero | 0x4300)[:, None]
        numbers = tl.inline_asm_elementwise(in_bfloat16(NUMBER), "=r,r,r", [halves, less], tl.bfloat16, True, 2)
    elif OPERAND == tl.float16:  # noqa: SIM300
        less = (zero | 0x6400)[:, None]
        numbers = tl.inline_asm_elementwise(in_float16(NUMBER), "=r,r,r", [halves, less], tl.float16, True, 2)
    else:
        numbers = ((halves >> (4 * NUMBER)) & 15).to(OPERAND) - zero.to(OPERAND)[:, None]
    return numbers


@triton.jit
def scale_of(scales: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """One of four float16 in an int64."""
    return (scales >> (16 * GROUP)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
