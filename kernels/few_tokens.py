"""What products of quantised weights with few tokens share: which rows a program has, how programs add up, what they write.

A tile is ``ROWS`` rows of a weight times ``TOKENS`` tokens, ``sums [ROWS, TOKENS]``. The grid has tiles of tokens, tiles of
rows, and SPLITS programs that share a tile: each has a part of the inputs, leaves its sums in memory, and the last to arrive
adds them up, always in the same order. With ``GATED`` the rows are pairs of SwiGLU's two matrices (Shazeer 2020), and what
is written is ``silu(gate) · up``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels.silu_mul import swiglu


@triton.jit
def rows_of(out_features: tl.tensor, GATED: tl.constexpr, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Which rows of the weight are this program's, and which of them exist. [ROWS] each.

    With ``GATED`` the matrix has twice ``out_features`` rows, gate's first; a program takes pairs, side by side.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if GATED:
        inside = row // 2 < out_features
        row = row // 2 + row % 2 * out_features
    else:
        inside = row < out_features
    return tl.where(inside, row, 0), inside


@triton.jit
def all_parts(sums: tl.tensor, parts: tl.tensor, arrivals: tl.tensor, SPLITS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Leave this program's sums in memory; the last program of a tile gets the whole, the others False."""
    ROWS: tl.constexpr = sums.shape[0]
    TOKENS: tl.constexpr = sums.shape[1]
    tile = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    place = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    own = parts + tile.to(tl.int64) * (SPLITS * ROWS * TOKENS) + place
    tl.store(own + tl.program_id(2) * (ROWS * TOKENS), sums)
    tl.debug_barrier()  # all threads have stored before one of them says so
    last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        sums = tl.zeros([ROWS, TOKENS], tl.float32)
        for split in range(SPLITS):
            sums += tl.load(own + split * (ROWS * TOKENS), cache_modifier=".cg")
        tl.store(arrivals + tile, 0)  # for the next launch
    return sums, last


@triton.jit
def write_product(
    product: tl.tensor,
    result: tl.tensor,
    result_stride: tl.tensor,
    token: tl.tensor,
    there: tl.tensor,
    out_features: tl.tensor,
    GATED: tl.constexpr,
) -> None:
    """Write a whole tile ``[ROWS, TOKENS]``, with ``GATED`` what SwiGLU makes of it, to the rows of the tokens ``there``."""
    if GATED:
        pairs = tl.reshape(product, (product.shape[0] // 2, 2, product.shape[1]))
        gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))  # [ROWS / 2, TOKENS]
        product = swiglu(gate, up)
    output = tl.program_id(1) * product.shape[0] + tl.arange(0, product.shape[0])
    place = result + token.to(tl.int64)[None, :] * result_stride + output[:, None]
    mask = (output < out_features)[:, None] & there[None, :]
    tl.store(place, product.to(result.dtype.element_ty), mask=mask)


def room_for_parts(scales: Tensor, grid: tuple[int, int, int], tile: int, arrivals: Tensor | None) -> tuple[Tensor, Tensor]:
    """``parts`` and ``arrivals`` of :func:`all_parts` for tiles of so many sums. One split looks at neither."""
    if grid[2] == 1:
        return scales, scales if arrivals is None else arrivals
    tiles = grid[0] * grid[1]
    parts = scales.new_empty(tiles * grid[2] * tile, dtype=torch.float32)
    return parts, scales.new_zeros(tiles, dtype=torch.int32) if arrivals is None else arrivals
