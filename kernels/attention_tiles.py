"""What decode and prefill attention share: one tile of keys and values, taken into a running softmax.

*Online softmax* (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention"). A row of scores ``s`` is never whole in
memory. For the keys seen so far keep the largest score ``m``, the sum ``l = Σ exp(s − m)`` and the vector
``a = Σ exp(s − m) v``. A further tile of keys, with scores ``s'`` and largest score ``m'``, gives with ``n = max(m, m')``::

    p = exp(s' − n)          weights of the tile's keys                                  [M, N]
    l = l · exp(m − n) + Σ p                                                              [M]
    a = a · exp(m − n) + p V                                                              [M, D]

and ``a / l`` after the last tile is softmax(s) V, whatever the tiles were. All of it is float32 in registers: ``a`` is
``M · D`` numbers, spread over the threads of a program. Scores are multiplied by ``softmax_scale · log2 e``, so that exp2,
which the hardware has, stands for exp.

*Pages* (Kwon et al. 2023, "PagedAttention"). Key j of a sequence lies in slot ``j % B`` of block ``block_table[j // B]``. A
block's id is widened to 64 bits before it is multiplied: a cache of more than 2³¹ elements is ordinary.

*Slots beyond the context* hold anything, even NaN, and 0 · NaN is NaN: masked keys *and values* are loaded as 0.

*Windows* (Beltagy et al. 2020, "Longformer"; Jiang et al. 2023, "Mistral 7B"). With a window of W a row at position p sees
the keys ``p − W + 1 … p``. Tiles before the window of a program's first row are not read. Those after it that its last row
does not see whole are masked, like those on the diagonal::

    keys   not read │ masked │ seen whole by every row │ masked          W = 0: no window, so neither of the first two
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.errors import RefimplError
from refimpl.kernels.launch import power_of_two

LOG2_E = math.log2(math.e)


@triton.jit
def load_block_ids(
    table: tl.tensor, first_key: tl.tensor, context: tl.tensor, BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr
) -> tl.tensor:
    """The block of each key of a tile, ``[N]``, or the one block that a tile lies in; the null block beyond the context."""
    if BLOCK_SIZE >= TILE_N:
        return tl.load(table + first_key // BLOCK_SIZE, mask=first_key < context, other=0)
    else:
        positions = first_key + tl.arange(0, TILE_N)
        return tl.load(table + positions // BLOCK_SIZE, mask=positions < context, other=0)


@triton.jit
def load_pages(
    cache_head: tl.tensor,
    slots: tl.tensor,
    exists: tl.tensor,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    OPERAND: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Keys or values of a tile, one head's: ``[N, D]``, from their slots' offsets ``[N]``; 0 where nothing exists."""
    dims = tl.arange(0, TILE_D)
    in_head = (dims < HEAD_DIM)[None, :]  # head sizes of 80 and 96 are padded to 128
    pointers = cache_head + slots[:, None] + dims[None, :]  # [N, D]
    if MASKED:
        return tl.load(pointers, mask=exists[:, None] & in_head, other=0.0).to(OPERAND)
    elif HEAD_DIM == TILE_D:
        return tl.load(pointers).to(OPERAND)
    else:
        return tl.load(pointers, mask=in_head, other=0.0).to(OPERAND)


