"""Weights of 4 bits written out in 16: for steps of so many tokens that a library's product is worth the bytes.

Bound by memory: half a byte read and two written for each weight. A program takes one chunk of four groups of some rows
(:mod:`refimpl.kernels.awq_reference` tells how they lie), and writes each group's weights where they belong::

    halves [ROWS, group]  ─►  (value − zero) · scale  ─►  result [ROWS, 4 · group]        in float32, rounded once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels.awq_gemm import check_weights
from refimpl.kernels.awq_operand import load_chunk, scale_of, whole_numbers
from refimpl.kernels.launch import check_last_axis, check_same, device_of
from refimpl.kernels.overlap import after_previous, overlapping

ROWS = 16
NUM_WARPS = 4


@triton.jit
def awq_dequantise_kernel(
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    result: tl.tensor,
    result_stride: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Chunk ``program_id(0)`` of rows ``program_id(1) · ROWS …``."""
    chunk, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < out_features
    row = tl.where(inside, row, 0)
    tile = load_chunk(words, row, chunk, tl.cdiv(in_features, 4 * GROUP), GROUP)
    scale = tl.load(scales + chunk * out_features + row)
    zero = tl.load(zeros + chunk * out_features + row)
    places = result + row.to(tl.int64) * result_stride
    after_previous(OVERLAP)
    for group in tl.static_range(4):
        number_of_group = 4 * chunk + group
        weight = whole_numbers(tile, zero, group, tl.float32) * scale_of(scale, group)[:, None]
        column = number_of_group * GROUP + tl.arange(0, GROUP)
        mask = inside[:, None] & (column < in_features)[None, :]
        tl.store(places[:, None] + column[None, :], weight.to(result.dtype.element_ty), mask=mask)


def awq_dequantise(
    words: Tensor, scales: Tensor, zeros: Tensor, group_size: int, in_features: int, result: Tensor
) -> Tensor:
    """:func:`awq_reference.dequantise`, written to ``result [out, in]``.

    Raises:
        RefimplError: elements of a row lie apart, sizes differ, or the group size is not 32, 64 or 128.

    """
    check_last_axis(result=result)
    check_weights(words, scales, zeros, group_size, in_features)
    check_same("sizes", result=tuple(result.shape), weight=(scales.shape[1], in_features))
    if not result.numel():
        return result
    grid = (triton.cdiv(in_features, 4 * group_size), triton.cdiv(len(result), ROWS))
    with device_of(words):
        awq_dequantise_kernel[grid](
            *(words.view(torch.int16), scales.view(torch.int64), zeros, result, result.stride(0), *result.shape),
            ROWS=ROWS,
            GROUP=group_size,
            num_warps=NUM_WARPS,
            **overlapping(words),
        )
    return result
