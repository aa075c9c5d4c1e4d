"""Which architectures run. A new family is a file beside qwen3.py and a name here."""

from __future__ import annotations

import torch

from refimpl.config import ModelConfig
from refimpl.errors import UnsupportedModelError
from refimpl.models.family import Family
from refimpl.models.llama import LLAMA, LlamaForCausalLM
from refimpl.models.mistral import MISTRAL
from refimpl.models.qwen2 import QWEN2
from refimpl.models.qwen3 import QWEN3
from refimpl.quantization.method import LinearMethod
from refimpl.quantization.plain import PLAIN
from refimpl.ranks import ALONE, Ranks

FAMILIES: dict[str, Family] = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""By Hugging Face's name of the architecture."""


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    method: LinearMethod = PLAIN,
    ranks: Ranks = ALONE,
) -> LlamaForCausalLM:
    """The empty model of a configuration, or this rank's share of it, its layers' matrices held by ``method``.

    Raises:
        UnsupportedModelError: no family has that architecture.

    """
    if config.architecture not in FAMILIES:
        raise UnsupportedModelError(f"the model's architecture is {config.architecture}; refimpl runs {', '.join(FAMILIES)}")
    return LlamaForCausalLM(config, dtype, device, method, ranks)
