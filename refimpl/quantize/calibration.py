"""Texts to calibrate on: the model's own, or a file of prompts. They become windows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from refimpl.errors import ConfigError
from refimpl.executor.device import resolve_device
from refimpl.llm import LLM
from refimpl.loading.checkpoint import Checkpoint
from refimpl.model_config import ModelConfig
from refimpl.sampling_params import SamplingParams
from refimpl.speculate.self_text import SEEDS_APART, SelfWriter

TEXTS_AT_ONCE = 32
"""On a CPU, and at least on a GPU."""
GPU_TEXTS_AT_ONCE = 512
GPU_CACHE_BYTES = 2**32
"""On a GPU, of the keys and values of all texts at once: more texts than a CPU's number stay below it."""
ON_A_GPU = {"max_num_batched_tokens": 8192, "enable_prefix_caching": False}
"""The prompts of a round of chats begin in few steps. Of what they share little is worth the host's time to look it up."""
BLOCK = 16
TEMPERATURE = 0.8
"""Of the model's answers."""
TEXT_TEMPERATURE = 1.0
"""Of its texts that are no chats."""


def calibration_windows(
    checkpoint: Checkpoint,
    prompts: Sequence[Any] | None,
    tokens: int,
    length: int,
    seed: int,
    device: str = "auto",
    show_progress: bool = False,
) -> Int[Tensor, "N L"]:
    """Token ids of at least one window, and of about ``tokens`` tokens in all.

    Args:
        checkpoint: the model.
        prompts: texts, or objects with ``prompt`` or ``prompt_token_ids``; None: the model writes by itself, so that no data
            set is needed: half of the tokens are chats, as drafters are trained on (:mod:`refimpl.speculate.self_text`),
            and half are texts that go on from a random token.
        tokens: how many to calibrate on; prompts that are more are cut.
        length: of a window.
        seed: of the model's own texts.
        device: on which the model writes.
        show_progress: draw a bar while it does.

    Raises:
        ConfigError: there is no text.

    """
    if tokens < 1 or length < 2:
        raise ConfigError(f"calibration takes at least 1 token in windows of at least 2, not {tokens} and {length}")
    length = min(length, checkpoint.config.max_position_embeddings)
    found = _own(checkpoint, tokens, length, seed, device, show_progress) if prompts is None else _of(checkpoint, prompts)
    if len(found) < 2:
        raise ConfigError("the calibration prompts hold no text; give a file with some, or none for the model's own text")
    length = min(length, len(found))
    rows = max(1, min(len(found), tokens) // length)
    return torch.tensor(found[: rows * length]).view(rows, length)


def _of(checkpoint: Checkpoint, prompts: Sequence[Any]) -> list[int]:
    tokenizer, found = checkpoint.tokenizer(), list[int]()
    for prompt in prompts:
        given: str | list[int] = prompt
        if isinstance(prompt, dict):
            given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        found += tokenizer.encode(given) if isinstance(given, str) else given
    vocab_size = checkpoint.config.vocab_size
    if any(not isinstance(token, int) or not 0 <= token < vocab_size for token in found):
        raise ConfigError(
            f"a calibration prompt has token ids outside the vocabulary; they must be from 0 to {vocab_size - 1}"
        )
    return found


def _own(checkpoint: Checkpoint, tokens: int, length: int, seed: int, device: str, show_progress: bool) -> list[int]:
    """Half of them of chats, and half of texts of any kind."""
    half = -(-tokens // 2)
    on_gpu = resolve_device(device).type == "cuda"
    at_once = min(texts_at_once(checkpoint.config, length, on_gpu), -(-half // length))
    blocks = at_once * -(-length // BLOCK)
    options = ON_A_GPU if on_gpu else {}
    chats, texts = list[int](), list[int]()
    with (
        LLM(
            checkpoint, device=device, max_model_len=length, block_size=BLOCK, num_gpu_blocks_override=blocks,
            max_num_seqs=at_once, **options,
        ) as llm,
        tqdm(total=2 * half, desc="calibration text", unit=" tokens", disable=not show_progress) as bar,
    ):  # fmt: skip
        writer = SelfWriter(llm, seed, length)
        for first in count(0, at_once):
            if len(chats) >= half:
                break
            chats += writer.chats(first, at_once, lambda number: TEMPERATURE, show_progress=False).token_ids.tolist()
            bar.update(min(len(chats), half) - bar.n)
        for first in count(0, at_once):
            if len(texts) >= half:
                break
            number = min(at_once, -(-(half - len(texts)) // length))
            texts += _texts(llm, first, number, length, seed)
            bar.update(half + min(len(texts), half) - bar.n)
    return chats[:half] + texts[:half]


def texts_at_once(config: ModelConfig, length: int, on_gpu: bool) -> int:
    """How many texts of ``length`` tokens are written together: on a GPU as many as keep a step worth its launches."""
    if not on_gpu:
        return TEXTS_AT_ONCE
    room = GPU_CACHE_BYTES // (length * config.kv_bytes_per_token(2))
    return max(TEXTS_AT_ONCE, min(GPU_TEXTS_AT_ONCE, room))


def _texts(llm: LLM, first: int, number: int, length: int, seed: int) -> list[int]:
    """Texts ``first`` to ``first + number - 1`` of ``length`` tokens each; where one ends, the model begins another.

    Each goes on from a token drawn from the whole vocabulary (as in the data-free distillation of Liu et al. 2023,
    "LLM-QAT"), so that they are about many things and in many styles, where chats are all alike.
    """
    seeds = [seed * SEEDS_APART + first + i for i in range(number)]
    vocab_size = llm.engine.model_config.vocab_size
    starts = [torch.randint(vocab_size, (1,), generator=torch.Generator().manual_seed(one)).tolist() for one in seeds]
    params = [
        SamplingParams(
            temperature=TEXT_TEMPERATURE, max_tokens=length - 1, seed=one, ignore_eos=True, detokenize=False,
            output_kind="final_only",
        )
        for one in seeds
    ]  # fmt: skip
    outputs = llm.generate(list(starts), params, use_tqdm=False)
    return [token for start, output in zip(starts, outputs, strict=True) for token in (*start, *output.outputs[0].token_ids)]
