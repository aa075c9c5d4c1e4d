"""The mathematics of products with 4-bit weights, in plain torch, and the order in which they lie in memory.

An output's row of weights is cut into chunks of four groups. Word c of a chunk holds inputs 2c and 2c + 1 of each group::

    bits of word c    31     28     24     20     16     12      8      4      0
                      ┌──────┬──────┬──────┬──────┬──────┬──────┬──────┬──────┐
    of a group        │      input 2c + 1         │          input 2c         │
    group             │  3   │  2   │  1   │  0   │  3   │  2   │  1   │  0   │
                      └──────┴──────┴──────┴──────┴──────┴──────┴──────┴──────┘

So a shift by 4 bits a group and the mask ``0x000F000F`` leave two neighbours of one group in the halves of a register, as
tensor cores want 16-bit operands (AWQ's own interleave, along the inputs instead of the outputs). Rows come in tiles of 32,
and of a tile's chunk each 16 words, 32 inputs of a group, lie together for all of its rows::

    words [tiles, chunks, group / 32, 32 rows, 16 words]
    16 words of a row   0  4  8 12 │ 1  5  9 13 │ 2  6 10 14 │ 3  7 11 15
    thread of four      0          │ 1          │ 2          │ 3

Each warp multiplies 16 rows: 8 of one half of a tile and 8 of another. Its 32 threads read 8 rows at once, 16 bytes each and
512 side by side, and what a thread has read are two pairs, 8 inputs apart, of two steps of 16 inputs: its own part of the
operand, so nothing is exchanged. Rows that no matrix has are zeros, and so are scales of groups that fill up the last chunk.

Scales lie by chunks, the four float16 of an output's chunk in one piece of 8 bytes. The zero points of an output's chunk
share an int16, the first group's in its lowest bits. All in all a weight of a group of 128 takes 4 + (16 + 4) / 128 bits.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from jaxtyping import Float, Int16, Int32, UInt8
from torch import Tensor

GROUPS_IN_A_CHUNK = 4
ROWS_IN_A_TILE = 32
WORDS_IN_A_PIECE = 16
Words: TypeAlias = Int32[Tensor, "tiles chunks pieces rows sixteen"]
TENSOR_CORES_FROM = 80
"""The compute capability from which Triton has products on tensor cores."""


def most_tokens(capability: int) -> int:
    """Up to how many tokens the kernel multiplies by 4-bit weights; beyond, they are written out and a library multiplies.

    To write out and read again moves 0.5 + 2 + 2 bytes a weight. The kernel reads 0.5 for every 32 tokens, but multiplies at
    a part r of a library's rate, since sums by groups keep tensor cores waiting. By the 4.3 TB/s and 660 TFLOP/s of an H200
    both are even where 4 / 4.3e12 = (1/r - 1) · 2 T / 660e12: at 300 tokens if r is a half, at 150 if it is a third. The
    power of two below is taken. Without tensor cores the library's are worth the bytes sooner.
    """
    return 128 if capability >= TENSOR_CORES_FROM else 8


def padded_groups(in_features: int, group_size: int) -> int:
    """Groups of a row, filled up to whole chunks."""
    each = GROUPS_IN_A_CHUNK * group_size
    return -(-in_features // each) * GROUPS_IN_A_CHUNK


def words_shape(out_features: int, in_features: int, group_size: int) -> tuple[int, ...]:
    """``[tiles, chunks, pieces, 32, 16]``."""
    chunks = padded_groups(in_features, group_size) // GROUPS_IN_A_CHUNK
    pieces = group_size // 2 // WORDS_IN_A_PIECE
    return -(-out_features // ROWS_IN_A_TILE), chunks, pieces, ROWS_IN_A_TILE, WORDS_IN_A_PIECE


def weight_bytes(out_features: int, in_features: int, group_size: int) -> int:
    """What a matrix takes: half a byte a weight, a float16 and half a byte for each group of an output."""
    chunks = padded_groups(in_features, group_size) // GROUPS_IN_A_CHUNK
    words = math.prod(words_shape(out_features, in_features, group_size))
    return 4 * words + chunks * out_features * 2 * (GROUPS_IN_A_CHUNK + 1)


def pack_words(values: UInt8[Tensor, "out in"], group_size: int) -> Words:
    """Numbers from 0 to 15 in words, as described above; ``group_size`` is a multiple of 32 that divides the inputs."""
    shape = words_shape(len(values), values.shape[1], group_size)
    words = torch.zeros(shape, dtype=torch.int32, device=values.device)
    put_rows(words, 0, row_words(values, group_size))
    return words


def row_words(values: UInt8[Tensor, "R in"], group_size: int) -> Int32[Tensor, "R chunks pieces sixteen"]:
    """The words of some rows."""
    missing = padded_groups(values.shape[1], group_size) * group_size - values.shape[1]
    chunks = torch.nn.functional.pad(values, (0, missing)).unflatten(1, (-1, GROUPS_IN_A_CHUNK, group_size // 2, 2))
    words = torch.zeros(chunks.shape[0], chunks.shape[1], group_size // 2, dtype=torch.int32, device=values.device)
    for group in range(GROUPS_IN_A_CHUNK):
        for half in range(2):
            words |= chunks[:, :, group, :, half].to(torch.int32) << (4 * (group + GROUPS_IN_A_CHUNK * half))
    by_threads = words.unflatten(2, (-1, 4, 4)).transpose(3, 4)  # of pairs and threads: threads first
    joined: Tensor = by_threads.flatten(3)
    return joined


def put_rows(words: Words, first: int, rows: Int32[Tensor, "R chunks pieces sixteen"]) -> None:
    """Put rows from ``first`` on where they belong."""
    row = torch.arange(first, first + len(rows), device=words.device)
    words[row // ROWS_IN_A_TILE, :, :, row % ROWS_IN_A_TILE] = rows


def unpack_words(words: Words, group_size: int, out_features: int, in_features: int) -> UInt8[Tensor, "out in"]:
    """The numbers that :func:`pack_words` packed."""
    rows = words.permute(0, 3, 1, 2, 4).flatten(0, 1)[:out_features]
    ordered = rows.unflatten(3, (4, 4)).transpose(3, 4).flatten(2)
    chunks = ordered.new_empty(*ordered.shape[:2], GROUPS_IN_A_CHUNK, group_size // 2, 2, dtype=torch.uint8)
    for group in range(GROUPS_IN_A_CHUNK):
        for half in range(2):
            chunks[:, :, group, :, half] = ordered >> (4 * (group + GROUPS_IN_A_CHUNK * half)) & 15
    values: Tensor = chunks.flatten(1)
    return values[:, :in_features].contiguous()


def pack_scales(scales: Float[Tensor, "groups out"]) -> Float[Tensor, "chunks out 4"]:
    """Those of an output's chunk side by side; the groups are whole chunks."""
    by_chunks: Tensor = scales.unflatten(0, (-1, GROUPS_IN_A_CHUNK))
    return by_chunks.transpose(1, 2).contiguous()


