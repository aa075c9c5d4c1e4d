"""What a GPU needs beside weights and cache, found by running it once before the cache is sized: a step, and CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import itertools

import torch

from refimpl.config import EngineArgs, ModelConfig
from refimpl.executor import memory
from refimpl.executor.cuda_graphs import DecodeGraphs
from refimpl.executor.device_memory import DeviceMemory, Grows, Quantised
from refimpl.executor.draft_weights import DraftWeights
from refimpl.executor.mixed_graphs import MixedGraphs
from refimpl.executor.trial import trial_runner, trial_step
from refimpl.model_shares import share_of
from refimpl.models.llama import LlamaForCausalLM
from refimpl.quantization.choose import choose_method, methods_for
from refimpl.quantization.method import LinearMethod, bytes_of_any_dtype, weight_bytes
from refimpl.sampling_numbers import SamplingNumbers

LEAST_TOKENS = 16
"""A step that does not fit is halved down to this; from what the smaller one takes it is reckoned what the larger would."""
SAMPLED_GRAPHS = 4
"""Graphs recorded beside the largest, to see what each further one takes."""


def before_loading(
    args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device, draft: DraftWeights | None = None
) -> DeviceMemory:
    """The sums before anything is loaded: what is on the card, and what is known of the engine by arithmetic.

    Weights and cache of what drafts count with the model's; they are in ``dtype`` however its own are held.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    max_num_seqs, max_num_batched_tokens = args.step_limits()
    given = args.num_gpu_blocks_override is not None or args.kv_cache_memory_bytes is not None
    method = choose_method(args.quantization, device, config, ranks=args.tensor_parallel_size)
    vocab_size, config = config.vocab_size, share_of(config, args.tensor_parallel_size)
    drafts = 0 if draft is None else draft.weight_bytes(dtype.itemsize)
    drafted = 0 if draft is None else draft.block_bytes(args.block_size, dtype.itemsize)
    return DeviceMemory(
        total=total,
        taken=total - free,
        of_this_process=torch.cuda.memory_reserved(device),
        weights=weight_bytes(config, method, dtype.itemsize) + drafts,
        weights_of_any_dtype=bytes_of_any_dtype(config, method),
        smaller=_smaller(method, config, dtype, device, drafts),
        activations=Grows() if given else Grows(each=memory.activation_bytes_per_token(config, dtype.itemsize)),
        vocab_size=vocab_size,
        block_bytes=memory.block_bytes(config, args.block_size, dtype.itemsize) + drafted,
        block_size=args.block_size,
        bytes_per_value=dtype.itemsize,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=args.max_model_len or config.context_limit(),
        gpu_memory_utilization=args.gpu_memory_utilization,
        measured=not given,
    )


def _smaller(
    method: LinearMethod, config: ModelConfig, dtype: torch.dtype, device: torch.device, drafts: int
) -> tuple[Quantised, ...]:
    """What other methods would make of weights that are in 16 bits or more: those that the device and the sizes allow."""
    return tuple(
        Quantised(one.name, weight_bytes(config, one, dtype.itemsize) + drafts, bytes_of_any_dtype(config, one))
        for one in ([] if method.name else methods_for(device, config))
    )


def with_weights(before: DeviceMemory, device: torch.device) -> DeviceMemory:
    """The sums once the weights are loaded, which round up to the allocator's pieces."""
    torch.cuda.empty_cache()
    return before.with_(weights=max(before.weights, torch.cuda.memory_reserved(device) - before.of_this_process))


def measured(
    loaded: DeviceMemory,
    args: EngineArgs,
    model: LlamaForCausalLM,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
    token_sizes: list[int],
) -> DeviceMemory:
    """The sums with what steps take, and CUDA graphs of ``sizes`` and ``token_sizes``, if there are any.

    Both are run, and given back.
    """
    activations = _activations(loaded, args, model, dtype, device)
    found = loaded.with_(activations=activations, graphs=bool(sizes), mixed_graphs=bool(token_sizes))
    if sizes:
        recorded = sizes, token_sizes, loaded.max_model_len
        mixed, pool, each = _graphs_or_more_than_is_free(args, model, dtype, device, *recorded)
        found = found.with_(graph_pool=Grows(fixed=mixed, each=pool / sizes[-1]), graph_each=each)
    _settle(device)
    free, total = torch.cuda.mem_get_info(device)
    return found.with_(libraries=max(0, total - free - found.taken - found.weights))


