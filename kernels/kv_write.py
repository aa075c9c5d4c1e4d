"""Keys and values on their way into the paged cache: turn them, and write each token's heads into the slot it was given.

::

    heads of token t:  [ query heads │ key heads │ value heads ]       slot = slot_mapping[t]
                              │ turn       │ turn       │              block = slot // B, place = slot % B
                              ▼            ▼            ▼
                          turned[t]  k_cache[block, place]  v_cache[block, place]      slot < 0: a padded row, writes nothing

One launch in place of four (turn queries, turn keys, write keys, write values), and keys are not written and read once more
in between. A program takes ``HEADS`` heads of one token: the first programs of a token turn queries, the last ones turn keys
and move values. Bound by memory: every element of q, k and v is read and written once.

Slots are widened to 64 bits before they are multiplied: a cache may hold more than 2³¹ elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels.launch import check_last_axis, check_same, device_of, power_of_two
from refimpl.kernels.overlap import after_previous, overlapping
from refimpl.kernels.rotary import HEADS, NUM_WARPS, check_angles, load_angles, rotate

MANY_TOKENS = 1024


@triton.jit
def _slot_start(slot: tl.tensor, B: tl.tensor, block_stride: tl.tensor, place_stride: tl.tensor) -> tl.tensor:
    """Where a slot's heads begin in the cache; everything is in 64 bits."""
    return (slot // B) * block_stride + (slot % B) * place_stride


@triton.jit
def _move_heads(
    source: tl.tensor,
    target: tl.tensor,
    head: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    num_heads: tl.tensor,
    D: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Copy heads [HEADS, 1] of one token, D elements each."""
    element = tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
    inside = (head < num_heads) & (element < D)
    value = tl.load(source + head * source_stride + element, mask=inside)  # [HEADS, WIDTH]
    tl.store(target + head * target_stride + element, value, mask=inside)


@triton.jit
def _turn_heads(
    source: tl.tensor,
    target: tl.tensor,
    head: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Turn heads [HEADS, 1] of one token on their way; ``cosines`` and ``sines`` are [HALF]."""
    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]
    inside = (head < num_heads) & (pair < half)
    first, second = rotate(source, head * source_stride + pair, inside, half, cosines, sines)  # [HEADS, HALF] each
    place = target + head * target_stride + pair
    tl.store(place, first.to(target.dtype.element_ty), mask=inside)
    tl.store(place + half, second.to(target.dtype.element_ty), mask=inside)


@triton.jit
def write_kv_kernel(
    key: tl.tensor,
    value: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_stride: tl.tensor,
    place_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    B: tl.tensor,
    D: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Heads ``program_id(1) · HEADS …`` of token ``program_id(0)`` into its slot."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    after_previous(OVERLAP)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        start = _slot_start(slot, B, block_stride, place_stride)
        keys, values = key + token * key_token_stride, value + token * value_token_stride
        _move_heads(keys, k_cache + start, head, key_head_stride, cache_head_stride, num_kv_heads, D, WIDTH)
        _move_heads(values, v_cache + start, head, value_head_stride, cache_head_stride, num_kv_heads, D, WIDTH)


@triton.jit
def turn_and_write_kv_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    turned: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    turned_token_stride: tl.tensor,
    turned_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    place_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    B: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One tile of token ``program_id(0)``: query heads while there are any, then heads of keys and values.

    Positions, angles and slots are older than the kernel before, so they are read while that one still runs.
    """
    token = tl.program_id(0).to(tl.int64)
    query_tiles = tl.cdiv(num_heads, HEADS)
    tile = tl.program_id(1)
    cosines, sines = load_angles(positions, cos, sin, table_stride, token, half, HALF)  # [HALF] each
    slot = tl.load(slot_mapping + token).to(tl.int64)
    after_previous(OVERLAP)
    if tile < query_tiles:
        head = (tile * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
        source, target = query + token * query_token_stride, turned + token * turned_token_stride
        _turn_heads(source, target, head, query_head_stride, turned_head_stride, num_heads, half, cosines, sines, HALF)
    else:
        head = ((tile - query_tiles) * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
        if slot >= 0:
            start = _slot_start(slot, B, block_stride, place_stride)
            keys, values = key + token * key_token_stride, value + token * value_token_stride
            _turn_heads(
                keys, k_cache + start, head, key_head_stride, cache_head_stride, num_kv_heads, half, cosines, sines, HALF
            )
            _move_heads(
                values, v_cache + start, head, value_head_stride, cache_head_stride, num_kv_heads, 2 * half, 2 * HALF
            )


def warps(T: int) -> int:
    """Warps a program: 1 where the tokens fill the device, so that each thread moves much; else 4, which are done sooner."""
    return 1 if T >= MANY_TOKENS else NUM_WARPS


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Write ``key, value [T, Hkv, D]`` into ``k_cache, v_cache [blocks, B, Hkv, D]`` at slots ``[T]``; below 0: nowhere.

    Mutates both caches, and gives them back. Tokens, heads and blocks may lie apart.

    Raises:
        RefimplError: elements of a head lie apart, or sizes differ.

    """
    T, num_kv_heads, D = key.shape
    _check_cache(key, value, k_cache, v_cache, slot_mapping)
    if T:
        heads = min(HEADS, power_of_two(num_kv_heads))
        strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1), *k_cache.stride()[:3])
        with device_of(key):
            write_kv_kernel[(T, triton.cdiv(num_kv_heads, heads))](
                key, value, k_cache, v_cache, slot_mapping, *strides, num_kv_heads, k_cache.shape[1], D,
                HEADS=heads, WIDTH=power_of_two(D), num_warps=warps(T), **overlapping(key),
            )  # fmt: skip
    return k_cache, v_cache