def unpack_scales(packed: Float[Tensor, "chunks out 4"]) -> Float[Tensor, "groups out"]:
    """The scales that :func:`pack_scales` packed."""
    by_groups: Tensor = packed.transpose(1, 2).flatten(0, 1)
    return by_groups


def pack_zeros(zeros: UInt8[Tensor, "groups out"]) -> Int16[Tensor, "chunks out"]:
    """Numbers from 0 to 15, four groups in an int16; the groups are whole chunks."""
    packed = torch.zeros(len(zeros) // GROUPS_IN_A_CHUNK, zeros.shape[1], dtype=torch.int32, device=zeros.device)
    for group in range(GROUPS_IN_A_CHUNK):
        packed |= zeros[group::GROUPS_IN_A_CHUNK].to(torch.int32) << (4 * group)
    return packed.to(torch.int16)  # modulo 2**16


def unpack_zeros(packed: Int16[Tensor, "chunks out"]) -> UInt8[Tensor, "groups out"]:
    """The numbers that :func:`pack_zeros` packed."""
    numbers = torch.stack([packed >> (4 * group) & 15 for group in range(GROUPS_IN_A_CHUNK)], dim=1)
    return numbers.flatten(0, 1).to(torch.uint8)


def dequantise(
    words: Words,
    scales: Float[Tensor, "chunks out 4"],
    zeros: Int16[Tensor, "chunks out"],
    group_size: int,
    in_features: int,
) -> Float[Tensor, "out in"]:
    """``(value − zero) · scale`` of each weight, in at least float32. ``scales`` and ``zeros`` have padded groups too."""
    wide = unpack_scales(scales.to(torch.promote_types(scales.dtype, torch.float32)))
    values = unpack_words(words, group_size, scales.shape[1], in_features).unflatten(
        1, (-1, group_size)
    )  # [out, groups, group_size]
    groups = values.shape[1]
    whole: Tensor = values.to(wide.dtype) - unpack_zeros(zeros)[:groups].T.to(wide.dtype).unsqueeze(-1)
    return (whole * wide[:groups].T.unsqueeze(-1)).flatten(1)


def awq_linear(
    x: Float[Tensor, "T in"],
    words: Words,
    scales: Float[Tensor, "chunks out 4"],
    zeros: Int16[Tensor, "chunks out"],
    group_size: int,
) -> Float[Tensor, "T out"]:
    """``x Wᵀ`` by the weights as they are, added up in float64 and rounded once."""
    weight = dequantise(words, scales.double(), zeros, group_size, x.shape[1])
    return (x.double() @ weight.T).to(x.dtype)
