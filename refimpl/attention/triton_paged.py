"""Attention by refimpl's own Triton kernels: a step's decodes and its prefills, each by the kernel made for them.

::

    queries a sequence      kernel                       which way it is spread over the GPU
    1 … 16                  kernels/paged_attention.py   along the context: splits, planned on the device
    more                    kernels/flash_attention.py   along the queries: tiles, planned on the host

A step of decodes alone asks the host for nothing but bounds, so a CUDA graph of it can be replayed for other lengths: with
``cu_seqlens_q``, ``seqused_k``, ``block_table`` and ``slot_mapping`` written anew in place. A padded row has one query, no
context (``seqused_k`` 0) and a slot below 0: it reads and writes nothing, and its output is 0.

On a T4 (sm_75), for which Triton has no tensor-core products, prefills go to torch's attention on gathered pages.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.attention.backend import LEAST_FOR_PREFILL, AttentionMetadata
from refimpl.attention.torch_paged import TorchPagedAttention, TorchPagedStep
from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels.attention_tiles import Target, target_of
from refimpl.kernels.flash_attention import cut_queries, flash_attention, plan_prefill, prefill_tiles
from refimpl.kernels.kv_write import turn_and_write_kv, write_kv
from refimpl.kernels.launch import power_of_two
from refimpl.kernels.paged_attention import MAX_QUERIES, paged_attention, plan_decode
from refimpl.kernels.split_plan import SplitPlan
from refimpl.kernels.transfer import to_device


class TritonPagedStep:
    """One step, ready for every layer. What depends on the heads or a window is planned in the first layer that has them."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        softmax_scale: float,
        target: Target,
        torch_backend: TorchPagedAttention,
        tiles: Int[Tensor, "tiles 2"] | None = None,
    ) -> None:
        self._metadata = metadata
        self._scale = softmax_scale
        self._target = target
        self._by_torch: tuple[Int[Tensor, "rows"], TorchPagedStep] | None = None
        self._splits: dict[int | None, SplitPlan] = {}
        """By window."""
        self._tiles = tiles
        if tiles is not None:  # who has more than one query is in them
            self._decode_queries, self._prefills = 1, [0]
            return
        decodes = [n for n in metadata.query_lens if n <= MAX_QUERIES]
        # A power of two, so that few kernels are compiled.
        self._decode_queries = power_of_two(max(decodes)) if any(decodes) else 0
        self._prefills = [s for s, n in enumerate(metadata.query_lens) if n > MAX_QUERIES]
        if self._prefills and target.capability < LEAST_FOR_PREFILL:
            self._by_torch = _part_for_torch(metadata, self._prefills, torch_backend)

    def write(self, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]) -> None:
        """Store the new tokens' keys and values in their slots. Mutates ``layer_kv``."""
        write_kv(key, value, layer_kv.k, layer_kv.v, self._metadata.slot_mapping)

    def turn_and_write(
        self,
        layer_kv: LayerKV,
        query: Float[Tensor, "T Hq D"],
        key: Float[Tensor, "T Hkv D"],
        value: Float[Tensor, "T Hkv D"],
        positions: Int[Tensor, "T"],
        cos: Float[Tensor, "P half"],
        sin: Float[Tensor, "P half"],
    ) -> Float[Tensor, "T Hq D"]:
        """Turn queries and keys by position, and write as :meth:`write` does, in one launch. Gives the queries, turned."""
        turned, _, _ = turn_and_write_kv(
            query, key, value, positions, cos, sin, layer_kv.k, layer_kv.v, self._metadata.slot_mapping
        )
        return turned

    def attend(
        self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"], window: int | None = None
    ) -> Float[Tensor, "T Hq D"]:
        """Attention of each new token over its sequence's tokens up to itself, or over the last ``window`` of them."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._decode_queries:
            self._decode(layer_kv, query, output, window)
        if self._by_torch is not None:
            tokens, step = self._by_torch
            output.index_copy_(0, tokens, step.attend(layer_kv, query.index_select(0, tokens), window))
        elif self._prefills:
            self._prefill(layer_kv, query, output, window)
        return output

    def _decode(self, layer_kv: LayerKV, query: Tensor, output: Tensor, window: int | None) -> None:
        step = self._metadata
        if window not in self._splits:
            self._splits[window] = plan_decode(
                query.shape[1],
                layer_kv.k.shape[2],
                query.shape[2],
                query.dtype,
                step.cu_seqlens_q,
                step.seqused_k,
                self._decode_queries,
                step.max_seqlen_k,
                self._target,
                window,
            )
        lengths = (step.block_table, step.cu_seqlens_q, step.seqused_k)
        paged_attention(query, layer_kv.k, layer_kv.v, *lengths, self._scale, self._splits[window], output, self._target)

    def _prefill(self, layer_kv: LayerKV, query: Tensor, output: Tensor, window: int | None) -> None:
        step = self._metadata
        if self._tiles is None:
            self._tiles = plan_prefill(
                query.shape[2],
                query.dtype,
                step.query_lens,
                step.context_lens,
                query.device,
                serve_above=MAX_QUERIES,
                target=self._target,
            )
        lengths = (step.block_table, step.cu_seqlens_q, step.seqused_k)
        flash_attention(query, layer_kv.k, layer_kv.v, *lengths, self._scale, self._tiles, output, self._target, window)


def _part_for_torch(
    metadata: AttentionMetadata, sequences: list[int], backend: TorchPagedAttention
) -> tuple[Int[Tensor, "rows"], TorchPagedStep]:
    """Some sequences of a step as a step of torch's backend, and their tokens in the flat batch."""
    device = metadata.block_table.device
    first = torch.tensor([0, *metadata.query_lens]).cumsum(0).tolist()
    tokens = to_device(torch.cat([torch.arange(first[s], first[s + 1]) for s in sequences]), device)
    part = AttentionMetadata.of(
        query_lens=[metadata.query_lens[s] for s in sequences],
        context_lens=[metadata.context_lens[s] for s in sequences],
        block_size=metadata.block_size,
        block_table=metadata.block_table[to_device(torch.tensor(sequences), device)],
        slot_mapping=metadata.slot_mapping[tokens],
    )
    return tokens, backend.begin_step(part)


