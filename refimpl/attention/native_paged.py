"""On a CPU with a C++ compiler: few tokens of a sequence read keys and values where they lie, page by page.

These are decodes, and drafts that are checked. :mod:`refimpl.attention.torch_paged` gathers pages first; it has the prompts
of a step, whose many tokens make large products, and dtypes that differ from the cache's. Queries and keys are turned on
their way to the cache, in one pass.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.attention.backend import AttentionMetadata
from refimpl.attention.torch_paged import TorchPagedAttention, TorchPagedStep
from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels.native import by_native, function

MOST_TOKENS = 16
"""New tokens of a sequence, each of which reads its keys by itself: the most drafts of a round, and one."""


class NativePagedStep(TorchPagedStep):
    """One step's lengths and tables, as the compiled operations read them."""

    def __init__(self, metadata: AttentionMetadata, softmax_scale: float, scratch: list[Tensor | None]) -> None:
        super().__init__(metadata, softmax_scale, scratch)
        self._slots = metadata.slot_mapping.long().contiguous()
        self._table = metadata.block_table.long().contiguous()
        self._threads = torch.get_num_threads()
        self._angles: tuple[Tensor, Tensor] | None = None
        query_lens = np.array(metadata.query_lens)
        few = query_lens <= MOST_TOKENS
        ends, of_few = query_lens.cumsum(), np.repeat(few, query_lens)
        self._rows = np.flatnonzero(of_few)
        """The tokens of the flat batch that are served here."""
        self._sequences = np.repeat(np.flatnonzero(few), query_lens[few])
        ahead = ends[self._sequences] - 1 - self._rows
        self._contexts = metadata.seqused_k.numpy()[self._sequences] - ahead
        """What each of them sees, itself included."""
        self._prompts: tuple[Tensor, TorchPagedStep] | None = None
        """The rows of longer ones, and the step that they make by themselves."""
        if few.any() and not few.all():
            rows, theirs = torch.from_numpy(np.flatnonzero(~of_few)), _of_sequences(metadata, np.flatnonzero(~few))
            self._prompts = rows, TorchPagedStep(theirs, softmax_scale, scratch)

    def turn_and_write_heads(
        self,
        layer_kv: LayerKV,
        heads: Float[Tensor, "T heads D"],
        num_heads: int,
        cos: Float[Tensor, "T 1 1 half"],
        signed_sin: Float[Tensor, "T 1 2 half"],
    ) -> Float[Tensor, "T Hq D"] | None:
        """Turn queries and keys, store keys and values; gives the queries. None, and nothing done, where torch is to.

        Mutates ``layer_kv``.
        """
        if heads.dtype != layer_kv.k.dtype or not by_native(heads) or layer_kv.k.stride()[-2:] != (heads.shape[2], 1):
            return None
        if self._angles is None:
            self._angles = cos.float().contiguous(), signed_sin.float().contiguous()
        tokens, _, head_dim = heads.shape
        query = heads.new_empty(tokens, num_heads, head_dim)
        keys, values = layer_kv.k, layer_kv.v
        function("turn_and_write", heads.dtype)(
            tokens, num_heads, keys.shape[2], head_dim, keys.shape[1], self._threads, heads.data_ptr(),
            self._angles[0].data_ptr(), self._angles[1].data_ptr(), query.data_ptr(), keys.data_ptr(), values.data_ptr(),
            keys.stride(0), keys.stride(1), self._slots.data_ptr(),
        )  # fmt: skip
        return query

    def attend(
        self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"], window: int | None = None
    ) -> Float[Tensor, "T Hq D"]:
        """Attention of each new token over its sequence's tokens up to itself, or over the last ``window`` of them."""
        keys, values = layer_kv.k, layer_kv.v
        served = len(self._rows) and query.dtype == keys.dtype and keys.stride()[-2:] == (query.shape[2], 1)
        if not served or not by_native(query):
            return super().attend(layer_kv, query, window)
        (_, Hq, D), Hkv = query.shape, keys.shape[2]
        output = torch.empty_like(query)
        function("attend_rows", query.dtype)(
            len(self._rows), Hkv, Hq // Hkv, D, keys.shape[1], window or 0, self._scale, self._threads,
            query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1),
            self._table.data_ptr(), self._table.stride(0), self._rows.ctypes.data, self._sequences.ctypes.data,
            self._contexts.ctypes.data, output.data_ptr(),
        )  # fmt: skip
        if self._prompts is not None:
            rows, step = self._prompts
            output[rows] = step.attend(layer_kv, query[rows], window)
        return output


def _of_sequences(metadata: AttentionMetadata, chosen: np.ndarray) -> AttentionMetadata:
    """What some sequences alone attend to; nothing is written by it."""
    query_lens, context_lens = ([lens[s] for s in chosen.tolist()] for lens in (metadata.query_lens, metadata.context_lens))
    table = metadata.block_table[torch.from_numpy(chosen)]
    nowhere = metadata.slot_mapping.new_full((sum(query_lens),), -1)
    return AttentionMetadata.of(query_lens, context_lens, metadata.block_size, table, nowhere)


class NativePagedAttention(TorchPagedAttention):
    """The backend of a CPU that has a compiler."""

    name = "native"

    def begin_step(self, metadata: AttentionMetadata) -> NativePagedStep:
        """Read a step's lengths and tables."""
        return NativePagedStep(metadata, self._scale, self._scratch)
