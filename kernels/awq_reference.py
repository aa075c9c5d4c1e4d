"""The mathematics of products with 4-bit weights, in plain torch, and the order in which they lie in memory.

An output's row of weights is cut into chunks of four groups. Word c of a chunk holds inputs 2c and 2c + 1 of each group, and
the words of a chunk lie in squares of 4 × 4, transposed::

    bits of word c    31     28     24     20     16     12      8      4      0
                      ┌──────┬──────┬──────┬──────┬──────┬──────┬──────┬──────┐
    of a group        │      input 2c + 1         │          input 2c         │
    group             │  3   │  2   │  1   │  0   │  3   │  2   │  1   │  0   │
                      └──────┴──────┴──────┴──────┴──────┴──────┴──────┴──────┘
    memory            word 0 4 8 12 │ 1 5 9 13 │ 2 6 10 14 │ 3 7 11 15 │ 16 20 …

So a shift by 4 bits a group and the mask ``0x000F000F`` leave two neighbours of one group in the halves of a register, as
tensor cores want 16-bit operands (AWQ's own interleave, along the inputs instead of the outputs). A thread of theirs needs
words t, t + 4, t + 8 and t + 12 of 16: here these are neighbours, and one load of 16 bytes. A row whose groups are no
multiple of 4 is filled up with groups whose scales are 0.

Scales lie by groups, those of all outputs side by side. The zero points of an output's chunk share an int16, the first
group's in its lowest bits. All in all a weight of a group of 128 takes 4 + (16 + 4) / 128 bits.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int16, Int32, UInt8
from torch import Tensor

GROUPS_IN_A_CHUNK = 4
SQUARE = 4
TENSOR_CORES_FROM = 80
"""The compute capability from which Triton has products on tensor cores."""


def most_tokens(capability: int) -> int:
    """Up to how many tokens the kernel multiplies by 4-bit weights; beyond, they are written out and a library multiplies.

    To write out and read again moves 0.5 + 2 + 2 bytes a weight. The kernel reads 0.5 for every 64 tokens, but multiplies at
    a part r of a library's rate, since sums by groups keep tensor cores waiting. By the 4.3 TB/s and 660 TFLOP/s of an H200
    both are even where 4 / 4.3e12 = (1/r - 1) · 2 T / 660e12: at 300 tokens if r is a half, at 150 if it is a third. The
    power of two below is taken. Without tensor cores the library's are worth the bytes sooner.
    """
    return 128 if capability >= TENSOR_CORES_FROM else 8


def padded_groups(in_features: int, group_size: int) -> int:
    """Groups of a row, filled up to whole chunks."""
    each = GROUPS_IN_A_CHUNK * group_size
    return -(-in_features // each) * GROUPS_IN_A_CHUNK


def weight_bytes(out_features: int, in_features: int, group_size: int) -> int:
    """What a matrix takes: half a byte a weight, a float16 and half a byte for each group of an output."""
    chunks = padded_groups(in_features, group_size) // GROUPS_IN_A_CHUNK
    return chunks * out_features * (GROUPS_IN_A_CHUNK * (group_size // 2 + 2) + 2)


def pack_words(values: UInt8[Tensor, "out in"], group_size: int) -> Int32[Tensor, "out words"]:
    """Numbers from 0 to 15 in words, as described above; ``group_size`` is a multiple of 32 that divides the inputs."""
    missing = padded_groups(values.shape[1], group_size) * group_size - values.shape[1]
    chunks = torch.nn.functional.pad(values, (0, missing)).unflatten(1, (-1, GROUPS_IN_A_CHUNK, group_size // 2, 2))
    words = torch.zeros(chunks.shape[0], chunks.shape[1], group_size // 2, dtype=torch.int32, device=values.device)
    for group in range(GROUPS_IN_A_CHUNK):
        for half in range(2):
            words |= chunks[:, :, group, :, half].to(torch.int32) << (4 * (group + GROUPS_IN_A_CHUNK * half))
    return _squares_transposed(words).flatten(1)


def unpack_words(words: Int32[Tensor, "out words"], group_size: int, in_features: int) -> UInt8[Tensor, "out in"]:
    """The numbers that :func:`pack_words` packed."""
    ordered = _squares_transposed(words.unflatten(1, (-1, group_size // 2)))
    chunks = ordered.new_empty(*ordered.shape[:2], GROUPS_IN_A_CHUNK, group_size // 2, 2, dtype=torch.uint8)
    for group in range(GROUPS_IN_A_CHUNK):
        for half in range(2):
            chunks[:, :, group, :, half] = ordered >> (4 * (group + GROUPS_IN_A_CHUNK * half)) & 15
    return chunks.flatten(1)[:, :in_features].contiguous()


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


def _squares_transposed(words: Tensor) -> Tensor:
    squares: Tensor = words.unflatten(-1, (-1, SQUARE, SQUARE))
    return squares.transpose(-1, -2).flatten(-3)


def dequantise(
    words: Int32[Tensor, "out words"],
    scales: Float[Tensor, "groups out"],
    zeros: Int16[Tensor, "chunks out"],
    group_size: int,
    in_features: int,
) -> Float[Tensor, "out in"]:
    """``(value − zero) · scale`` of each weight, in at least float32. ``scales`` and ``zeros`` have padded groups too."""
    wide = scales.to(torch.promote_types(scales.dtype, torch.float32))
    values = unpack_words(words, group_size, in_features).unflatten(1, (-1, group_size))  # [out, groups, group_size]
    groups = values.shape[1]
    whole: Tensor = values.to(wide.dtype) - unpack_zeros(zeros)[:groups].T.to(wide.dtype).unsqueeze(-1)
    return (whole * wide[:groups].T.unsqueeze(-1)).flatten(1)


def awq_linear(
    x: Float[Tensor, "T in"],
    words: Int32[Tensor, "out words"],
    scales: Float[Tensor, "groups out"],
    zeros: Int16[Tensor, "chunks out"],
    group_size: int,
) -> Float[Tensor, "T out"]:
    """``x Wᵀ`` by the weights as they are, added up in float64 and rounded once."""
    weight = dequantise(words, scales.double(), zeros, group_size, x.shape[1])
    return (x.double() @ weight.T).to(x.dtype)


def awq_gated_linear(
    x: Float[Tensor, "T in"],
    words: Int32[Tensor, "two_I words"],
    scales: Float[Tensor, "groups two_I"],
    zeros: Int16[Tensor, "chunks two_I"],
    group_size: int,
) -> Float[Tensor, "T I"]:
    """SwiGLU's product (Shazeer 2020) of what gate's and up's weights, one above the other, make of ``x``."""
    weight = dequantise(words, scales.double(), zeros, group_size, x.shape[1])
    gate, up = (x.double() @ weight.T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
