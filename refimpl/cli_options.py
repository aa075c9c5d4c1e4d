"""Engine options on the command line: one for every field of EngineArgs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, get_type_hints

import typer

from refimpl.config import EngineArgs


def with_engine_options(command: Callable[..., None], but: Collection[str] = ()) -> Callable[..., None]:
    """Add an option for every field of EngineArgs to a command that takes ``engine_options`` as a dict.

    Left out are those that only Python can fill, those that the command has itself, and those named in ``but``.
    """
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    own = [p for p in own if p.name != "engine_options"]
    left_out = {p.name for p in own} | set(but)
    types = get_type_hints(EngineArgs)
    engine = []
    for field in dataclasses.fields(EngineArgs):
        if field.name in left_out or not field.metadata.get("cli", True):
            continue
        kind = str if types[field.name] is Any else types[field.name]
        flag = f"--{field.name.replace('_', '-')}"
        names = [f"{flag}/--no-{flag[2:]}"] if kind in (bool, bool | None) else [flag]
        option = typer.Option(*names, help=field.metadata["help"], rich_help_panel="Engine options")
        engine.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
            )
        )

    def wrapped(**arguments: Any) -> None:
        engine_options = {parameter.name: arguments.pop(parameter.name) for parameter in engine}
        command(**arguments, engine_options=engine_options)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + engine
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return wrapped
