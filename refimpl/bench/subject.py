"""What is measured: a model, or a shape with random weights."""

from __future__ import annotations

from typing import Any

from refimpl.config import EngineArgs
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import Checkpoint, open_checkpoint
from refimpl.loading.dummy import ShapeCheckpoint
from refimpl.simulate.models import find_model


def model_or_shape(engine_options: dict[str, Any], model_config: str | None) -> tuple[dict[str, Any], Checkpoint]:
    """The engine's options and the checkpoint that they mean.

    ``model_config`` names a shape (llama-3-8b, llama-3-70b, or a folder with a config.json), which takes the model's place.

    Raises:
        ConfigError: a shape and a model are asked for, or there is no such shape.
        ModelError: there is no such model.

    """
    if model_config is None:
        return engine_options, open_checkpoint(engine_options.get("model", EngineArgs.model))
    if engine_options.get("model", EngineArgs.model) != EngineArgs.model:
        raise ConfigError(f"model is {engine_options['model']!r} and model_config {model_config!r}; give one of them")
    shape = ShapeCheckpoint(model_config, find_model(model_config))
    return engine_options | {"model": shape, "load_format": "dummy"}, shape
