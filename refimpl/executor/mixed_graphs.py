"""CUDA graphs of mixed steps: prompts beside decodes, up to a number of tokens.

Such a step is as many kernels as any other. Of a few hundred tokens a GPU computes it in less time than Python takes to
start them, and everybody who decodes waits for Python. What changes from step to step again lies at a fixed place; the
tokens are told apart on the device::

    host      slots, contexts and new tokens of the rows; tiles of the prompts' attention ──► numbers [3 · rows + 2 · tiles]
    graph     token t ─► its row (the first that ends after t) ─► its position ─► its id, its slot in the cache
              └ model over the paged cache ─► hidden [T, H]

A step takes the recording of the next larger number of tokens. The tokens that are too many belong to a row without
context, and so do the tiles: their keys and values are not written, their attention is 0, and nobody looks at their hidden
states.
"""

from __future__ import annotations

import bisect

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.attention.backend import AttentionMetadata, RecordsPrompts
from refimpl.cache.kv_cache import KVCache
from refimpl.executor.cuda_graphs import Recordings
from refimpl.executor.input_batch import InputBatch, StepInputs
from refimpl.kernels.transfer import array_to_device
from refimpl.models.llama import LlamaForCausalLM

TOKENS = [*range(64, 1025, 64), *range(1152, 2049, 128)]
"""Numbers of tokens that graphs are recorded for. Beyond them a GPU computes for longer than Python starts kernels."""
FEW_ROWS = 128
"""Each number of tokens is recorded for so many rows, and for all that there may be: empty rows cost a little a layer."""
MOST_PROMPTS = 16
"""Prompts of a step, at most: each may leave one tile partly empty."""


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Those of ``TOKENS`` up to the first that holds ``max_num_batched_tokens``; all, if none does."""
    return TOKENS[: bisect.bisect_left(TOKENS, max_num_batched_tokens) + 1]


def recorded_sets(token_sizes: list[int], most_rows: int) -> list[tuple[int, list[int]]]:
    """Numbers of rows, rising, and for each the numbers of tokens that graphs are recorded for."""
    few = min(FEW_ROWS, most_rows)
    sets = [(few, token_sizes), (most_rows, [size for size in token_sizes if size > few])]
    return sets if most_rows > few and sets[1][1] else sets[:1]


class MixedStep:
    """A step of prompts and decodes, worked out on the device from numbers that lie at a fixed place.

    Args:
        model: whose forward pass it is.
        kv_cache: its tensors' addresses are part of a recording, as are the input batch's.
        input_batch: the running sequences by slot.
        backend: must take the tiles of the prompts as they lie on the device.
        most_rows: the most sequences.
        most_tokens: the most tokens.

    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: KVCache,
        input_batch: InputBatch,
        backend: RecordsPrompts,
        most_rows: int,
        most_tokens: int,
    ) -> None:
        self._model, self._kv_cache, self._input_batch, self._backend = model, kv_cache, input_batch, backend
        device = self.device = input_batch.device
        self.most_rows = most_rows
        self._head = (model.config.head_dim, kv_cache.layers[0].k.dtype)
        self._tile = backend.queries_a_tile(*self._head)
        tiles = self._num_tiles(most_tokens)
        self._staged = np.zeros(3 * (most_rows + 1) + 2 * tiles, dtype=np.int64)
        self._numbers = torch.zeros(len(self._staged), dtype=torch.int64, device=device)
        self._token = torch.arange(most_tokens, device=device)

    def rows_of(self, size: int) -> int:
        """Rows that a recording of so many tokens knows; the one after them is empty."""
        return min(size, self.most_rows)

    def _num_tiles(self, num_tokens: int) -> int:
        return num_tokens // self._tile + MOST_PROMPTS + 1

    def write(self, size: int, slots: np.ndarray, contexts: np.ndarray, query_lens: np.ndarray) -> None:
        """Say which sequences are computed, their lengths after the step, and how many tokens of each, for a recording."""
        count, rows = len(slots), self._staged[: 3 * (self.most_rows + 1)].reshape(3, -1)
        rows[:, :count], rows[:, count:] = (slots, contexts, query_lens), 0
        cut = self._backend.cut_prompts(*self._head, query_lens.tolist(), contexts.tolist())
        tiles = self._staged[rows.size :].reshape(-1, 2)
        tiles[: len(cut)], tiles[len(cut) :] = np.reshape(cut, (-1, 2)), (self.rows_of(size), 0)
        self._numbers.copy_(array_to_device(self._staged, self.device))

    def forward(self, size: int) -> Float[Tensor, "size H"]:
        """Hidden states of the step's tokens, in the order of its rows; those beyond them mean nothing."""
        batch, B = self._input_batch, self._input_batch.block_size
        rows, empty = 3 * (self.most_rows + 1), self.rows_of(size)
        slots, contexts, query_lens = self._numbers[:rows].view(3, -1)[:, : empty + 1]
        tiles = self._numbers[rows:].view(-1, 2)[: self._num_tiles(size)]
        ends, token = query_lens.cumsum(0), self._token[:size]
        row = torch.searchsorted(ends, token, right=True).clamp(max=empty)
        real = token < ends[-1]
        positions = torch.where(real, (contexts - ends)[row] + token, 0)
        slot = slots[row]
        L, blocks = batch.token_ids.shape[1], batch.block_table.shape[1]
        block_ids = batch.block_table.view(-1)[slot * blocks + positions // B].long()
        attention = AttentionMetadata(
            query_lens=[1] * (empty + 1),
            context_lens=[L] * (empty + 1),  # the longest that may come
            block_size=B,
            block_table=batch.block_table[slots],
            slot_mapping=torch.where(real, block_ids * B + positions % B, -1),
            cu_seqlens_q=torch.cat((ends.new_zeros(1), ends[:-1], ends.new_full((1,), size))).int(),
            seqused_k=contexts.int(),
        )
        input_ids: Int64[Tensor, "size"] = batch.token_ids.view(-1)[slot * L + positions]
        step = self._backend.begin_recorded(attention, tiles.int())
        hidden: Tensor = self._model(input_ids, positions, self._kv_cache.layers, step)
        return hidden


class MixedGraphs(Recordings[MixedStep]):
    """Recordings of a mixed step for each of ``sizes``, numbers of tokens, which rise."""

    def serves(self, inputs: StepInputs) -> bool:
        """Whether a step is small enough, and of few enough prompts."""
        fits = len(inputs.query_lens) <= self.step.most_rows and _tokens_or_rows(inputs) <= self.sizes[-1]
        return bool(fits and (inputs.query_lens > 1).sum() <= MOST_PROMPTS)

    def replay(self, inputs: StepInputs) -> Float[Tensor, "T H"]:
        """Hidden states of the step's tokens. The next replay, of any size, may overwrite them."""
        place = bisect.bisect_left(self.sizes, _tokens_or_rows(inputs))
        self.step.write(self.sizes[place], inputs.row_slots, inputs.contexts, inputs.query_lens)
        return self.run(place)[: int(inputs.query_lens.sum())]


def _tokens_or_rows(inputs: StepInputs) -> int:
    """The larger of the two: a row may compute no token."""
    return max(int(inputs.query_lens.sum()), len(inputs.query_lens))
