"""``quantization_config`` of a config.json: AutoAWQ's, GPTQ's, and three ways to say FP8. What else there is is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from refimpl.errors import CheckpointError, UnsupportedModelError
from refimpl.quantization_config import QuantizationConfig

RUNS = (
    "refimpl runs awq (4 bits, version gemm), gptq (4 bits, without act-order), and fp8, fbgemm_fp8 and compressed-tensors "
    "with FP8 weights scaled by channel or tensor; use such a checkpoint, its 16-bit safetensors, or a GGUF file"
)
GROUP_SIZES = (128, 64, 32, -1)


def read_quantization(raw: dict[str, Any], where: str) -> QuantizationConfig | None:
    """How the weights are quantised, or None; ``where`` names the config.json in messages.

    Raises:
        CheckpointError: a value is of the wrong kind.
        UnsupportedModelError: refimpl does not run it; the message has what it runs.

    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{where} is quantised ({config}); {RUNS}")
    title = str(config.get("quant_method", "unknown")).lower()
    if title not in READERS:
        raise UnsupportedModelError(f"{where} is quantised ({title}); {RUNS}")
    try:
        return READERS[title](config, where)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(
            f"{where} has a quantization_config with a value of the wrong kind ({error!r}); correct it, or download it again"
        ) from error


def written_quantization(config: QuantizationConfig) -> dict[str, Any]:
    """The ``quantization_config`` that reads as ``config``."""
    left: dict[str, Any] = {"modules_to_not_convert": list(config.left_out) or None}
    sizes = {"bits": 4, "group_size": config.group_size}
    if config.method == "awq":
        return {"quant_method": "awq", "version": "gemm", "zero_point": config.zero_point} | sizes | left
    if config.method == "gptq":
        stored = "gptq" if config.zeros_less_one else "gptq_v2"
        return {"quant_method": "gptq", "desc_act": False, "checkpoint_format": stored} | sizes | left
    return {"quant_method": "fp8", "activation_scheme": "dynamic"} | left


def _awq(config: dict[str, Any], where: str) -> QuantizationConfig:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(
            f"{where} has AWQ weights of version {version!r}, which lie in another order; refimpl reads version gemm: "
            "quantise the model to that, or use a checkpoint that is"
        )
    return QuantizationConfig(
        method="awq",
        title="awq",
        group_size=_group_size(config, where, "AWQ"),
        zero_point=bool(config.get("zero_point", True)),
        left_out=_left_out(config),
    )


def _gptq(config: dict[str, Any], where: str) -> QuantizationConfig:
    group_size = _group_size(config, where, "GPTQ")
    stored = str(config.get("checkpoint_format") or "gptq").lower()
    if stored not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise UnsupportedModelError(f"{where} has GPTQ weights in the format {stored!r}; refimpl reads gptq and gptq_v2")
    if config.get("desc_act") and group_size != -1 and not config.get("static_groups"):
        raise UnsupportedModelError(
            f"{where} has GPTQ weights with act-order (desc_act): the inputs of a group lie all over the matrix, and "
            "refimpl's kernels read whole groups; use a checkpoint with desc_act false"
        )
    for key in ("dynamic", "lm_head"):
        if config.get(key):
            raise UnsupportedModelError(f"{where} has GPTQ weights with {key} set, which refimpl does not read; {RUNS}")
    return QuantizationConfig(
        method="gptq",
        title="gptq",
        group_size=group_size,
        zeros_less_one=stored == "gptq",
        left_out=_left_out(config),
    )


def _group_size(config: dict[str, Any], where: str, title: str) -> int:
    bits = int(config.get("bits", config.get("w_bit", 4)))
    if bits != 4:
        raise UnsupportedModelError(f"{where} has {title} weights of {bits} bits; refimpl reads those of 4 bits")
    size = int(config.get("group_size", config.get("q_group_size", 128)))
    if size not in GROUP_SIZES:
        raise UnsupportedModelError(
            f"{where} has {title} weights in groups of {size}; refimpl reads groups of "
            f"{', '.join(map(str, GROUP_SIZES))} (all)"
        )
    return size


def _fp8(config: dict[str, Any], where: str) -> QuantizationConfig:
    title = str(config["quant_method"]).lower()
    if config.get("weight_block_size"):
        raise UnsupportedModelError(
            f"{where} has FP8 weights scaled by blocks of {config['weight_block_size']}; refimpl reads those scaled by "
            f"channel or tensor. {RUNS}"
        )
    return QuantizationConfig(method="fp8", title=title, left_out=_left_out(config))


def _compressed(config: dict[str, Any], where: str) -> QuantizationConfig:
    """compressed-tensors: FP8 for every linear layer, but for those that are ignored."""
    groups = list(config["config_groups"].values())
    for group in groups:
        weights = group["weights"]
        kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        if (kind, bits) != ("float", 8) or strategy not in ("channel", "tensor"):
            raise UnsupportedModelError(
                f"{where} is quantised (compressed-tensors, weights of {bits} bits, {kind}, scaled by {strategy}); {RUNS}"
            )
        if group.get("targets", ["Linear"]) != ["Linear"]:
            raise UnsupportedModelError(
                f"{where} is quantised in parts (compressed-tensors with targets {group['targets']}); refimpl reads those "
                f"whose target is Linear. {RUNS}"
            )
    if len(groups) != 1 or config.get("sparsity_config", {}).get("format", "dense") != "dense":
        raise UnsupportedModelError(
            f"{where} is quantised (compressed-tensors with {len(groups)} groups, or sparse); {RUNS}"
        )
    return QuantizationConfig(method="fp8", title="compressed-tensors", left_out=_left_out(config))


def _left_out(config: dict[str, Any]) -> tuple[str, ...]:
    """The modules that are named as not quantised, under whichever key."""
    for key in ("modules_to_not_convert", "ignored_layers", "ignore"):
        named = config.get(key) or ()
        if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
            raise TypeError(f"{key} is {named!r}, not a list of names")
        for name in named:
            if name.startswith("re:"):
                _checked_pattern(name[3:])
        if named:
            return tuple(named)
    return ()


def _checked_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no pattern: {error}") from error


READERS: dict[str, Callable[[dict[str, Any], str], QuantizationConfig]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
}
