"""Steps that are run before an engine has a cache: to see what they take, and to have their kernels compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refimpl.attention import Setting, choose_backend
from refimpl.cache.kv_cache import KVCache
from refimpl.config import EngineArgs
from refimpl.executor.input_batch import InputBatch
from refimpl.executor.model_runner import ModelRunner
from refimpl.models.llama import LlamaForCausalLM
from refimpl.outputs import Admission, Batch, NewBlocks, SchedulerOutput
from refimpl.sampling.slots import SamplingSlots
from refimpl.sampling_numbers import SamplingNumbers


def trial_runner(
    args: EngineArgs, model: LlamaForCausalLM, dtype: torch.dtype, device: torch.device, num_seqs: int, length: int
) -> ModelRunner:
    """A runner with a cache of one block, and slots for sequences of ``length`` tokens.

    All blocks are one: it does not matter what is read, and the cache that there will be need not fit yet.
    """
    config = model.share
    return ModelRunner(
        model,
        KVCache(config, 1, args.block_size, dtype, device),
        InputBatch(num_seqs, length, args.block_size, device, SamplingSlots(num_seqs, model.config.vocab_size, device)),
        choose_backend(args.attention_backend, Setting(config.head_dim, device, dtype, args.block_size, config.windowed)),
    )


def trial_step(lengths: Sequence[int], block_size: int, sampling: SamplingNumbers, step: int = 0) -> SchedulerOutput:
    """A step that admits and computes prompts of these lengths, each of which draws a token."""
    rows = tuple(range(len(lengths)))
    return SchedulerOutput(
        step,
        Batch(step + 1, rows, rows, tuple(lengths)),
        admitted=tuple(
            Admission(row, row, (0,) * count, count, 0, seed=0, path=row, sampling=sampling)
            for row, count in enumerate(lengths)
        ),
        new_blocks=tuple(NewBlocks(row, (1,) * -(-count // block_size)) for row, count in enumerate(lengths)),
    )
