"""Have every kernel compiled that serving will ask for, before the first request waits for one.

One layer of each kind goes through steps of every kind once (see :mod:`refimpl.kernels.rehearsal`: nothing is computed):
those that graphs are recorded for, prompts, prompts of so few tokens that they are served with the
decodes, and drawing with filters and penalties.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import torch
from torch import nn

from refimpl.config import EngineArgs
from refimpl.executor.mixed_graphs import recorded_sets
from refimpl.executor.trial import trial_runner, trial_step
from refimpl.kernels.launch import power_of_two
from refimpl.models.llama import LlamaForCausalLM
from refimpl.sampling_numbers import SamplingNumbers

PROMPT = 40
"""Tokens of a prompt that is long enough for the prefill's own kernel."""
SHORT_PROMPTS = (2, 4, 8, 16)
"""Tokens of prompts, or of what is left of them, that are served with the decodes: by a kernel for each power of two."""
GREEDY = SamplingNumbers(temperature=0.0)
DRAWN = (
    SamplingNumbers(top_p=0.5),
    SamplingNumbers(presence_penalty=0.5),
    SamplingNumbers(top_p=0.5, presence_penalty=0.5),
)


def compile_kernels(
    args: EngineArgs,
    model: LlamaForCausalLM,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
    token_sizes: list[int],
) -> None:
    """Compile what steps of this model ask for on this GPU.

    ``sizes`` are the numbers of rows, and ``token_sizes`` those of tokens, for which graphs are recorded.
    """
    from refimpl.kernels.rehearsal import rehearsed

    most_rows, _ = args.step_limits()
    length = args.max_model_len or model.config.context_limit()
    runner = trial_runner(args, layers_of_each_kind(model), dtype, device, most_rows, length)
    # Without room for such steps nothing is compiled ahead; what the engine says about it comes from those it needs.
    with contextlib.suppress(torch.OutOfMemoryError), torch.inference_mode(), rehearsed(device):
        if sizes:  # first: the steps below append tokens that nobody drew, and none of them may be read
            decode = runner.decode_step(sizes[-1])
            for size in {power_of_two(size): size for size in sizes}.values():
                decode.forward(size)
        for rows, tokens in recorded_sets(token_sizes, sizes[-1]) if token_sizes else []:
            mixed = runner.mixed_step(rows, tokens[-1])
            for size in {power_of_two(mixed.rows_of(size) + 1): size for size in tokens}.values():
                mixed.forward(size)
        short_beside_few = bool(token_sizes) and args.speculative_config is None
        for number, (lengths, sampling) in enumerate(_steps(most_rows, length, short_beside_few)):
            runner.execute(trial_step(lengths, args.block_size, sampling, number))


def _steps(most_rows: int, length: int, short_beside_few: bool) -> list[tuple[list[int], SamplingNumbers]]:
    """Lengths of the prompts of each step, and how their tokens are drawn.

    Of the number of rows a kernel knows its power of two at most. With ``short_beside_few`` short prompts come beside one
    decode only: graphs hold the other steps that have them.
    """
    rows = [2**power for power in range(power_of_two(most_rows).bit_length()) if 2**power <= most_rows]
    prompt, *short = (min(count, length - 1) for count in (PROMPT, *SHORT_PROMPTS))  # a token is appended
    steps = [([1], GREEDY)]
    steps += [([prompt] + [1] * (count - 1), GREEDY) for count in rows]
    steps += [([one] + [1] * (count - 1), GREEDY) for count in (rows[:2] if short_beside_few else rows) for one in short]
    steps += [([prompt] * count, sampling) for sampling in DRAWN for count in rows[:2]]
    return steps


def layers_of_each_kind(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with the first layer of each window alone, and the same weights: others ask for no other kernels."""
    config, shallow = model.config, copy.copy(model)
    firsts = {config.window(layer): layer for layer in reversed(range(config.num_hidden_layers))}
    windows = tuple(firsts) if config.windows else ()
    shallow.config, shallow.share = (
        dataclasses.replace(one, num_hidden_layers=len(firsts), windows=windows) for one in (config, model.share)
    )
    shallow._modules = dict(model._modules, layers=nn.ModuleList(model.layers[layer] for layer in firsts.values()))
    return shallow
