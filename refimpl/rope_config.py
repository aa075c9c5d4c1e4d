"""How a model's rotary embedding is stretched beyond the context that it was first trained on: RopeConfig."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
"""Hugging Face's ``rope_type``s that refimpl knows."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021, RoFormer): the base frequency and how it is stretched for long contexts.

    ``default`` is the plain one; ``linear`` divides positions by ``factor``; ``dynamic`` raises the base by the length of
    the context; ``yarn`` (Peng et al. 2023) and ``llama3`` (Dubey et al. 2024) slow the low frequencies and leave the high.
    :func:`refimpl.layers.rotary.inverse_frequencies` has the formulas.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    """How many times longer the context becomes (at least 1)."""
    low_freq_factor: float = 1.0
    """llama3: frequencies that turn fewer times than this over the original context are slowed by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: those that turn more often than this are left."""
    original_max_position_embeddings: int = 8192
    """dynamic, yarn, llama3: the context that the model was first trained on, in tokens."""
    frequency_divisors: tuple[float, ...] = ()
    """GGUF files store the outcome of llama3 scaling instead: what each of the ``D / 2`` frequencies is divided by."""
    attention_factor: float = 1.0
    """yarn: cosines and sines are multiplied by this, so attention scores by its square."""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often than this over the original context are left."""
    beta_slow: float = 1.0
    """yarn: those that turn fewer times are slowed by the whole factor."""
    truncate: bool = True
    """yarn: round the two borders outwards to whole dimensions."""
    context_length: int | None = None
    """dynamic: the length that the base is worked out for, in tokens; None is the original context."""

    def context_limit(self, max_position_embeddings: int, asked: int | None = None) -> int:
        """Most tokens of a context, derived as vLLM does, where ``max_position_embeddings`` is the configuration's.

        linear: ``factor`` times that; yarn: ``factor`` times the original context; llama3 and default: that, which their
        configurations give at its full length. dynamic serves the original context, where it changes nothing, unless a
        ``max_model_len`` is ``asked`` for; then at most ``factor`` times as much.
        """
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        if self.kind == "dynamic" and asked is not None:
            return int(self.original_max_position_embeddings * self.factor)
        return max_position_embeddings

    def for_context(self, length: int) -> RopeConfig:
        """The same for an engine whose contexts have at most ``length`` tokens. Only dynamic scaling changes by it."""
        return dataclasses.replace(self, context_length=length) if self.kind == "dynamic" else self
