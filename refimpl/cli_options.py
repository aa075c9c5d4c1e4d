"""Options on the command line that come from a table: one for every field of EngineArgs, and the sampling parameters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, get_type_hints

import typer

from refimpl.cli_speculative import FLAGS, merge_flags
from refimpl.config import EngineArgs

Command = Callable[..., None]
Options = dict[str, Any]


def with_engine_options(command: Command, but: Collection[str] = ()) -> Command:
    """Add an option for every field of EngineArgs to a command that takes ``engine_options`` as a dict.

    Left out are those that only Python can fill, those that the command has itself, and those named in ``but``. Where
    ``speculative_config`` is not, its flags (:mod:`refimpl.cli_speculative`) come beside it, and end up in it.
    """
    left_out = {*inspect.signature(command).parameters, *but}
    types = get_type_hints(EngineArgs)
    engine = []
    for field in dataclasses.fields(EngineArgs):
        if field.name in left_out or not field.metadata.get("cli", True):
            continue
        kind = str if types[field.name] is Any else types[field.name]
        engine.append(_option(field.name, kind, field.default, field.metadata["help"], "Engine options"))
        if field.name == "speculative_config":
            engine += [_option(name, kind | None, None, text, "Engine options") for name, (kind, _, text) in FLAGS.items()]
    return _with_options(command, "engine_options", engine, merge_flags)


def with_fields(kind: type, argument: str, panel: str) -> Callable[[Command], Command]:
    """Add an option for each field of a dataclass, with its help, to a command that takes them as a dict in one argument."""
    types = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    options = [_option(one.name, types[one.name], one.default, one.metadata["help"], panel) for one in fields]
    return lambda command: _with_options(command, argument, options)


SAMPLING: dict[str, tuple[Any, Any, str]] = {
    "max_tokens": (int, 16, "Most tokens to generate for each."),
    "min_tokens": (int, 0, "Nothing ends a text before so many tokens."),
    "temperature": (float, 1.0, "0 takes the most probable token; 1 is the model's own distribution."),
    "top_p": (float, 1.0, "Draw from the most probable tokens of this mass."),
    "top_k": (int, 0, "Draw from this many of the most probable tokens; 0: all."),
    "min_p": (float, 0.0, "Drop tokens under this share of the most probable one's probability."),
    "presence_penalty": (float, 0.0, "Taken off the logit of each token that was generated before, from -2 to 2."),
    "frequency_penalty": (float, 0.0, "Taken off it for each time that it was, from -2 to 2."),
    "repetition_penalty": (float, 1.0, "Makes tokens of prompt and output less probable if above 1; 1: off."),
    "bad_words": (list[str] | None, None, "A text that is never generated; may be given several times."),
    "stop": (list[str] | None, None, "End a text where this appears, which is left out; may be given several times."),
    "stop_token_ids": (list[int] | None, None, "A token id that ends a text; may be given several times."),
    "include_stop_str_in_output": (bool, False, "Keep what stopped a text at its end."),
    "ignore_eos": (bool, False, "Go on past the end-of-text token."),
    "allowed_token_ids": (list[int] | None, None, "Draw from these token ids alone; may be given several times."),
    "skip_special_tokens": (bool, True, "Leave special tokens out of the text."),
    "logprobs": (int | None, None, "With --json, the log-probability of each token, and of so many most probable ones."),
    "prompt_logprobs": (int | None, None, "The same for the tokens of the prompt."),
}
"""The sampling parameters that a command line can give, by vLLM's names: kind, SamplingParams' default, help."""


def with_sampling_options(*, but: Collection[str] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Add the options of ``SAMPLING`` to a command that takes ``sampling_options`` as a dict.

    ``defaults`` are those of the command where they are not SamplingParams' own.
    """
    sampling = [
        _option(name, kind, defaults.get(name, default), text, "Sampling options")
        for name, (kind, default, text) in SAMPLING.items()
        if name not in but
    ]
    return lambda command: _with_options(command, "sampling_options", sampling)


def _option(name: str, kind: Any, default: Any, text: str, panel: str) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    names = [f"{flag}/--no-{flag[2:]}"] if kind in (bool, bool | None) else [flag]
    annotation = Annotated[kind, typer.Option(*names, help=text, rich_help_panel=panel)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_options(
    command: Command, argument: str, options: list[inspect.Parameter], merge: Callable[[Options], Options] = dict
) -> Command:
    """The command with more options, which it gets as a dict in one argument, merged, those that are None left out."""
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    own = [p for p in own if p.name != argument]

    def wrapped(**arguments: Any) -> None:
        given = {option.name: arguments.pop(option.name) for option in options}
        command(**arguments, **{argument: merge({name: value for name, value in given.items() if value is not None})})

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return wrapped
