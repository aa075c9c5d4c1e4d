"""ModelRunner: one step on one device: inputs → model → sampler."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.attention.backend import AttentionBackend
from refimpl.cache.kv_cache import KVCache
from refimpl.executor.cuda_graphs import DecodeGraphs, DecodeStep
from refimpl.executor.input_batch import InputBatch, StepInputs
from refimpl.executor.pending import PendingOutput
from refimpl.executor.readout import read_row
from refimpl.kernels.transfer import to_device
from refimpl.models.llama import LlamaForCausalLM
from refimpl.outputs import ModelRunnerOutput, SchedulerOutput
from refimpl.row_extras import RowExtras
from refimpl.sampling.logprobs import token_logprobs
from refimpl.sampling.sampler import Sampler


class ModelRunner:
    """Owns the model's and the cache's tensors, and the running batch."""

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: KVCache, input_batch: InputBatch, backend: AttentionBackend
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.input_batch = input_batch
        self.backend = backend
        self.sampler = Sampler()
        self.graphs: DecodeGraphs | None = None
        """Recorded steps of decodes alone; on a GPU, once they are captured."""

    @torch.inference_mode()
    def capture(self, sizes: list[int]) -> None:
        """Record CUDA graphs for decode steps of up to so many sequences each."""
        self.graphs = DecodeGraphs(self.decode_step(sizes[-1]), sizes)

    def decode_step(self, most_rows: int) -> DecodeStep:
        """A decode of up to so many sequences, to be recorded."""
        return DecodeStep(self.model, self.kv_cache, self.input_batch, self.backend, most_rows)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, draw its tokens, and wait for them."""
        return self.launch(scheduler_output).result()

    @torch.inference_mode()
    def launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Order one step: on a GPU it is computed after those before it, and nothing here waits for it."""
        self.kv_cache.swap_out(scheduler_output.swapped_out)
        self.kv_cache.swap_in(scheduler_output.swapped_in)
        self.input_batch.apply(scheduler_output)
        if not scheduler_output.batch.slots:
            return PendingOutput(0, [], None, {})
        self.kv_cache.copy_blocks([(copy.source, copy.target) for copy in scheduler_output.copies])
        inputs = self.input_batch.prepare(scheduler_output.batch)
        hidden = self._hidden(inputs)
        extras = {
            read.row: read_row(
                read, hidden, self.input_batch.token_ids, self.model.compute_logits, self.model.config.vocab_size
            )
            for read in inputs.reads
        }
        token_ids = self._draw(hidden, inputs, extras)
        return self.input_batch.commit(inputs, token_ids, extras)

    def _hidden(self, inputs: StepInputs) -> Float[Tensor, "T H"]:
        """The model's hidden states: a step of decodes alone by a recorded graph, where there is one."""
        if self.graphs is not None and self.graphs.serves(inputs):
            return self.graphs.replay(inputs.row_slots, inputs.contexts)
        tokens = self.input_batch.model_inputs(inputs)
        attention = self.backend.begin_step(tokens.attention)
        hidden: Tensor = self.model(tokens.input_ids, tokens.positions, self.kv_cache.layers, attention)
        return hidden

    def _draw(self, hidden: Float[Tensor, "T H"], inputs: StepInputs, extras: dict[int, RowExtras]) -> Int64[Tensor, "R"]:
        """Logits only of the rows that draw: a prompt's other tokens need none. What is told of them joins ``extras``."""
        if not inputs.drawing:
            return inputs.slots
        logits = self.model.compute_logits(hidden[inputs.last_tokens])
        if inputs.logits_row is not None:
            logits = logits[inputs.logits_row]
        sampled = self.sampler.sample(logits, inputs.sampling)
        for row, failure in sampled.failures.items():
            _join(extras, inputs.drawing[row], failure=failure)
        if asked := list(inputs.logprobs):
            rows = to_device(torch.tensor(asked), logits.device)
            token_ids = sampled.token_ids[rows].clamp(min=0)  # a row that failed has none
            found = token_logprobs(logits[rows], token_ids, list(inputs.logprobs.values()))
            for row, logprobs in zip(asked, found, strict=True):
                _join(extras, inputs.drawing[row], logprobs=logprobs)
        return sampled.token_ids


def _join(extras: dict[int, RowExtras], row: int, **found: Any) -> None:
    """Add something to what a row sends back."""
    extras[row] = msgspec.structs.replace(extras.get(row, RowExtras()), **found)
