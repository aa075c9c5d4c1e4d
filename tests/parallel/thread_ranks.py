"""Ranks as threads of one process: every collective meets at a barrier. For tests of what a rank computes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

PATIENCE = 240.0


class ThreadRanks:
    def __init__(self, rank, size, shared):
        self.rank, self.size, self.here, self._shared = rank, size, size, shared
        self.calls = []

    def _all(self, x, kind):
        self.calls.append((kind, x.nbytes))
        barrier, slots = self._shared
        slots[self.rank] = x
        barrier.wait(PATIENCE)
        found = [one.clone() for one in slots]
        barrier.wait(PATIENCE)
        return found

    def all_reduce(self, x):
        return torch.stack(self._all(x, "all_reduce")).sum(0)

    def all_gather(self, x):
        return torch.stack(self._all(x, "all_gather"))

    def broadcast(self, x):
        return self._all(x, "broadcast")[0]

    def least(self, value):
        return min(int(one) for one in self._all(torch.tensor(value), "least"))

    def muted(self):
        return nullcontext()


def on_ranks(size, work):
    """What ``work(ranks)`` gives on each of so many threads."""
    barrier, slots = threading.Barrier(size), [None] * size

    def run(rank):
        try:
            return work(ThreadRanks(rank, size, (barrier, slots)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
