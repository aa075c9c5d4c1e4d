"""Qwen3 (Yang et al. 2025, "Qwen3 Technical Report"): Llama whose queries and keys are normed head by head.

The norms (:class:`refimpl.layers.norm.HeadNorms`) stand in place of Qwen2's biases. A head's size is a number of its own,
which the hidden size and the number of heads do not give: Qwen3-0.6B has 16 heads of 128 in a hidden size of 1,024.
"""

from __future__ import annotations

from typing import Any

from refimpl.config import ModelConfig
from refimpl.models.family import Family, Keys, windows_by_layer, written_windows


def _choices(keys: Keys) -> dict[str, Any]:
    keys.refuse("mlp_bias", "Qwen3 has biases on attention's projections at most")
    bias = keys.flag("attention_bias")
    return {"qk_norm": True, "qkv_bias": bias, "output_bias": bias, "windows": windows_by_layer(keys)}


def _written(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, **written_windows(config)}


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", _choices, _written, {"num_key_value_heads": 32, "head_dim": 128})
