"""What a GPU needs beside weights and cache, found by running it once before the cache is sized: a step, and CUDA graphs."""

from __future__ import annotations

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


def step_bytes(
    args: EngineArgs, model: LlamaForCausalLM, dtype: torch.dtype, device: torch.device, max_num_seqs: int, num_tokens: int
) -> int:
    """Peak bytes of a step with the longest prompt that fits it, and of the logits of a full batch."""
    num_blocks = -(-num_tokens // args.block_size)
    runner = _runner(args, model, dtype, device, 1, num_blocks, num_blocks * args.block_size + 1)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    sequence = Admission(0, 0, (0,) * num_tokens, num_tokens, 0, 0, 0, sampling=SamplingNumbers(top_p=0.5))
    blocks = NewBlocks(0, tuple(range(1, num_blocks + 1)))
    runner.execute(SchedulerOutput(0, Batch(1, (0,), (0,), (num_tokens,)), admitted=(sequence,), new_blocks=(blocks,)))
    # A row that is adjusted, filtered and sampled holds up to about nine copies of its float32 logits.
    logits = 9 * 4 * max_num_seqs * model.config.vocab_size
    return int(torch.cuda.max_memory_allocated(device) - before) + logits


def graph_bytes(
    args: EngineArgs,
    model: LlamaForCausalLM,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
    max_model_len: int,
) -> int:
    """Bytes that CUDA graphs of these sizes take, for contexts of up to ``max_model_len`` tokens.

    The largest is recorded, and a small one, as which the others count.
    """
    runner = _runner(args, model, dtype, device, sizes[-1], 1, max_model_len)
    taken = []
    for recorded in ([sizes[-1]], [sizes[0], sizes[-1]]):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(device)[0]
        runner.capture(recorded)
        torch.cuda.synchronize(device)
        taken.append(before - torch.cuda.mem_get_info(device)[0])
        assert runner.graphs is not None
        runner.graphs.release()
        runner.graphs = None
    largest, both = taken
    return largest + max(0, both - largest) * (len(sizes) - 1)


def _runner(
    args: EngineArgs,
    model: LlamaForCausalLM,
    dtype: torch.dtype,
    device: torch.device,
    num_seqs: int,
    num_blocks: int,
    length: int,
) -> ModelRunner:
    """A runner with a small cache of its own, and slots for sequences of ``length`` tokens."""
    config = model.config
    return ModelRunner(
        model,
        KVCache(config, num_blocks, args.block_size, dtype, device),
        InputBatch(num_seqs, length, args.block_size, device, SamplingSlots(num_seqs, config.vocab_size, device)),
        choose_backend(args.attention_backend, Setting(config.head_dim, device, dtype, args.block_size)),
    )
