"""Random swapping beside computing, in two streams, held against the same done at once. For tests of swap spaces.

A program frees blocks by swapping them out and writes them in the same step, brings others back and reads them in the same
step, and reuses host blocks in the next. Nothing is waited for until the end.
"""

import random

import torch

from refimpl.cache.block_moves import ids_on

DEVICE_BLOCKS, HOST_BLOCKS = 9, 7


class Program:
    """Runs steps on a swap space, and on an oracle that is nothing but copies.

    ``between`` is called between a step's parts, to delay a stream.
    """

    def __init__(self, blocks, pools, compute, between=lambda: None):
        self.blocks, self.pools, self.compute, self.between = blocks, pools, compute, between
        self.device = [pool.cpu().clone() for pool in pools]
        self.host = {}
        self.read, self.expected = [], []

    def run(self, seed, steps=12):
        """A program of so many steps."""
        rng = random.Random(seed)
        for _ in range(steps):
            free = [host for host in range(1, HOST_BLOCKS + 1) if host not in self.host]
            if rng.random() < 0.5 and free:
                hosts = rng.sample(free, rng.randint(1, len(free)))
                self.swap_out(list(zip(rng.sample(range(1, DEVICE_BLOCKS + 1), len(hosts)), hosts, strict=True)), rng)
            elif self.host:
                hosts = rng.sample(sorted(self.host), rng.randint(1, len(self.host)))
                self.swap_in(list(zip(hosts, rng.sample(range(1, DEVICE_BLOCKS + 1), len(hosts)), strict=True)))
            self.between()

    def swap_out(self, transfers, rng):
        """A victim goes, and others write into its blocks in the same step."""
        self.blocks.swap_out(transfers)
        self.between()
        written = [device for device, _ in transfers]
        number = rng.random()
        self.compute.run(lambda: self._write(written, number))
        for device, host in transfers:
            self.host[host] = [pool[device].clone() for pool in self.device]
        for pool in self.device:
            pool[written] = number

    def swap_in(self, transfers):
        """A victim comes back, and is read in the same step. Its host blocks are free."""
        self.blocks.swap_in(transfers)
        self.between()
        ids = [device for _, device in transfers]
        self.compute.run(lambda: self._read(ids))
        for host, device in transfers:
            for pool, block in zip(self.device, self.host.pop(host), strict=True):
                pool[device] = block
        self.expected.append([pool[ids].clone() for pool in self.device])

    def _write(self, written, number):
        ids = ids_on(self.pools[0].device, written).long()
        for pool in self.pools:
            pool.index_fill_(0, ids, number)

    def _read(self, read):
        ids = ids_on(self.pools[0].device, read)
        self.read.append([pool.index_select(0, ids) for pool in self.pools])

    def differences(self):
        """What is not as the oracle has it; to be asked when all streams are at rest."""
        found = []
        for step, (read, expected) in enumerate(zip(self.read, self.expected, strict=True)):
            found += [("read", step) for a, b in zip(read, expected, strict=True) if not same(a.cpu(), b)]
        found += [
            ("device", n) for n, (a, b) in enumerate(zip(self.pools, self.device, strict=True)) if not same(a.cpu(), b)
        ]
        for host, pools in self.host.items():
            found += [("host", host) for n, pool in enumerate(pools) if not same(self.blocks.store[host, n].cpu(), pool)]
        return found


def same(a, b):
    """Bit-equal, where a NaN is a NaN."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def pools_of(count, dtype, device="cpu"):
    """Pools of random numbers, but for NaN in the null block."""
    shape = (DEVICE_BLOCKS + 1, 4, 2, 8)
    pools = [torch.rand(shape, generator=torch.Generator().manual_seed(n)).to(dtype).to(device) for n in range(count)]
    for pool in pools:
        pool[0] = torch.nan
    return pools
