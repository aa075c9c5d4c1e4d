"""Have every kernel compiled that serving will ask for, before the first request waits for one.

One layer of the model goes through steps of every kind once (see :mod:`refimpl.kernels.rehearsal`: nothing is computed):
decodes of every number of rows that a graph is recorded for, prompts, prompts of so few tokens that they are served with the
decodes, and drawing with filters and penalties.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import torch
from torch import nn

from refimpl.config import EngineArgs
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
    args: EngineArgs, model: LlamaForCausalLM, dtype: torch.dtype, device: torch.device, sizes: list[int]
) -> None:
    """Compile what steps of this model ask for on this GPU; ``sizes`` are the numbers of rows of recorded graphs."""
    from refimpl.kernels.rehearsal import rehearsed

    most_rows, _ = args.step_limits()
    length = args.max_model_len or model.config.context_limit()
    runner = trial_runner(args, one_layer_of(model), dtype, device, most_rows, length)
    # Without room for such steps nothing is compiled ahead; what the engine says about it comes from those it needs.
    with contextlib.suppress(torch.OutOfMemoryError), torch.inference_mode(), rehearsed(device):
        if sizes:  # first: the steps below append tokens that nobody drew, and none of them may be read
            decode = runner.decode_step(sizes[-1])
            for size in {power_of_two(size): size for size in sizes}.values():
                decode.forward(size)
        for number, (lengths, sampling) in enumerate(_steps(most_rows, length)):
            runner.execute(trial_step(lengths, args.block_size, sampling, number))


def _steps(most_rows: int, length: int) -> list[tuple[list[int], SamplingNumbers]]:
    """Lengths of the prompts of each step, and how their tokens are drawn.

    Of the number of rows a kernel knows its power of two at most.
    """
    rows = [2**power for power in range(power_of_two(most_rows).bit_length()) if 2**power <= most_rows]
    prompts = [min(count, length - 1) for count in (PROMPT, *SHORT_PROMPTS)]  # a token is appended
    steps = [([1], GREEDY)]
    steps += [([prompt] + [1] * (count - 1), GREEDY) for count in rows for prompt in prompts]
    steps += [([prompts[0]] * count, sampling) for sampling in DRAWN for count in (1, min(2, most_rows))]
    return steps


def one_layer_of(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with its first layer alone, and the same weights: all layers ask for the same kernels."""
    shallow = copy.copy(model)
    shallow.config = dataclasses.replace(model.config, num_hidden_layers=1)
    shallow._modules = dict(model._modules, layers=nn.ModuleList([model.layers[0]]))
    return shallow