@triton.jit
def scores_of(query: tl.tensor, keys: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:
    """``q kᵀ``: ``[M, D] × [N, D] → [M, N]`` in float32."""
    if VECTOR:
        return tl.sum(query[:, None, :] * keys[None, :, :], axis=2)
    else:
        return tl.dot(query, tl.trans(keys), input_precision="ieee")


@triton.jit
def weighted(weights: tl.tensor, values: tl.tensor, OPERAND: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """``p v``: ``[M, N] × [N, D] → [M, D]`` in float32; weights are rounded to the operands' dtype first."""
    if VECTOR:
        return tl.sum(weights[:, :, None] * values[None, :, :], axis=1)
    else:
        return tl.dot(weights.to(OPERAND), values, input_precision="ieee")


@triton.jit
def take_tile(
    attended: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    query: tl.tensor,
    last_key: tl.tensor,
    first_key: tl.tensor,
    context: tl.tensor,
    block_ids: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    scale_log2: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    OPERAND: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr = 0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys ``first_key …`` into the state (``attended [M, D]``, ``row_max [M]``, ``row_sum [M]``) of ``query [M, D]``.

    Row m sees the keys up to ``last_key[m]``, or the last ``WINDOW`` of them. Without ``MASKED`` the caller knows that every
    row sees the whole tile.
    """
    positions = first_key + tl.arange(0, TILE_N)  # [N]
    exists = positions < context
    slots = block_ids.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride  # [N]
    keys = load_pages(k_head, slots, exists, HEAD_DIM, TILE_D, OPERAND, MASKED)  # [N, D]
    scores = scores_of(query, keys, VECTOR) * scale_log2  # [M, N]
    if MASKED:
        seen = positions[None, :] <= last_key[:, None]
        if WINDOW:
            seen &= positions[None, :] > last_key[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = new_max
    if MASKED:  # a row that has seen no key yet: −inf − −inf would be NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    values = load_pages(v_head, slots, exists, HEAD_DIM, TILE_D, OPERAND, MASKED)  # [N, D]
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    attended = attended * rescale[:, None] + weighted(weights, values, OPERAND, VECTOR)
    return attended, new_max, row_sum


@triton.jit
def first_tile(first_position: tl.tensor, TILE_N: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Where the tile begins that holds the first key which the row at ``first_position`` sees."""
    return tl.maximum(first_position - WINDOW + 1, 0) // TILE_N * TILE_N


@triton.jit
def first_whole_tile(last_position: tl.tensor, TILE_N: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Where the first tile begins of which the row at ``last_position`` sees all that is not ahead."""
    return tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), TILE_N) * TILE_N


@triton.jit
def attend(
    query: tl.tensor,
    last_key: tl.tensor,
    left_behind: tl.tensor,
    first: tl.tensor,
    unmasked_end: tl.tensor,
    end: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    table: tl.tensor,
    scale_log2: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    OPERAND: tl.constexpr,
    VECTOR: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state of ``query [M, D]`` after keys ``first … end``; all rows see the tiles before ``unmasked_end`` whole.

    With a window there are the keys ``left_behind … first`` too, which some rows' windows have left behind, and
    ``unmasked_end`` is no less than ``first``. Without one ``left_behind`` is not looked at.
    What is masked has a loop of its own, so that the long one has no comparisons. A tile's block ids are loaded one tile
    ahead: a load whose address is itself being loaded could not be under way as early as the pipeline of ``num_stages``
    tiles wants it.
    """
    attended = tl.zeros((TILE_M, TILE_D), tl.float32)
    row_max = tl.full((TILE_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((TILE_M,), tl.float32)
    block_ids = load_block_ids(table, first, end, BLOCK_SIZE, TILE_N)
    for key in range(first, unmasked_end, TILE_N):
        next_ids = load_block_ids(table, key + TILE_N, end, BLOCK_SIZE, TILE_N)
        attended, row_max, row_sum = take_tile(
            attended, row_max, row_sum, query, last_key, key, end, block_ids, k_head, v_head, scale_log2, block_stride,
            slot_stride, BLOCK_SIZE, HEAD_DIM, TILE_N, TILE_D, OPERAND, VECTOR, MASKED=False,
        )  # fmt: skip
        block_ids = next_ids
    masked_start = unmasked_end
    if WINDOW:  # the masked tiles of both sides in one loop: which ones come first is all the same to a running softmax
        masked_start = unmasked_end - (first - left_behind)
    for place in tl.range(masked_start, end, TILE_N, num_stages=1):
        next_ids = load_block_ids(table, place + TILE_N, end, BLOCK_SIZE, TILE_N)
        key = place
        if WINDOW:
            key = tl.where(place < unmasked_end, place - masked_start + left_behind, place)
            block_ids = load_block_ids(table, key, end, BLOCK_SIZE, TILE_N)
        attended, row_max, row_sum = take_tile(
            attended, row_max, row_sum, query, last_key, key, end, block_ids, k_head, v_head, scale_log2, block_stride,
            slot_stride, BLOCK_SIZE, HEAD_DIM, TILE_N, TILE_D, OPERAND, VECTOR, MASKED=True, WINDOW=WINDOW,
        )  # fmt: skip
        block_ids = next_ids
    return attended, row_max, row_sum


@triton.jit
def load_rows(
    pointers: tl.tensor, real: tl.tensor, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, OPERAND: tl.constexpr
) -> tl.tensor:
    """Rows ``[M, D]`` from their first elements' pointers ``[M]``; rows that are not real, and padding, are 0."""
    dims = tl.arange(0, TILE_D)[None, :]
    return tl.load(pointers[:, None] + dims, mask=real[:, None] & (dims < HEAD_DIM), other=0.0).to(OPERAND)


@triton.jit
def store_rows(
    pointers: tl.tensor, values: tl.tensor, real: tl.tensor, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr
) -> None:
    """``values [M, D]`` to rows that begin at ``pointers [M]``; padding and rows that are not real go nowhere."""
    dims = tl.arange(0, TILE_D)[None, :]
    tl.store(pointers[:, None] + dims, values.to(pointers.dtype.element_ty), mask=real[:, None] & (dims < HEAD_DIM))


@dataclass(frozen=True)
class Target:
    """What a launch must know of a device."""

    capability: int
    """Compute capability as one number: 75 is a T4, 80 an A100, 90 an H100 or H200, 100 a B200."""
    num_sms: int
    """Streaming multiprocessors."""


INTERPRETER = Target(capability=80, num_sms=2)
"""What the interpreter stands for where there is no GPU."""


@cache
def target_of(device: torch.device) -> Target:
    """The target that a tensor's device is."""
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    return Target(10 * found.major + found.minor, found.multi_processor_count)


def padded(head_dim: int) -> int:
    """The extent of a tile along a head: a power of two, and 16 at least, which products on tensor cores want."""
    return max(16, power_of_two(head_dim))


def operand(dtype: torch.dtype, vector: bool = False) -> tl.dtype:
    """The dtype in which the operands of the products are held.

    That of the tensors; float32 where products are vector arithmetic, and for bfloat16 in Triton's interpreter, whose numpy
    has no such numbers.
    """
    if vector or (dtype == torch.bfloat16 and triton.knobs.runtime.interpret):
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def check_inputs(query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> None:
    """What both kernels take for granted.

    Raises:
        RefimplError: a dtype, shape or stride that they cannot read; it says which.

    """
    if (
        query.dtype not in (torch.bfloat16, torch.float16, torch.float32)
        or not query.dtype == k_cache.dtype == v_cache.dtype
    ):
        raise RefimplError(
            f"query, k_cache and v_cache are {query.dtype}, {k_cache.dtype}, {v_cache.dtype}; "
            "all must be the same of bfloat16, float16 and float32"
        )
    B, Hkv, D = k_cache.shape[1:]
    if B & (B - 1) or query.shape[1] % Hkv or query.shape[2] != D:
        raise RefimplError(
            f"query is {tuple(query.shape)} and k_cache {tuple(k_cache.shape)}; block size ({B}) must be a power of two, "
            "query heads a multiple of key/value heads, and head sizes equal"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or query.stride(2) != 1 or block_table.stride(1) != 1:
        raise RefimplError(
            f"strides are {query.stride()} (query), {k_cache.stride()} (k_cache), {v_cache.stride()} (v_cache), "
            f"{block_table.stride()} (block_table); the caches' must be equal, and every last one 1"
        )
