"""Whole blocks moved, in all layers by one launch: copy-on-write, and the two halves of swapping.

::

    copy_blocks      pool[source] ─► pool[target]                     a shared block, before one of its owners writes into it
    gather_blocks    pool[ids[i]] ─► staging[i]        then one transfer over the link to the host's memory
    scatter_blocks   staging[i]   ─► pool[ids[i]]      after one transfer back

A cache has two pools a layer, K and V, and a launch a pool would be 160 launches for a model of 80 layers. So the kernel is
given a table of the pools' addresses, and a program reads its own from there: program (i, p, c) moves chunk c of block
``ids[i]`` in pool p. A link to the host is as fast as its pieces are long, hence the staging buffer, where the blocks of all
pools lie end to end, block by block: ``[n, pools, B · Hkv · D]``.

Numbers are moved as words, the longest that block size and strides allow, whatever their dtype. Bound by memory: each byte
is read and written once. Block ids are widened to 64 bits before they are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_same, device_of
from refimpl.kernels.spec import EXACT, Case, Compile, KernelSpec, Shape

WORDS: dict[int, tl.dtype] = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""The type that so many bytes are moved as."""
CHUNK = 512
"""Words a program moves: 4 kB of int64, two loads of 16 bytes for each of 128 threads."""
NUM_WARPS = 4


