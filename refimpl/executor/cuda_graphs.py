"""CUDA graphs of decode steps: a step's hundreds of kernels, recorded once and started by one call.

A decode of a small model takes a GPU less time than Python takes to start its kernels one by one. A graph is a recording
of kernels with the addresses that they read and write, so what changes from step to step has to lie at a fixed place.
Here that is little, since a running sequence's tokens and block table already live by slot on the device::

    host      slots and contexts of the rows ──────► rows [2, R]          the only transfer of a decode
    graph     token_ids[slot, context − 1] ─► model over the paged cache ─► hidden [R, H]
                    └ positions, slots in the cache, block tables, lengths: worked out from the two, inside

Graphs are recorded for a few numbers of rows (:func:`graph_sizes`), and a step takes the next larger one. Rows that nobody
needs have a context of 0: their key and value are not written, their attention reads no block, their hidden state is not
looked at. All graphs share one pool of memory for what lies between their kernels, since only one runs at a time; the
largest is recorded first, so that the others fit into what it took.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.attention.backend import AttentionBackend, AttentionMetadata
from refimpl.cache.kv_cache import KVCache
from refimpl.executor.input_batch import InputBatch, StepInputs
from refimpl.kernels.transfer import array_to_device
from refimpl.models.llama import LlamaForCausalLM

SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
"""Numbers of rows that graphs are recorded for. Over evenly spread batches under 4% of the rows are padding."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Those of ``SIZES`` up to the first that holds ``max_num_seqs``; all, if none does."""
    return SIZES[: bisect.bisect_left(SIZES, max_num_seqs) + 1]


class DecodeStep:
    """A decode of any sequences, worked out on the device from slots and contexts that lie at a fixed place.

    Args:
        model: whose forward pass it is.
        kv_cache: its tensors' addresses are part of a recording, as are the input batch's.
        input_batch: the running sequences by slot.
        backend: must work out a step of decodes on the device (``seqused_k`` and ``block_table`` change under it).
        most_rows: the most sequences.

    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: KVCache,
        input_batch: InputBatch,
        backend: AttentionBackend,
        most_rows: int,
    ) -> None:
        self._model, self._kv_cache, self._input_batch, self._backend = model, kv_cache, input_batch, backend
        device = self.device = input_batch.device
        self.longest = input_batch.token_ids.shape[1]
        """Tokens of the longest context that a slot holds."""
        self._rows = torch.zeros(2, most_rows, dtype=torch.int64, device=device)  # slots; contexts
        self._staged = np.zeros((2, most_rows), dtype=np.int64)
        self._most_tokens = torch.arange(16, device=device)
        self._cu_seqlens_q = torch.arange(most_rows + 1, dtype=torch.int32, device=device)

    def write(self, slots: np.ndarray, contexts: np.ndarray) -> None:
        """Say which sequences are decoded, and their lengths with the tokens that are computed. Other rows are empty.

        Lengths are those that the host has, with what is unsettled.
        """
        count = len(slots)
        self._staged[0, :count], self._staged[1, :count], self._staged[1, count:] = slots, contexts, 0
        self._rows.copy_(array_to_device(self._staged, self.device))

    def forward(self, size: int, num_tokens: int = 1) -> Float[Tensor, "T H"]:
        """Hidden states of ``num_tokens`` tokens of each of the first ``size`` rows; those of empty rows mean nothing."""
        batch, B = self._input_batch, self._input_batch.block_size
        slots, contexts = self._rows[:, :size]
        used, place = (contexts > 0).unsqueeze(1), self._most_tokens[:num_tokens]
        before = batch.unsettled.lowered(contexts - num_tokens, slots)
        positions = (before.unsqueeze(1) + place).clamp(min=0)  # [size, num_tokens]
        block_table = batch.block_table[slots]
        block_ids = block_table.gather(1, positions // B).long()
        attention = AttentionMetadata(
            query_lens=[num_tokens] * size,
            context_lens=[self.longest] * size,  # the longest that may come
            block_size=B,
            block_table=block_table,
            slot_mapping=torch.where(used, block_ids * B + positions % B, -1).flatten(),
            cu_seqlens_q=self._cu_seqlens_q[: size + 1] * num_tokens,
            seqused_k=torch.where(contexts > 0, before + num_tokens, 0).int(),
        )
        input_ids = batch.token_ids[slots.unsqueeze(1), positions]
        step = self._backend.begin_step(attention)
        hidden: Tensor = self._model(input_ids.flatten(), positions.flatten(), self._kv_cache.layers, step)
        return hidden


_recording = threading.Lock()
"""Held while a graph is recorded: a recording takes in whatever comes to its stream, whichever thread it comes from."""


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """The one on which graphs are recorded: a library takes a workspace for every stream that it sees, and keeps it."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@runtime_checkable
class Step(Protocol):
    """What is recorded: work of the device alone, on numbers at a fixed place."""

    device: torch.device

    def forward(self, size: int) -> Tensor:
        """Compute the step for a size; the result."""


StepT = TypeVar("StepT", bound=Step)


class Recordings(Generic[StepT]):
    """Recordings of one step for each of ``sizes``, which rise. Others that share their ``pool`` run at other times."""

    def __init__(self, step: StepT, sizes: list[int], pool: Any = None) -> None:
        self._process = os.getpid()
        self.step = step
        self.sizes = sizes
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        gc.collect()  # an engine that is collected during a recording would ask the GPU to wait, which ends the recording
        for size in reversed(sizes):
            self.record(size)

    def run(self, place: int) -> Tensor:
        """Replay the recording of one of the sizes, by its place among them; the result lies where it always does."""
        graph, result = self._graphs[self.sizes[place]]
        graph.replay()
        return result

    def release(self) -> None:
        """Give the memory back that lies between the kernels."""
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs = {}

    def record(self, size: int) -> None:
        """Record the step for so many rows."""
        with _recording, _no_collection():
            self._record(size)

    def _record(self, size: int) -> None:
        # Before it is recorded a kernel must be compiled and a library's workspace taken, which a recording cannot hold.
        current, beside = torch.cuda.current_stream(self.step.device), _stream_beside(self.step.device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            self.step.forward(size)
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of the GPU meanwhile, as another engine does, is no part of this, and no mistake.
        with torch.cuda.graph(graph, pool=self.pool, stream=beside, capture_error_mode="thread_local"):
            hidden = self.step.forward(size)
        self._graphs[size] = graph, hidden

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        """In a child that was forked off, the graphs are its parent's: ending them there would be a warning each."""
        if getpid() != self._process:
            for graph, _ in self._graphs.values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))


class DecodeGraphs(Recordings[DecodeStep]):
    """Recordings of one decode step for each of ``sizes``, numbers of rows."""

    def serves(self, inputs: StepInputs) -> bool:
        """Whether a step is one of decodes alone (or of last tokens of prompts), and not too large."""
        return inputs.one_token_each and len(inputs.row_slots) <= self.sizes[-1]

    def replay(self, slots: np.ndarray, contexts: np.ndarray) -> Float[Tensor, "S H"]:
        """Hidden states of the rows' last tokens. The next replay, of any size, may overwrite them."""
        self.step.write(slots, contexts)
        return self.run(bisect.bisect_left(self.sizes, len(slots)))[: len(slots)]
