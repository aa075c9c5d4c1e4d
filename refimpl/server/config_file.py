"""The file of ``--config``: flags by name, in YAML, TOML or JSON. What stands on the command line counts more."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from refimpl.errors import ConfigError, UnknownOptionError


def read_flags(file: Path, parameters: Iterable[Any]) -> dict[str, Any]:
    """The flags in a file, as the defaults of a command's parameters (click's), by their names.

    Raises:
        ConfigError: the file cannot be read, or a value does not fit its flag.
        UnknownOptionError: a name is no flag; the nearest are named.

    """
    known = {opt.lstrip("-").replace("-", "_"): one for one in parameters for opt in one.opts if opt.startswith("--")}
    known = {name: one for name, one in known.items() if name not in ("config", "help")}
    defaults = {}
    for key, value in _parse(file).items():
        name = key.lstrip("-").replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else "see refimpl serve --help"
            raise UnknownOptionError(f"{file}: {key!r} is no flag of refimpl serve; {hint}")
        if value is not None:
            defaults[known[name].name] = _fitting(file, key, value, known[name])
    return defaults


def _parse(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            found = json.loads(text)
        elif file.suffix == ".toml":
            found = tomllib.loads(text)
        elif file.suffix in (".yaml", ".yml"):
            found = _yaml(text)
        else:
            raise ConfigError(f"{file}: a file of flags ends in .yaml, .yml, .toml or .json")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{file}: a file of flags maps names to values, as max-model-len: 4096")
    return found


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _fitting(file: Path, key: str, value: Any, parameter: Any) -> Any:
    """A value in the form in which the command line would give it."""
    if getattr(parameter, "is_flag", False) != isinstance(value, bool):
        what = "true or false" if getattr(parameter, "is_flag", False) else "a value"
        raise ConfigError(f"{file}: {key} is {value!r}; it must be {what}")
    if isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        if not parameter.multiple:
            raise ConfigError(f"{file}: {key} is a list; it takes one value")
        return [str(one) for one in value]
    return [str(value)] if parameter.multiple else str(value)
