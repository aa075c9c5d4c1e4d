"""Texts to calibrate on: the model's own, or a file of prompts. They become windows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from refimpl.errors import ConfigError
from refimpl.llm import LLM
from refimpl.loading.checkpoint import Checkpoint
from refimpl.speculate.self_text import SelfWriter

CHATS_AT_ONCE = 32
BLOCK = 16
TEMPERATURE = 0.8
"""Of the model's answers."""


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
        prompts: texts, or objects with ``prompt`` or ``prompt_token_ids``; None: the model writes chats by itself, as it
            does to train drafters on (:mod:`refimpl.speculate.self_text`), so that no data set is needed.
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
    count = max(1, min(len(found), tokens) // length)
    return torch.tensor(found[: count * length]).view(count, length)


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
    found: list[int] = []
    first, chats = 0, min(CHATS_AT_ONCE, -(-tokens // length))
    blocks = chats * -(-length // BLOCK)
    with LLM(checkpoint, device=device, max_model_len=length, block_size=BLOCK, num_gpu_blocks_override=blocks) as llm:
        writer = SelfWriter(llm, seed, length)
        while len(found) < tokens:
            texts = writer.chats(first, chats, lambda number: TEMPERATURE, show_progress)
            found += texts.token_ids.tolist()
            first += chats
    return found
