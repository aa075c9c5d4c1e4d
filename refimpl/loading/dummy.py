"""Random weights in a model's shape (``load_format="dummy"``): for benchmarks of models that are not at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.errors import ConfigError
from refimpl.quantization.method import Destination
from refimpl.tokenizer.tokenizer import Tokenizer, stand_in_tokenizer

STANDARD_DEVIATION = 0.02


def fill_with_random(views: Mapping[str, Destination], seed: int) -> None:
    """Fill every view, seeded, on its own device: norms with ones, matrices with Normal(0, 0.02). Mutates the views.

    A quantised matrix holds those same numbers, quantised; one is drawn at a time.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, view in views.items():
        if "norm" in name:
            view.copy_(torch.ones(view.shape))
            continue
        if view.device not in generators:
            generators[view.device] = torch.Generator(view.device).manual_seed(seed)
        view.normal_(0.0, STANDARD_DEVIATION, generator=generators[view.device])


@dataclass(frozen=True)
class ShapeCheckpoint:
    """A model of which only the numbers are known: to run it with ``load_format="dummy"``."""

    name: str
    config: ModelConfig

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """There are none.

        Raises:
            ConfigError: always.

        """
        raise ConfigError(f"{self.name} is a shape without weights; run it with load_format='dummy'")

    def tokenizer(self) -> Tokenizer:
        """Bytes: a shape has no vocabulary of its own."""
        return stand_in_tokenizer(self.config.vocab_size)

    def fingerprint(self) -> str:
        """What tells this shape from others."""
        return hashlib.blake2b(repr(self.config).encode(), digest_size=16).hexdigest()
