"""The swap space of a cache on a GPU: blocks go over the link to the host's memory while the GPU computes on.

::

    compute stream   … step n−1 │ gather ┐      step n … │ step n+1 …        │ wait │ scatter │ step n+2 …
    link stream                          └► staging ─► host         host ─► staging ┘
                                            swapped out in step n    swapped in for step n+2, ordered while n+1 runs

A link is as fast as its pieces are long, and a block's keys and values lie apart in all layers' pools. So a kernel gathers
them into a staging buffer, which goes over the link; what comes back is scattered. The host's blocks lie whole, one behind
the other, ``[host blocks, pools, B, Hkv, D]``: those with neighbouring numbers move as one piece.

Who waits for whom:

* the copy to the host for its gather, the scatter for its copy from the host, by an event;
* who fills a staging buffer for who emptied it last, on whichever stream that was. Swapping out, the computing waits for the
  link in no other case: up to ``STAGING_BYTES`` at a time cost it the gather alone;
* nobody for a block. All that reads or writes a host block is on one stream, in order, and all that reads or writes a device
  block on the other: what was freed may be written as soon as it is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.cache.block_moves import BlockMoves, ids_on
from refimpl.cache.host_blocks import runs
from refimpl.cache.pinned import PinnedMemory
from refimpl.cache.streams import CudaStream, Stream

STAGING_BYTES = 256 * 2**20
"""Of all staging buffers. Larger transfers go in pieces: 256 MiB are 2,048 tokens of Llama-3-8B."""
NUM_BUFFERS = 2
"""One is filled while another is emptied."""


def blocks_a_buffer(block_bytes: int, num_host_blocks: int) -> int:
    """Blocks that a staging buffer holds: its share of ``STAGING_BYTES``, and no more than could be moved."""
    most = -(-num_host_blocks // NUM_BUFFERS)
    return min(most, max(1, STAGING_BYTES // NUM_BUFFERS // block_bytes))


def staging_bytes(block_bytes: int, num_host_blocks: int) -> int:
    """Bytes of the GPU's memory that a swap space of so many blocks takes."""
    return NUM_BUFFERS * blocks_a_buffer(block_bytes, num_host_blocks) * block_bytes


class StagedBlocks:
    """A swap space behind a link.

    Args:
        moves: between the cache and a staging buffer.
        store: the host's blocks, ``[host blocks, pools, B, Hkv, D]``.
        staging: buffers of equal length, ``[n, pools, B, Hkv, D]`` each.
        compute: the stream on which steps are computed.
        link: the stream of copies over the link.

    """

    def __init__(
        self,
        moves: BlockMoves,
        store: Float[Tensor, "blocks pools B Hkv D"],
        staging: Sequence[Float[Tensor, "n pools B Hkv D"]],
        compute: Stream,
        link: Stream,
    ) -> None:
        self.store = store
        self._moves = moves
        self._compute, self._link = compute, link
        self._buffers = [_Buffer(blocks, compute) for blocks in staging]
        self._next = cycle(self._buffers)

    def swap_out(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Order copies of whole blocks to the host, (device block, host block) each, in every pool."""
        for host_ids, device_ids in self._pieces([(host, device) for device, host in transfers]):
            buffer = next(self._next)
            gather = partial(self._gather, device_ids, buffer.blocks)
            buffer.pass_on(self._compute, gather, self._link, partial(self._to_host, host_ids, buffer.blocks))

    def swap_in(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Order copies of whole blocks back, (host block, device block) each, in every pool."""
        for host_ids, device_ids in self._pieces(transfers):
            buffer = next(self._next)
            scatter = partial(self._scatter, device_ids, buffer.blocks)
            buffer.pass_on(self._link, partial(self._from_host, host_ids, buffer.blocks), self._compute, scatter)

    def release(self) -> None:
        """Give staging and store back, when the link is at rest."""
        self._link.synchronize()
        for blocks in (self.store, *(buffer.blocks for buffer in self._buffers)):
            blocks.untyped_storage().resize_(0)

    def _pieces(self, transfers: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
        """Transfers (host block, device block), as many at a time as a buffer holds; host blocks rise."""
        size = len(self._buffers[0].blocks)
        ordered = sorted(transfers)
        for first in range(0, len(ordered), size):
            piece = ordered[first : first + size]
            yield [host for host, _ in piece], [device for _, device in piece]

    def _gather(self, device_ids: list[int], staging: Tensor) -> None:
        self._moves.gather(ids_on(staging.device, device_ids), staging[: len(device_ids)])

    def _scatter(self, device_ids: list[int], staging: Tensor) -> None:
        self._moves.scatter(ids_on(staging.device, device_ids), staging[: len(device_ids)])

    def _to_host(self, host_ids: list[int], staging: Tensor) -> None:
        for host, place, count in runs(zip(host_ids, range(len(host_ids)), strict=True)):
            self.store[host : host + count].copy_(staging[place : place + count], non_blocking=True)

    def _from_host(self, host_ids: list[int], staging: Tensor) -> None:
        for host, place, count in runs(zip(host_ids, range(len(host_ids)), strict=True)):
            staging[place : place + count].copy_(self.store[host : host + count], non_blocking=True)


class _Buffer:
    """A staging buffer, which one stream fills and another empties."""

    def __init__(self, blocks: Tensor, compute: Stream) -> None:
        self.blocks = blocks
        # Its memory may have been another tensor's, of which something is still being computed.
        self._emptied = compute.record()

    def pass_on(self, filler: Stream, fill: Callable[[], None], emptier: Stream, empty: Callable[[], None]) -> None:
        """Fill it when it is empty, and empty it when it is full."""
        filler.wait(self._emptied)
        filler.run(fill)
        emptier.wait(filler.record())
        emptier.run(empty)
        self._emptied = emptier.record()


class PinnedBlocks(StagedBlocks):
    """The swap space of a cache on a GPU, in page-locked memory.

    Raises:
        OutOfMemoryError: so much memory cannot be locked.

    """

    def __init__(self, pools: list[Tensor], moves: BlockMoves, num_blocks: int) -> None:
        first = pools[0]
        block = (len(pools), *first.shape[1:])
        self._memory = PinnedMemory((num_blocks + 1, *block), first.dtype, first.device)
        size = blocks_a_buffer(first[0].nbytes * len(pools), num_blocks)
        staging = [first.new_empty(size, *block) for _ in range(NUM_BUFFERS)]
        link = torch.cuda.Stream(first.device)
        for buffer in staging:
            buffer.record_stream(link)  # whenever it is freed, that stream must be done with it
        super().__init__(moves, self._memory.tensor, staging, CudaStream(first.device), CudaStream(first.device, link))

    def release(self) -> None:
        """Give all memory back, when the link is at rest."""
        self._memory.release()  # waits for the GPU
        super().release()