def _activations(
    loaded: DeviceMemory, args: EngineArgs, model: LlamaForCausalLM, dtype: torch.dtype, device: torch.device
) -> Grows:
    """What a step takes by its tokens: the largest is run, and one of half as many tokens.

    Where the largest does not fit, what it would take is reckoned from the largest that does.
    """
    tokens = loaded.step_tokens
    while True:
        try:
            most = step_bytes(args, model, dtype, device, tokens, loaded.max_model_len)
            half = step_bytes(args, model, dtype, device, max(1, tokens // 2), loaded.max_model_len)
        except torch.OutOfMemoryError:
            if tokens <= LEAST_TOKENS:
                raise
        else:
            return Grows.through(tokens, most, max(1, tokens // 2), half)
        _settle(device)
        tokens //= 2


def step_bytes(
    args: EngineArgs, model: LlamaForCausalLM, dtype: torch.dtype, device: torch.device, num_tokens: int, longest: int
) -> int:
    """Peak bytes of a step that computes so many tokens of prompts of up to ``longest`` tokens, beside its cache."""
    lengths = [longest] * (num_tokens // longest) + ([num_tokens % longest] if num_tokens % longest else [])
    runner = trial_runner(args, model, dtype, device, len(lengths), max(lengths) + 1)
    _settle(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    runner.execute(trial_step(lengths, args.block_size, SamplingNumbers(top_p=0.5)))
    return int(torch.cuda.max_memory_reserved(device) - before)


def _graphs_or_more_than_is_free(
    args: EngineArgs,
    model: LlamaForCausalLM,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
    token_sizes: list[int],
    length: int,
) -> tuple[int, int, int]:
    """Bytes of the largest CUDA graphs and of each further one; where they find no room, more than there is."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return graph_bytes(args, model, dtype, device, sizes, token_sizes, length)
    _settle(device)
    return 0, int(torch.cuda.mem_get_info(device)[0]) + 1, 0


def graph_bytes(
    args: EngineArgs,
    model: LlamaForCausalLM,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
    token_sizes: list[int],
    length: int,
) -> tuple[int, int, int]:
    """Bytes of the largest mixed CUDA graph, of the largest of decodes beside it, and of each further one.

    ``length`` bounds the contexts. The first recording of all pays for what is compiled and for the workspaces of libraries,
    which stay: it does not count.
    """
    runner = trial_runner(args, model, dtype, device, sizes[-1], length)
    step, free = runner.decode_step(sizes[-1]), []
    others = sizes[-2 :: -max(1, len(sizes) // SAMPLED_GRAPHS)]
    with torch.inference_mode():
        DecodeGraphs(step, sizes[:2][-1:]).release()  # two rows: one alone asks no library
        graphs = DecodeGraphs(step, [])
        mixed = None
        if token_sizes:
            mixed = MixedGraphs(runner.mixed_step(sizes[-1], token_sizes[-1]), [], graphs.pool)
        for recordings, recorded in ((mixed, []), (mixed, token_sizes[-1:]), (graphs, sizes[-1:]), (graphs, others)):
            for size in recorded:
                assert recordings is not None, "there are sizes of it"
                recordings.record(size)
            _settle(device)
            free.append(torch.cuda.mem_get_info(device)[0])
    for used in (graphs, mixed):
        if used is not None:
            used.release()
    took = [max(0, before - after) for before, after in itertools.pairwise(free)]
    return took[0], took[1], -(-took[2] // max(1, len(others)))


def _settle(device: torch.device) -> None:
    """Have the card show what is truly held."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
