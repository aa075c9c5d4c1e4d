"""Qwen2 and Qwen2.5 (Yang et al. 2024, "Qwen2 Technical Report"): Llama with biases on queries, keys and values.

Nothing else in the model has biases. The upper layers may have a window (``use_sliding_window``), but the published models
leave it off.
"""

from __future__ import annotations

from typing import Any

from refimpl.config import ModelConfig
from refimpl.models.family import Family, Keys, windows_by_layer, written_windows


def _choices(keys: Keys) -> dict[str, Any]:
    keys.refuse("mlp_bias", "Qwen2 has biases on Q, K and V alone")
    return {"qkv_bias": True, "windows": windows_by_layer(keys)}


def _written(config: ModelConfig) -> dict[str, Any]:
    return written_windows(config)


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _choices, _written, {"num_key_value_heads": 32})
