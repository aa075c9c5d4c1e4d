"""How checkpoints of AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022) lay out weights of 4 bits.

Inputs come in groups of 128, 64 or 32; each group of each output has a scale and a zero point, a number of 4 bits too::

    weight[o, i] = (value[i, o] − zero[i / group, o]) · scale[i / group, o]

AWQ's "GEMM" layout packs eight outputs of one input into an int32. They do not lie in order, but the even ones first::

    bits of the int32      31                                                0
                           ┌─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┐
    output 8c + …          │  7  │  5  │  3  │  1  │  6  │  4  │  2  │  0  │
                           └─────┴─────┴─────┴─────┴─────┴─────┴─────┴─────┘
    nibble                    7     6     5     4     3     2     1     0

so that the mask ``0x000F000F``, after a shift by 4 bits for each further pair, leaves outputs (0, 1), (2, 3), (4, 5), (6, 7)
in the two halves of a register, where 16-bit floats of a pair belong. Zero points are packed along the outputs by the same
interleave; who forgets that reads symmetric checkpoints right, whose zero points are all 8, and no others.

GPTQ's layout packs eight *inputs* of one output into an int32, in order; its zero points are packed along the outputs, in
order too, and one too small: packers took 1 off each, modulo 16 (``checkpoint_format: gptq``; ``gptq_v2`` does not).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from refimpl.errors import CheckpointError

BITS = 4
IN_A_WORD = 8
"""Numbers of 4 bits in an int32."""
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs lies in nibble 0, 1, …, 7 of AWQ's words."""
LARGEST = 15
SYMMETRIC_ZERO = 8
"""The zero point of a checkpoint without zero points."""
GROUP_SIZES = (128, 64, 32)
"""Inputs that may share a scale; -1 stands for all inputs of a matrix."""


def pack_awq(values: UInt8[Tensor, "rows columns"]) -> Int32[Tensor, "rows columns_8"]:
    """Numbers from 0 to 15, eight neighbours of the last axis in a word: ``[in, out]`` to AWQ's qweight ``[in, out/8]``.

    The same packs zero points: ``[in/group, out]`` to qzeros ``[in/group, out/8]``.

    Raises:
        CheckpointError: the last axis is no multiple of 8.

    """
    return _packed(values, ORDER)


def unpack_awq(words: Int32[Tensor, "rows columns_8"]) -> UInt8[Tensor, "rows columns"]:
    """The numbers that :func:`pack_awq` packed: ``[in, out/8]`` to ``[in, out]``, from 0 to 15."""
    return _unpacked(words, ORDER)


def pack_in_order(values: UInt8[Tensor, "rows columns"]) -> Int32[Tensor, "rows columns_8"]:
    """Eight neighbours of the last axis in a word, the first in the lowest bits, as GPTQ packs.

    Raises:
        CheckpointError: the last axis is no multiple of 8.

    """
    return _packed(values, range(IN_A_WORD))


def unpack_in_order(words: Int32[Tensor, "rows columns_8"]) -> UInt8[Tensor, "rows columns"]:
    """The numbers that :func:`pack_in_order` packed."""
    return _unpacked(words, range(IN_A_WORD))


def _packed(values: Tensor, order: range | tuple[int, ...]) -> Tensor:
    if values.shape[-1] % IN_A_WORD:
        raise CheckpointError(f"{values.shape[-1]} numbers of 4 bits do not fill words of {IN_A_WORD}; pad the last axis")
    eights = values.unflatten(-1, (-1, IN_A_WORD))
    words = torch.zeros(eights.shape[:-1], dtype=torch.int32, device=values.device)
    for nibble, place in enumerate(order):
        words |= eights[..., place].to(torch.int32) << (BITS * nibble)
    return words


def _unpacked(words: Tensor, order: range | tuple[int, ...]) -> Tensor:
    values = torch.empty(*words.shape, IN_A_WORD, dtype=torch.uint8, device=words.device)
    for nibble, place in enumerate(order):
        values[..., place] = words >> (BITS * nibble) & LARGEST
    return values.flatten(-2)


def quantise_groups(
    weight: Float[Tensor, "out in"], group_size: int, zero_point: bool = True
) -> tuple[UInt8[Tensor, "in out"], UInt8[Tensor, "groups out"], Float[Tensor, "groups out"]]:
    """Round a weight to 4 bits, by groups of ``group_size`` inputs (-1: all): values, zero points and float16 scales.

    With zero points a group's range reaches from its least weight to its largest, and 0 lies in it, so that what is 0 stays
    so. Without, it is symmetric about the value 8. Values are rounded by the scale as float16 holds it.

    Raises:
        CheckpointError: ``group_size`` does not divide the inputs, or a weight is not finite.

    """
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    check_groups("a matrix", in_features, size)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    grouped = wide.T.unflatten(0, (in_features // size, size))  # [groups, size, out]
    least, most = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    if not bool((least.isfinite() & most.isfinite()).all()):
        raise CheckpointError("a weight is infinite or NaN, which 4 bits cannot hold; mend the checkpoint")
    if zero_point:
        scales = _float16_above_0((most - least) / LARGEST)
        zeros = (-least / scales.to(wide.dtype)).round().clamp(0, LARGEST)
    else:
        scales = _float16_above_0(torch.maximum(most / (LARGEST - SYMMETRIC_ZERO), -least / SYMMETRIC_ZERO))
        zeros = torch.full_like(least, SYMMETRIC_ZERO)
    rounded = (grouped / scales.to(wide.dtype).unsqueeze(1)).round() + zeros.unsqueeze(1)
    values = rounded.clamp(0, LARGEST).to(torch.uint8).reshape(in_features, out_features)
    return values, zeros.to(torch.uint8), scales


def _float16_above_0(scales: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Scales in float16, the least and the largest of its numbers for what lies outside them: none is 0 or infinite."""
    return scales.clamp(2.0**-24, torch.finfo(torch.float16).max).to(torch.float16)


def check_groups(layer: str, in_features: int, group_size: int, ranks: int = 1) -> None:
    """See that groups of inputs lie whole on every rank of a matrix whose inputs are shared out.

    Args:
        layer: its name in the checkpoint, for the message.
        in_features: of the whole matrix.
        group_size: of inputs that share a scale, -1 for all of a matrix.
        ranks: among which the inputs are divided evenly; 1 where they are not.

    Raises:
        CheckpointError: they do not; the message has the layer, the legal group sizes and the legal numbers of ranks.

    """
    if _divides(in_features, group_size, ranks):
        return
    said = f"{layer} has {in_features} inputs"
    if ranks > 1:
        said += f", {in_features / ranks:g} on each of {ranks} ranks"
    told = "one group of all" if group_size == -1 else f"groups of {group_size}"
    sizes = [str(size) for size in GROUP_SIZES if _divides(in_features, size, ranks)]
    legal = f"group sizes that would do: {', '.join(sizes)}" if sizes else "no group size would do"
    if ranks > 1:
        numbers = [str(number) for number in range(1, ranks) if _divides(in_features, group_size, number)]
        legal += f"; tensor_parallel_size with this one: {', '.join(numbers) or 'none'}"
    raise CheckpointError(f"{said}, and its weights come in {told}, which do not lie in them whole; {legal}")


def _divides(in_features: int, group_size: int, ranks: int) -> bool:
    """One group of all can be cut anywhere; what is cut is held in groups of 32 at least."""
    if ranks > 1 and group_size == -1:
        group_size = GROUP_SIZES[-1]
    size = in_features if group_size == -1 else group_size
    return size > 0 and in_features % (size * ranks) == 0