@triton.jit
def _pool(addresses: tl.tensor, pool: tl.tensor, WORD: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Where a pool begins, as a pointer to words."""
    start = tl.load(addresses + pool).to(tl.pointer_type(WORD))
    return tl.multiple_of(start, 16) if ALIGNED else start


@triton.jit
def copy_blocks_kernel(
    addresses: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    block_stride: tl.tensor,
    block_words: tl.tensor,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (i, p, c): chunk c of block ``sources[i]`` of pool p to block ``targets[i]`` of the same pool."""
    start = _pool(addresses, tl.program_id(1), WORD, ALIGNED)
    source = tl.load(sources + tl.program_id(0)).to(tl.int64) * block_stride
    target = tl.load(targets + tl.program_id(0)).to(tl.int64) * block_stride
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = word < block_words
    tl.store(start + target + word, tl.load(start + source + word, mask=inside), mask=inside)  # [CHUNK]


@triton.jit
def stage_blocks_kernel(
    addresses: tl.tensor,
    block_ids: tl.tensor,
    staging: tl.tensor,
    block_stride: tl.tensor,
    block_words: tl.tensor,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """Program (i, p, c): chunk c between block ``block_ids[i]`` of pool p and its place in ``staging``."""
    index, pool = tl.program_id(0).to(tl.int64), tl.program_id(1)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = word < block_words
    block = tl.load(block_ids + index).to(tl.int64) * block_stride
    in_pool = _pool(addresses, pool, WORD, ALIGNED) + block + word  # [CHUNK]
    in_staging = staging + (index * tl.num_programs(1) + pool) * block_words + word  # [CHUNK]
    if GATHER:
        tl.store(in_staging, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=inside), mask=inside)


@dataclass(frozen=True)
class BlockPools:
    """The pools of a cache, all ``[blocks, B, Hkv, D]`` with blocks that lie in one piece; they are kept alive.

    Raises (by :meth:`of`):
        RefimplError: shapes, strides or dtypes differ, or a block is not in one piece.

    """

    pools: tuple[Tensor, ...]
    addresses: Tensor
    """Where each begins: int64, on the pools' device."""

    @classmethod
    def of(cls, pools: list[Tensor]) -> BlockPools:
        """Check the pools and write down their addresses; done once, since it copies from the host."""
        first = pools[0]
        for pool in pools:
            check_same(
                "pools", first=(first.shape, first.stride(), first.dtype), pool=(pool.shape, pool.stride(), pool.dtype)
            )
        check_same("strides within a block", given=first[0].stride(), in_one_piece=first[0].contiguous().stride())
        addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64, device=first.device)
        return cls(tuple(pools), addresses)

    @property
    def block_shape(self) -> torch.Size:
        """``(B, Hkv, D)``."""
        return self.pools[0].shape[1:]

    @cached_property
    def _bytes(self) -> tuple[int, int]:
        """Of a block, and from one block to the next."""
        size = self.pools[0].element_size()
        return self.block_shape.numel() * size, self.pools[0].stride(0) * size

    @cached_property
    def word(self) -> int:
        """Bytes of the longest word that divides block, stride and addresses."""
        return math.gcd(8, *self._bytes, *(pool.data_ptr() for pool in self.pools))

    @cached_property
    def _launch(self) -> tuple[int, int, int, dict[str, object]]:
        """Stride and size of a block in words, chunks of a block, and what is compiled in."""
        block, stride = (bytes_ // self.word for bytes_ in self._bytes)
        aligned = math.gcd(16, *self._bytes, *(pool.data_ptr() for pool in self.pools)) == 16
        compiled = {"WORD": WORDS[self.word], "ALIGNED": aligned, "CHUNK": CHUNK, "num_warps": NUM_WARPS}
        return stride, block, triton.cdiv(block, CHUNK), compiled

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks ``sources [n]`` to ``targets [n]`` in every pool. Targets are distinct, and none is a source."""
        if len(sources):
            stride, block, chunks, compiled = self._launch
            with device_of(self.addresses):
                copy_blocks_kernel[(len(sources), len(self.pools), chunks)](
                    self.addresses, sources, targets, stride, block, **compiled
                )

    def gather(self, block_ids: Tensor, staging: Tensor) -> None:
        """Copy blocks ``block_ids [n]`` of every pool into ``staging [n, pools, B, Hkv, D]``."""
        self._stage(block_ids, staging, gather=True)

    def scatter(self, block_ids: Tensor, staging: Tensor) -> None:
        """Copy ``staging [n, pools, B, Hkv, D]`` into blocks ``block_ids [n]``, which are distinct, of every pool."""
        self._stage(block_ids, staging, gather=False)

    def _stage(self, block_ids: Tensor, staging: Tensor, gather: bool) -> None:
        expected = (len(block_ids), len(self.pools), *self.block_shape)
        check_same("sizes of the staging buffer", given=tuple(staging.shape), expected=expected)
        check_same("strides of the staging buffer", given=staging.stride(), expected=staging.contiguous().stride())
        if len(block_ids):
            stride, block, chunks, compiled = self._launch
            words = staging.view(torch.uint8).flatten().view(_torch_word(self.word))
            with device_of(self.addresses):
                stage_blocks_kernel[(len(block_ids), len(self.pools), chunks)](
                    self.addresses, block_ids, words, stride, block, GATHER=gather, **compiled
                )


def _torch_word(size: int) -> torch.dtype:
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[size]


# ---------------------------------------------------------------------- what is registered


def _pools_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pools of random numbers as one tensor, their addresses, and block ids in random order, the last block first."""
    blocks, sizes = shape["blocks"], (shape["B"], shape["Hkv"], shape["D"])
    random = cases.generator(seed)
    pools = cases.poisoned_pool(shape["pools"] * blocks, *sizes, dtype, device, shape.get("block_gap", 0))
    pools = pools.unflatten(0, (-1, blocks))
    for pool in pools:
        pool.copy_(torch.randn(1, *sizes, generator=random).to(dtype).expand_as(pool))
        pool.mul_(torch.arange(1, blocks + 1, device=device)[:, None, None, None])  # another factor for each block
    ids = torch.cat((torch.tensor([blocks - 1]), torch.randperm(blocks - 1, generator=random))).int()
    addresses = torch.tensor([pool.data_ptr() for pool in pools], device=device)
    return pools, addresses, ids.to(device)


def _copy_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    pools, addresses, ids = _pools_case(shape, dtype, device, seed)
    sources, targets = ids[: shape["n"]], ids[shape["n"] : 2 * shape["n"]]
    if shape.get("to_last"):
        sources, targets = targets, sources
    pools[:, targets.long()] = math.nan
    return Case({"pools": pools, "sources": sources, "targets": targets}, {"addresses": addresses})


def _gather_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    pools, addresses, ids = _pools_case(shape, dtype, device, seed)
    n, P, sizes = shape["n"], shape["pools"], pools.shape[2:]
    out = {"addresses": addresses, "staging": cases.poisoned(n, P, *sizes, dtype=dtype, device=device)}
    return Case({"pools": pools, "block_ids": ids[:n]}, out)


def _scatter_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    pools, addresses, ids = _pools_case(shape, dtype, device, seed)
    n, P, sizes = shape["n"], shape["pools"], pools.shape[2:]
    staging = cases.normal(n, P, *sizes, dtype=dtype, device=device, random=cases.generator(seed + 1))
    pools[:, ids[:n].long()] = math.nan
    return Case({"pools": pools, "block_ids": ids[:n], "staging": staging}, {"addresses": addresses})


def _copy(pools: Tensor, sources: Tensor, targets: Tensor, addresses: Tensor) -> Tensor:
    BlockPools(tuple(pools), addresses).copy(sources, targets)
    return pools


def _gather(pools: Tensor, block_ids: Tensor, staging: Tensor, addresses: Tensor) -> Tensor:
    BlockPools(tuple(pools), addresses).gather(block_ids, staging)
    return staging


def _scatter(pools: Tensor, block_ids: Tensor, staging: Tensor, addresses: Tensor) -> Tensor:
    BlockPools(tuple(pools), addresses).scatter(block_ids, staging)
    return pools


def _compiles(kernel: Any, **more: bool) -> tuple[Compile, ...]:
    signature = {"addresses": "*i64", "block_stride": "i32", "block_words": "i32"}
    signature |= {name: "*i32" for name in ("sources", "targets", "block_ids") if name in kernel.arg_names}
    signature |= {"staging": "*i64"} if "staging" in kernel.arg_names else {}
    compiled = {"WORD": tl.int64, "ALIGNED": True, "CHUNK": CHUNK} | more
    return (Compile(kernel, signature, compiled, NUM_WARPS, label="words of 8 bytes"),)


SMALL: tuple[Shape, ...] = (
    {"pools": 2, "blocks": 3, "B": 8, "Hkv": 1, "D": 8, "n": 0},
    {"pools": 1, "blocks": 2, "B": 1, "Hkv": 1, "D": 1, "n": 1},
    {"pools": 4, "blocks": 7, "B": 8, "Hkv": 3, "D": 80, "n": 2},
    {"pools": 2, "blocks": 5, "B": 16, "Hkv": 5, "D": 64, "n": 2, "block_gap": 3},
    {"pools": 1, "blocks": 4, "B": 2, "Hkv": 1, "D": 5, "n": 1, "block_gap": 2**30 + 1},
    {"pools": 1, "blocks": 4, "B": 2, "Hkv": 1, "D": 5, "n": 1, "block_gap": 2**30 + 1, "to_last": 1},
)
SERVED: tuple[Shape, ...] = (
    {"pools": 64, "blocks": 65, "B": 16, "Hkv": 8, "D": 128, "n": 1},
    {"pools": 64, "blocks": 65, "B": 16, "Hkv": 8, "D": 128, "n": 32},
    {"pools": 60, "blocks": 257, "B": 32, "Hkv": 3, "D": 64, "n": 128},
)


def _spec(
    name: str, summary: str, twin: Callable[..., Any], launch: Callable[..., Any], output: str, case: Any, compiles: Any
) -> KernelSpec:
    return KernelSpec(
        name=name,
        summary=summary,
        axes=("pools", "blocks", "B", "Hkv", "D", "n", "block_gap", "to_last"),
        twin=twin,
        launch=launch,
        outputs=(output,),
        make_case=case,
        small_shapes=SMALL,
        device_shapes=SERVED,
        tolerance=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), EXACT),
        bytes_moved=lambda shape, dtype: (
            2 * shape["n"] * shape["pools"] * shape["B"] * shape["Hkv"] * shape["D"] * dtype.itemsize
        ),
        flops=lambda shape, dtype: 0,
        compiles=compiles,
    )


SPECS = (
    _spec(
        "copy_blocks", "blocks to blocks", reference.copy_blocks, _copy, "pools", _copy_case,
        lambda capability: _compiles(copy_blocks_kernel),
    ),
    _spec(
        "gather_blocks", "blocks to a buffer", reference.gather_blocks, _gather, "staging", _gather_case,
        lambda capability: _compiles(stage_blocks_kernel, GATHER=True),
    ),
    _spec(
        "scatter_blocks", "a buffer to blocks", reference.scatter_blocks, _scatter, "pools", _scatter_case,
        lambda capability: _compiles(stage_blocks_kernel, GATHER=False),
    ),
)  # fmt: skip
