"""config.json and generation_config.json of a Hugging Face checkpoint, to our ModelConfig and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from refimpl.config import ModelConfig
from refimpl.errors import CheckpointError, UnsupportedModelError
from refimpl.loading.quantization_keys import read_quantization, written_quantization
from refimpl.loading.rope_keys import read_rope, written_rope
from refimpl.models.family import Keys
from refimpl.models.registry import FAMILIES


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint folder.

    Raises:
        CheckpointError: config.json is missing or damaged, or lacks a number.
        UnsupportedModelError: it asks for what refimpl does not implement.

    """
    raw = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    return parse_config(raw, generation, str(folder / "config.json"))


def parse_config(raw: dict[str, Any], generation: dict[str, Any], where: str) -> ModelConfig:
    """The configuration from the contents of config.json and generation_config.json; ``where`` names them in messages.

    Raises:
        CheckpointError: a number is missing, of the wrong kind, or does not fit the others.
        UnsupportedModelError: it asks for what refimpl does not implement.

    """
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "model of no named architecture"
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{where} holds a {architecture} (model_type {raw.get('model_type')!r}); refimpl runs {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(raw, where)
    family = FAMILIES[architecture]
    raw = {**family.defaults, **raw}
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        config = ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope=read_rope(raw, where),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_ids(raw.get("eos_token_id"), generation.get("eos_token_id")),
            bos_token_id=(_ids(raw.get("bos_token_id")) or (None,))[0],
            quantization=read_quantization(raw, where),
            **family.choices(Keys(raw, where)),
        )
    except KeyError as error:
        raise CheckpointError(f"{where} lacks {error}; download it again") from error
    except (UnsupportedModelError, CheckpointError):
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{where} has a value of the wrong kind ({error}); correct it, or download it again"
        ) from error
    check_sizes(config, where)
    return config


MAX_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**14,
    "max_position_embeddings": 2**24,
}
"""Far above any model: a damaged number is refused before memory is asked for."""


LARGEST = 2.0**127
"""What float32 holds, in which norms and angles are computed."""


def check_sizes(config: ModelConfig, where: str) -> None:
    """See that a configuration's sizes fit together.

    Raises:
        CheckpointError: they do not.

    """
    for name, most in MAX_SIZES.items():
        if not 1 <= getattr(config, name) <= most:
            raise CheckpointError(
                f"{where} makes {name} {getattr(config, name)}, not from 1 to {most}: correct it, or download it again"
            )
    if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
        raise CheckpointError(
            f"{where}: {config.num_attention_heads} query heads over {config.num_key_value_heads} key/value heads of "
            f"{config.head_dim} dimensions do not divide evenly; correct it, or download it again"
        )
    rope = config.rope
    numbers = [getattr(rope, field.name) for field in dataclasses.fields(rope)]
    numbers = [number for number in numbers if isinstance(number, int | float) and not isinstance(number, bool)]
    if not all(0 < number < LARGEST for number in (*numbers, config.rms_norm_eps)):
        raise CheckpointError(
            f"{where} has a number that is not above 0 and finite in float32 ({rope}, "
            f"{config.rms_norm_eps = }): correct it, or download it again"
        )
    if (rope.kind == "dynamic" and config.head_dim < 4) or (rope.kind == "yarn" and rope.theta <= 1):
        raise CheckpointError(f"{where}: {rope.kind} scaling needs heads of 4 dimensions or more and rope_theta above 1")
    if config.context_limit(config.max_position_embeddings) > MAX_SIZES["max_position_embeddings"]:
        raise CheckpointError(f"{where} stretches its context by {rope.factor:g}, to more than {2**24} tokens; correct it")
    if len(rope.frequency_divisors) not in (0, config.head_dim // 2):
        raise CheckpointError(
            f"{where} divides {len(rope.frequency_divisors)} rotary frequencies, but a head has {config.head_dim // 2}; "
            "download it again"
        )


def write_config(config: ModelConfig, folder: Path) -> None:
    """Write config.json and generation_config.json as transformers reads them."""
    eos, family = list(config.eos_token_ids), FAMILIES[config.architecture]
    common = {"bos_token_id": config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    raw = common | {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": written_rope(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        **family.written(config),
    }
    if config.quantization is not None:
        raw["quantization_config"] = written_quantization(config.quantization)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(common, indent=2) + "\n")


def _refuse_unsupported(raw: dict[str, Any], where: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise UnsupportedModelError(f"{where} uses the activation {activation!r}; refimpl's models have silu")


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """Token ids from keys that hold one, several or none; each once, in order."""
    found: dict[int, None] = {}
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(_no_config(path)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); correct it, or download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object; correct it, or download it again")
    return content


def _no_config(path: Path) -> str:
    gguf = sorted(path.parent.glob("*.gguf"))
    if gguf:
        return f"{path.parent} has no {path.name}, but GGUF files: give one as the model, such as {gguf[0]}"
    if any(path.parent.glob("*.pth")):
        beside = path.parent.parent
        there = f": give {beside} instead" if (beside / path.name).exists() else ", with config.json and safetensors"
        return f"{path.parent} holds .pth files of Meta's own layout; refimpl reads Hugging Face's{there}"
    return f"{path.parent} has no {path.name}; give a checkpoint folder in Hugging Face's layout, or a GGUF file"
