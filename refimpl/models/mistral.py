"""Mistral (Jiang et al. 2023, "Mistral 7B"): Llama whose tokens attend to the last ``sliding_window`` of their text.

A token sees further than the window all the same: through the tokens that it sees, whose vectors carry what those have seen;
``layers · window`` tokens in all. Mistral-7B-v0.1 has a window of 4,096 in every layer; the versions since have none
(``"sliding_window": null``) and are Llama in all but the name.
"""

from __future__ import annotations

from typing import Any

from refimpl.config import ModelConfig
from refimpl.errors import UnsupportedModelError
from refimpl.models.family import DEFAULT_WINDOW, FULL, SLIDING, Family, Keys


def _choices(keys: Keys) -> dict[str, Any]:
    for key in ("attention_bias", "mlp_bias"):
        keys.refuse(key, "Mistral has no biases")
    window = keys.window(DEFAULT_WINDOW)
    other = SLIDING if window is None else FULL
    if other in (keys.layer_types() or ()):
        raise UnsupportedModelError(
            f"{keys.where} has layers of type {other} with sliding_window {window!r}; Mistral's layers are all alike "
            "(Ministral's differ, which refimpl does not run)"
        )
    return {"windows": () if window is None else (window,) * keys.num_layers}


def _written(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.window(0)}


MISTRAL = Family("MistralForCausalLM", "mistral", _choices, _written, {"num_key_value_heads": 8})
