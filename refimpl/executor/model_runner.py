"""ModelRunner: one step on one device: inputs → model → sampler."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.attention.backend import AttentionBackend
from refimpl.cache.kv_cache import KVCache
from refimpl.executor.input_batch import InputBatch, StepInputs
from refimpl.models.llama import LlamaForCausalLM
from refimpl.outputs import ModelRunnerOutput, SchedulerOutput
from refimpl.sampling.sampler import sample


class ModelRunner:
    """Owns the model's and the cache's tensors, and the running batch."""

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: KVCache, input_batch: InputBatch, backend: AttentionBackend
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.input_batch = input_batch
        self.backend = backend

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step and draw its tokens."""
        self.kv_cache.swap_out(scheduler_output.swapped_out)
        self.kv_cache.swap_in(scheduler_output.swapped_in)
        self.input_batch.apply(scheduler_output)
        if not scheduler_output.batch.slots:
            return ModelRunnerOutput(())
        self.kv_cache.copy_blocks([(copy.source, copy.target) for copy in scheduler_output.copies])
        inputs = self.input_batch.prepare(scheduler_output.batch)
        hidden = self.model(
            inputs.input_ids, inputs.positions, self.kv_cache.layers, self.backend.begin_step(inputs.attention)
        )
        token_ids = self._draw(hidden, inputs)
        return self.input_batch.commit(inputs, len(scheduler_output.batch.slots), token_ids)

    def _draw(self, hidden: Float[Tensor, "T H"], inputs: StepInputs) -> Int64[Tensor, "R"]:
        """Logits only of the rows that draw: a prompt's other tokens need none."""
        if not inputs.drawing:
            return inputs.slots
        logits = self.model.compute_logits(hidden[inputs.last_tokens])
        if inputs.logits_row is not None:
            logits = logits[inputs.logits_row]
        return sample(logits, inputs.sampling)
