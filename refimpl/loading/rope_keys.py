"""The rotary scaling of a checkpoint: the keys of config.json, old and new, and those of GGUF, to a RopeConfig and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from refimpl.errors import CheckpointError, UnsupportedModelError
from refimpl.rope_config import ROPE_KINDS, RopeConfig


def read_rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    """From config.json: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` of before.

    Raises:
        CheckpointError: a number is missing, no number, or out of its range.
        UnsupportedModelError: a kind of scaling that refimpl does not know, or one that turns only a part of each head.

    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise _wrong(where, f"has rotary parameters {rope!r}, not an object")
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UnsupportedModelError(f"{where} rotates {share} of each head (partial_rotary_factor); refimpl rotates all")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"{where} scales its rotary embedding by {kind!r}; refimpl knows {', '.join(ROPE_KINDS)}"
        )
    given = {"rope_theta": raw.get("rope_theta"), **rope}
    config = _read_kind(kind, _Numbers({"rope_theta": 10_000.0} | _without_none(given), where), raw, rope)
    divisors = rope.get("frequency_divisors", ())  # refimpl's own key, for what was a GGUF file
    return dataclasses.replace(config, frequency_divisors=tuple(float(divisor) for divisor in divisors))


def _without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _read_kind(kind: str, numbers: _Numbers, raw: Mapping[str, Any], rope: Mapping[str, Any]) -> RopeConfig:
    theta = numbers.get("rope_theta")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", numbers.factor())
    context = int(raw["max_position_embeddings"])
    if kind == "dynamic":  # transformers counts from max_position_embeddings, whatever else is there
        return RopeConfig(theta, "dynamic", numbers.factor(), original_max_position_embeddings=context)
    # As in transformers: a key beside rope_parameters counts first, and the model's own context last.
    beside = raw.get("original_max_position_embeddings")
    original = int(beside or numbers.get("original_max_position_embeddings", context))
    if kind == "llama3":
        low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
        if not high > low:
            raise _wrong(numbers.where, f"has high_freq_factor {high}, not above low_freq_factor {low}")
        return RopeConfig(theta, "llama3", numbers.factor(), low, high, original)
    derived = context / original if "factor" in rope and rope["factor"] is None else None  # as DeepSeek's files have it
    return _yarn(numbers, theta, numbers.factor(derived), original)


def _yarn(numbers: _Numbers, theta: float, factor: float, original: int) -> RopeConfig:
    attention = numbers.get("attention_factor", 0.0)
    mscale, mscale_all_dim = numbers.get("mscale", 0.0), numbers.get("mscale_all_dim", 0.0)
    if not attention and mscale and mscale_all_dim:
        attention = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    beta_fast, beta_slow = numbers.get("beta_fast", 32.0), numbers.get("beta_slow", 1.0)
    if not beta_fast > beta_slow:
        raise _wrong(numbers.where, f"has beta_fast {beta_fast}, not above beta_slow {beta_slow}")
    truncate = numbers.given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise _wrong(numbers.where, f"has truncate {truncate!r}, not true or false")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position_embeddings=original,
        attention_factor=attention or yarn_attention_factor(factor),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """``0.1 · mscale · ln(factor) + 1``: how far yarn sharpens attention (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0


class _Numbers:
    """The numbers of a rope object, each checked to be one: a text that reads like a number is none."""

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        self.given = given
        self.where = where

    def get(self, key: str, default: float | None = None) -> float:
        value = self.given.get(key, default)
        if value is None:
            raise _wrong(self.where, f"lacks {key!r} for its rotary scaling")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong(self.where, f"has {key} {value!r}, not a finite number")
        return float(value)

    def factor(self, default: float | None = None) -> float:
        factor = self.get("factor", default)
        if factor < 1:
            raise _wrong(self.where, f"stretches its context by a factor of {factor:g}, under 1")
        return factor


def _wrong(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where} {what}; correct it, or download it again")


LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN_KEYS = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate")
KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": YARN_KEYS,
    "llama3": LLAMA3_KEYS,
}
"""What ``rope_parameters`` holds for each kind, beside its name and ``rope_theta``."""


def written_rope(rope: RopeConfig) -> dict[str, Any]:
    """The ``rope_parameters`` of config.json."""
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    written |= {key: getattr(rope, key) for key in KEYS[rope.kind]}
    if rope.frequency_divisors:
        written["frequency_divisors"] = list(rope.frequency_divisors)
    return written


def read_gguf_rope(
    architecture: str,
    metadata: Mapping[str, Any],
    number: Callable[..., float],
    divisors: tuple[float, ...],
    where: str,
) -> RopeConfig:
    """From GGUF's metadata; ``number(key, default)`` reads a checked number under the architecture's name.

    llama.cpp's names: ``rope.scaling.type`` (none, linear, yarn), ``.factor``, ``.original_context_length``,
    ``.attn_factor`` (times yarn's own), ``.yarn_beta_fast``, ``.yarn_beta_slow``; ``rope.scale_linear`` in old files.

    Raises:
        CheckpointError: a number is missing or out of its range.
        UnsupportedModelError: another type, or a setting of yarn that refimpl does not have.

    """
    theta, kind = float(number("rope.freq_base", 10_000.0)), metadata.get(f"{architecture}.rope.scaling.type", "none")
    old = float(number("rope.scale_linear", 1.0))
    if kind == "none":
        kind = "linear" if old != 1.0 else "none"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{where} has {architecture}.rope.scaling.type = {kind!r}; refimpl knows none, linear and yarn"
        )
    if kind == "none":
        return RopeConfig(theta, frequency_divisors=divisors)
    factor = float(number("rope.scaling.factor", old if old != 1.0 else None))
    if factor < 1:
        raise _wrong(where, f"stretches its context by a factor of {factor:g}, under 1")
    if kind == "linear":
        return RopeConfig(theta, "linear", factor, frequency_divisors=divisors)
    for name, harmless in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        value = number(f"rope.scaling.{name}", harmless)
        if value != harmless and not (name == "yarn_ext_factor" and value < 0):  # below 0: the default
            raise UnsupportedModelError(
                f"{where} has {architecture}.rope.scaling.{name} = {value:g}; refimpl knows {harmless:g}"
            )
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position_embeddings=int(number("rope.scaling.original_context_length", number("context_length"))),
        attention_factor=float(number("rope.scaling.attn_factor", 1.0)) * yarn_attention_factor(factor),
        beta_fast=float(number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(number("rope.scaling.yarn_beta_slow", 1.0)),
        frequency_divisors=divisors,
    )
