"""A step of random sequences over a pool that nobody else wrote, for any backend."""

import math

import torch
from asserts import assert_close

from refimpl.attention import AttentionMetadata, TorchPagedAttention
from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels import reference

TOLERANCES = {
    # rtol, atol. Values are drawn from Normal(0, 1), so outputs are averages of numbers up to about 4.
    torch.float64: (1e-12, 1e-13),  # the order of sums alone
    torch.float32: (1e-5, 2e-6),  # the order of sums, and exp in float32
    # The weights (softmax in float32) are rounded to 16 bits before the product with the values, and so is the output:
    # half a unit in the last place of each weight, times values up to 4; and half a unit of the output.
    torch.bfloat16: (2**-8, 4 * 2**-9),
    torch.float16: (2**-11, 4 * 2**-12),
}


class Case:
    """Sequences with random keys and values in a pool whose other slots, the null block's included, hold ``filling``.

    ``lens`` are pairs (queries, context). Everything but the new tokens is in the cache; ``key`` and ``value`` are theirs.
    With ``in_order`` the blocks of a sequence follow each other in the pool.
    """

    def __init__(self, lens, Hq, Hkv, D, B, dtype=torch.float64, filling=math.nan, seed=0, device="cpu", in_order=False):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.lens, self.scale = lens, D**-0.5
        blocks = [-(-context // B) for _, context in lens]
        ids = (torch.randperm(sum(blocks) + 5, generator=generator) + 1).tolist()
        ids = sorted(ids, reverse=True) if in_order else ids
        self.table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
        self.cache = LayerKV(*(torch.full((sum(blocks) + 6, B, Hkv, D), filling, dtype=dtype) for _ in range(2)))
        self.query = normal(sum(n for n, _ in lens), Hq, D)
        self.key, self.value = (normal(len(self.query), Hkv, D) for _ in range(2))
        slots = []
        for s, (n, context) in enumerate(lens):
            self.table[s, : blocks[s]] = torch.tensor([ids.pop() for _ in range(blocks[s])])
            own = [int(self.table[s, p // B]) * B + p % B for p in range(context)]
            slots += own[context - n :]
            written = torch.tensor(own[: context - n], dtype=torch.long)
            for cache in (self.cache.k, self.cache.v):
                cache.view(-1, Hkv, D)[written] = normal(context - n, Hkv, D)
        self.slot_mapping = torch.tensor(slots, device=device)
        self.table, self.query, self.key, self.value = (
            tensor.to(device) for tensor in (self.table, self.query, self.key, self.value)
        )
        self.cache = LayerKV(self.cache.k.to(device), self.cache.v.to(device))
        self.metadata = AttentionMetadata.of(
            query_lens=[n for n, _ in lens],
            context_lens=[context for _, context in lens],
            block_size=B,
            block_table=self.table,
            slot_mapping=self.slot_mapping,
        )

    def run(self, backend=None, window=None):
        """What the backend makes of it: write, then attend."""
        step = (backend or TorchPagedAttention(self.scale)).begin_step(self.metadata)
        step.write(self.cache, self.key, self.value)
        return step.attend(self.cache, self.query, *(() if window is None else (window,)))

    def expected(self, window=None):
        """The definition in float64, on the cache as it is after ``run``."""
        tensors = (self.query.double(), self.cache.k.double(), self.cache.v.double())
        return reference.paged_attention(
            *tensors, self.table, self.metadata.cu_seqlens_q, self.metadata.seqused_k, self.scale, window
        )

    def check(self, backend=None, window=None):
        got = self.run(backend, window)
        rtol, atol = TOLERANCES[self.query.dtype]
        assert got.dtype == self.query.dtype
        assert_close(got, self.expected(window), rtol, atol, what=f"attention of {self.lens} (token, head, dimension)")
