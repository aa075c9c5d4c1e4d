"""A transformers model that is in memory already, as a checkpoint: one that was just trained, cut, or put together."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.errors import ModelNotFoundError
from refimpl.loading.hf_config import parse_config
from refimpl.tokenizer.tokenizer import Tokenizer, stand_in_tokenizer


class TransformersCheckpoint:
    """Give it as ``model``. The engine copies the weights when it is made: what becomes of the model later does not show.

    Args:
        model: a transformers model of a family that refimpl runs (Llama, Mistral, Qwen2, Qwen3), in any float dtype.
        tokenizer: its fast tokenizer; without one, texts are bytes (letters where the vocabulary is too small for them).
        name: what logs and messages call it.

    Raises:
        ModelNotFoundError: the object is no transformers model, some of its weights are elsewhere ("meta", offloaded), or
            the tokenizer is no fast one.

    """

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        if not all(hasattr(model, part) for part in ("config", "state_dict")):
            raise ModelNotFoundError(f"model is a {type(model).__name__}; it must be a transformers model, in memory")
        if tokenizer is not None and not hasattr(tokenizer, "backend_tokenizer"):
            raise ModelNotFoundError(
                f"tokenizer is a {type(tokenizer).__name__}; it must be a fast tokenizer of transformers, or None"
            )
        if away := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
            raise ModelNotFoundError(
                f"{len(away)} tensors of the {type(model).__name__} are not in memory ({away[0]}, …): they are on torch's "
                "device 'meta', as weights that are offloaded; load the model without a device_map"
            )
        self._model = model
        self._tokenizer = tokenizer
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__

    @functools.cached_property
    def config(self) -> ModelConfig:
        """From the model's own configuration.

        Raises:
            UnsupportedModelError: it is of another family, or asks for what refimpl does not implement.

        """
        generation = getattr(self._model, "generation_config", None)
        raw = self._model.config.to_dict() | {"architectures": [type(self._model).__name__]}
        return parse_config(raw, generation.to_dict() if generation is not None else {}, self.name)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors themselves; the engine copies them."""
        yield from self._model.state_dict().items()

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """The same: they are in memory already."""
        return self.weights()

    def tokenizer(self) -> Tokenizer:
        """The one that was given, or bytes."""
        if self._tokenizer is None:
            return stand_in_tokenizer(self.config.vocab_size)
        # A copy: ours switches truncation off, which is the user's to keep on in theirs.
        backend = type(self._tokenizer.backend_tokenizer).from_str(self._tokenizer.backend_tokenizer.to_str())
        return Tokenizer(backend, self._tokenizer.chat_template, renderer=self._tokenizer)

    def fingerprint(self) -> str:
        """blake2b over names, shapes and the first values of each tensor."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self.weights():
            digest.update(f"{name} {list(tensor.shape)} {tensor.flatten()[:64].tolist()}".encode())
        return digest.hexdigest()
