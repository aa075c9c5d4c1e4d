"""Family: a kind of model, by what it chooses where Llama and those like it differ.

All of them run by the same code (:mod:`refimpl.models.llama`), whose layers read the choices from :class:`ModelConfig`. What
is left to a family is how its config.json says them: one function from its keys to the choices, and one back.

==========  ======================  ==========================  ===============================
family      biases                  norms of queries and keys   window
==========  ======================  ==========================  ===============================
Llama       all or none             no                          no
Mistral     none                    no                          one for all layers, or none
Qwen2, 2.5  on Q, K and V           no                          in the layers that say so
Qwen3       on attention's or none  yes                         in the layers that say so
==========  ======================  ==========================  ===============================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from refimpl.config import ModelConfig
from refimpl.errors import CheckpointError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
"""What ``layer_types`` calls layers without a window, and with one."""


@dataclass(frozen=True)
class Family:
    """What must be known of a family beside the sizes, which all have alike."""

    architecture: str
    """Hugging Face's name of it, in config.json's ``architectures``."""
    model_type: str
    choices: Callable[[Keys], dict[str, Any]]
    """From config.json to those fields of :class:`ModelConfig` in which families differ."""
    written: Callable[[ModelConfig], dict[str, Any]]
    """And back: the keys of config.json that say them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that transformers takes where config.json leaves them out, where other families have others."""


class Keys:
    """The keys of a config.json, each checked when it is read; ``where`` names the file in messages."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.num_layers = int(raw["num_hidden_layers"])

    def flag(self, key: str) -> bool:
        """Whether a key is true; without it, or where it is null, no.

        Raises:
            CheckpointError: it is neither true nor false.

        """
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.where} has {key} {value!r}, not true or false; correct it, or download it again")
        return bool(value)

    def window(self, default: int) -> int | None:
        """``sliding_window`` in tokens; where it is null, none.

        Raises:
            CheckpointError: it is no whole number above 0.

        """
        value = self.raw.get("sliding_window", default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CheckpointError(
                f"{self.where} has sliding_window {value!r}, not a whole number above 0 or null; correct it, or download it "
                "again"
            )
        return value

    def refuse(self, key: str, why: str) -> None:
        """See that the model does not ask for what its family does not have.

        Raises:
            UnsupportedModelError: it does.

        """
        if self.flag(key):
            raise UnsupportedModelError(f"{self.where} has {key}; {why}")

    def layer_types(self) -> list[str] | None:
        """``layer_types``, one for each layer; None where there are none.

        Raises:
            CheckpointError: they are not as many as the layers.
            UnsupportedModelError: one is of a kind that refimpl does not know.

        """
        kinds = self.raw.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list | tuple) or len(kinds) != self.num_layers:
            raise CheckpointError(
                f"{self.where} has layer_types {kinds!r}, not one for each of its {self.num_layers} layers; correct it, or "
                "download it again"
            )
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise UnsupportedModelError(f"{self.where} has a layer of type {kind!r}; refimpl knows {FULL} and {SLIDING}")
        return list(kinds)


DEFAULT_WINDOW = 4096
"""Of every family that can have one."""
FIRST_LAYERS = 28
"""``max_window_layers`` where config.json leaves it out."""


def windows_by_layer(keys: Keys) -> tuple[int | None, ...]:
    """The windows of Qwen2 and Qwen3.

    There is one at all if ``use_sliding_window`` says so; then ``layer_types`` says which layers have it, or, in older
    files, ``max_window_layers``: all from that one on, which its name does not tell.

    Raises:
        CheckpointError: layers are to have a window, but there is none.

    """
    window = keys.window(DEFAULT_WINDOW) if keys.flag("use_sliding_window") else None
    kinds = keys.layer_types()
    if kinds is None:
        first = int(keys.raw.get("max_window_layers", FIRST_LAYERS))
        kinds = [FULL if window is None or layer < first else SLIDING for layer in range(keys.num_layers)]
    if window is None and SLIDING in kinds:
        raise CheckpointError(
            f"{keys.where} has layers of type {SLIDING}, but no window: use_sliding_window is "
            f"{keys.raw.get('use_sliding_window')!r} and sliding_window {keys.raw.get('sliding_window')!r}; correct it, or "
            "download it again"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds) if SLIDING in kinds else ()


def written_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys that :func:`windows_by_layer` reads."""
    found = {window for window in config.windows if window is not None}
    kinds = [FULL if config.window(layer) is None else SLIDING for layer in range(config.num_hidden_layers)]
    return {"use_sliding_window": config.windowed, "sliding_window": max(found, default=None), "layer_types": kinds}
