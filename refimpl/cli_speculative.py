"""The flags of speculative decoding: three names that people know, and ``--speculative-config`` for everything.

``--speculative-method``, ``--speculative-model`` and ``--num-speculative-tokens`` are method, model and
num_speculative_tokens of ``--speculative-config``, and may stand beside it for what it leaves open. What follows from them
is said in one place, :class:`refimpl.speculative_config.SpeculativeConfig`: a model alone is a draft model, a number alone
drafts by n-grams.
"""

from __future__ import annotations

import json
from typing import Any

from refimpl.errors import ConfigError
from refimpl.speculative_config import METHODS, MOST_DRAFTS

FLAGS: dict[str, tuple[Any, str, str]] = {
    "speculative_method": (str, "method", f"Who drafts tokens: {', '.join(METHODS)}."),
    "speculative_model": (str, "model", "The draft model, named like --model (method draft_model); a head's folder (head)."),
    "num_speculative_tokens": (int, "num_speculative_tokens", f"Most tokens drafted a round, 1 to {MOST_DRAFTS}."),
}
"""By the flag's name: its kind, the option of ``speculative_config`` that it is, and its help."""


def merge_flags(options: dict[str, Any]) -> dict[str, Any]:
    """Engine options in which the flags have become part of ``speculative_config``.

    Raises:
        ConfigError: a flag says otherwise than the JSON does, or the JSON is none.

    """
    given = {name: options[name] for name in FLAGS if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in FLAGS}
    if not given:
        return rest
    config = _read(rest.get("speculative_config"))
    for name, value in given.items():
        _, option, _ = FLAGS[name]
        flag = f"--{name.replace('_', '-')}"
        if config.get(option, value) != value:
            raise ConfigError(
                f"{flag} is {value!r}, but --speculative-config says {option} = {config[option]!r}; give one of the two"
            )
        config[option] = value
    return rest | {"speculative_config": config}


def _read(text: str | None) -> dict[str, Any]:
    """The JSON object of ``--speculative-config``, beside which flags were given."""
    try:
        config = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"speculative_config is no JSON ({error}): {text!r}") from None
    if not isinstance(config, dict):
        raise ConfigError(f'speculative_config is {text}; it must be an object, as {{"method": "ngram"}}')
    return config