class TritonPagedAttention:
    """The backend ``triton``."""

    name = "triton"
    serves_windows = True
    decodes_on_device = True
    """Whether a step of decodes is worked out from what stands on the device, so that a CUDA graph may hold it."""

    def __init__(self, softmax_scale: float, device: torch.device, target: Target | None = None) -> None:
        self._scale = softmax_scale
        self._target = target or target_of(device)
        self._torch = TorchPagedAttention(softmax_scale)

    def begin_step(self, metadata: AttentionMetadata) -> TritonPagedStep:
        """Sort a step's sequences by the kernel that serves them."""
        return TritonPagedStep(metadata, self._scale, self._target, self._torch)

    @property
    def prompts_on_device(self) -> bool:
        """Whether the same holds of steps with prompts, once their tiles are cut (:class:`RecordsPrompts`)."""
        return self._target.capability >= LEAST_FOR_PREFILL

    def queries_a_tile(self, head_dim: int, dtype: torch.dtype) -> int:
        """New tokens of a sequence that one program takes."""
        return prefill_tiles(self._target.capability, head_dim, dtype).tile_m

    def cut_prompts(
        self, head_dim: int, dtype: torch.dtype, query_lens: list[int], context_lens: list[int]
    ) -> list[tuple[int, int]]:
        """(sequence, first query) of each tile, of the sequences with more than one query."""
        return cut_queries(query_lens, context_lens, 1, self.queries_a_tile(head_dim, dtype))

    def begin_recorded(self, metadata: AttentionMetadata, tiles: Int[Tensor, "tiles 2"]) -> TritonPagedStep:
        """A step of which the host knows bounds alone: single queries are planned on the device, others are in ``tiles``."""
        return TritonPagedStep(metadata, self._scale, self._target, self._torch, tiles)
