"""Whole blocks moved, in all layers by one launch: copy-on-write, and the two halves of swapping.

::

    copy_blocks      pool[source] ─► pool[target]                     a shared block, before one of its owners writes into it
    gather_blocks    pool[ids[i]] ─► staging[i]        then one transfer over the link to the host's memory
    scatter_blocks   staging[i]   ─► pool[ids[i]]      after one transfer back

A cache has two pools a layer, K and V, and a launch a pool would be 160 launches for a model of 80 layers. So the kernel is
given a table of the pools' addresses, and a program reads its own from there: program (i, p, c) moves chunk c of block
``ids[i]`` in pool p. A link to the host is as fast as its pieces are long, hence the staging buffer, where the blocks of all
pools lie end to end, block by block: ``[n, pools, B · Hkv · D]``.

Numbers are moved as words, the longest that block size and strides allow, whatever their dtype. Bound by memory: each byte is
read and written once. Block ids are widened to 64 bits before they are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_same, device_of
from refimpl.kernels.spec import EXACT, Case, Compile, KernelSpec, Shape

WORDS: dict[int, tl.dtype] = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""The type that so many bytes are moved as."""
CHUNK = 2048
"""Words a program moves: 16 kB of int64, 16 loads of 16 bytes in flight for each of 64 threads."""
NUM_WARPS = 4


@triton.jit
def _pool(addresses: tl.tensor, pool: tl.tensor, WORD: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Where a pool begins, as a pointer to words."""
    address = tl.load(addresses + pool)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(WORD))


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

    def staging(self, count: int) -> Tensor:
        """A buffer for so many blocks."""
        return self.pools[0].new_empty(count, len(self.pools), *self.block_shape)

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