def turn_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    turned: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn ``query [T, Hq, D]`` and ``key [T, Hkv, D]`` by position; write keys and ``value`` into the caches at slots.

    Tables are ``cos, sin [P, D/2]``. Mutates both caches. Gives turned queries (``turned`` if it is given, which may be
    ``query`` itself) and the caches. A slot below 0 is a padded row: nothing is written.

    Raises:
        RefimplError: elements of a head lie apart, or sizes differ.

    """
    T, num_heads, D = query.shape
    turned = torch.empty_like(query, memory_format=torch.contiguous_format) if turned is None else turned
    _check_cache(key, value, k_cache, v_cache, slot_mapping)
    check_last_axis(query=query, turned=turned)
    check_same("sizes", query=query.shape, turned=turned.shape)
    check_angles(cos, sin, D)
    if T:
        num_kv_heads = key.shape[1]
        heads = min(HEADS, power_of_two(max(num_heads, num_kv_heads)))
        strides = [stride for x in (query, key, value, turned) for stride in x.stride()[:2]]
        sizes = (num_heads, num_kv_heads, k_cache.shape[1], D // 2)
        grid = (T, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
        with device_of(query):
            turn_and_write_kv_kernel[grid](
                query, key, value, positions, cos, sin, k_cache, v_cache, slot_mapping, turned,
                *strides, cos.stride(0), *k_cache.stride()[:3], *sizes,
                HEADS=heads, HALF=power_of_two(D // 2), num_warps=warps(T), **overlapping(query),
            )  # fmt: skip
    return turned, k_cache, v_cache


def _check_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    check_last_axis(key=key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    check_same("sizes of keys and values", key=key.shape, value=value.shape)
    check_same("tokens", key=key.shape[0], slot_mapping=slot_mapping.shape[0])
    check_same("sizes of the caches", k_cache=k_cache.shape, v_cache=v_cache.shape)
    check_same("strides of the caches", k_cache=k_cache.stride(), v_cache=v_cache.stride())
    check_same("heads and their size", key=key.shape[1:], k_cache=k_cache.shape[2:])
