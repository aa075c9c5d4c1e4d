"""Which class runs which architecture. A new family is a file beside llama.py and a line here."""

from __future__ import annotations

import torch

from refimpl.config import ModelConfig
from refimpl.errors import UnsupportedModelError
from refimpl.models.llama import LlamaForCausalLM
from refimpl.quantization.method import LinearMethod
from refimpl.quantization.plain import PLAIN
from refimpl.ranks import ALONE, Ranks

ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {"LlamaForCausalLM": LlamaForCausalLM}
"""Hugging Face's name of an architecture, and the class that runs it."""


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    method: LinearMethod = PLAIN,
    ranks: Ranks = ALONE,
) -> LlamaForCausalLM:
    """The empty model of a configuration, or this rank's share of it, its layers' matrices held by ``method``.

    Raises:
        UnsupportedModelError: no class runs that architecture.

    """
    if config.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the model's architecture is {config.architecture}; refimpl runs {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[config.architecture](config, dtype, device, method, ranks)
