"""The commands of ``refimpl speculate``. As with all commands, what needs torch is imported when it runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.cli_checks import above_zero
from refimpl.cli_options import with_engine_options
from refimpl.errors import ConfigError
from refimpl.speculate.profile_command import profile

speculate = typer.Typer(help="Train drafters for speculative decoding, and see what they bring.", no_args_is_help=True)

NOT_OF_TRAINING = ("model", "max_model_len", "seed", "speculative_config")


@speculate.callback()
def _commands() -> None:
    """Train drafters for speculative decoding, and see what they bring."""


def _train(
    *,
    target: Annotated[str, typer.Option(help="The model to draft for, as --model takes it.")] = "smollm2",
    out: Annotated[Path, typer.Option(help="The folder of the drafter; an interrupted training there is gone on with.")],
    kind: Annotated[str, typer.Option(help="head (over the target's hidden states) or llama (a small model).")] = "head",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers that the target writes to train on.")] = 1_000_000,
    held_out: Annotated[int, typer.Option(min=1, help="Chats of other seeds to measure by.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest chat.")] = 512,
    seed: Annotated[int, typer.Option(help="Of text, weights and order; what is held out has the next one.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 2000,
    max_seconds: Annotated[
        float | None, typer.Option(callback=above_zero, help="After which training ends, however many steps it made.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step's texts, with padding.")] = 16_384,
    learning_rate: Annotated[float, typer.Option(callback=above_zero, help="At its peak.")] = 1e-3,
    temperature: Annotated[float, typer.Option(help="At which the drafter is to be close to the target.")] = 0.7,
    draft_vocab_size: Annotated[
        int, typer.Option(min=1, help="head: how many tokens, the most frequent, it drafts.")
    ] = 16_384,
    attends: Annotated[
        str, typer.Option(help="head: for each block, the target's layer whose keys it reads, or none; commas between.")
    ] = "-1",
    intermediate_size: Annotated[int | None, typer.Option(min=1, help="head: of each block's feed-forward layer.")] = None,
    draft_steps: Annotated[int, typer.Option(min=1, help="head: drafted tokens in a row that it learns.")] = 3,
    hidden_size: Annotated[int, typer.Option(min=1, help="llama: its width.")] = 192,
    layers: Annotated[int, typer.Option(min=1, help="llama: its depth.")] = 2,
    engine_options: dict[str, Any],
) -> None:
    """Train a drafter on text that the target writes itself, and print what share of its tokens the target accepts."""
    from refimpl.speculate.train import Training, TrainOptions

    options = TrainOptions(
        kind=kind, tokens=tokens, held_out=held_out, max_tokens=max_tokens, seed=seed, steps=steps,
        batch_tokens=batch_tokens, max_seconds=max_seconds, learning_rate=learning_rate, temperature=temperature,
        draft_vocab_size=draft_vocab_size, attends=_layers(attends), intermediate_size=intermediate_size,
        draft_steps=draft_steps, hidden_size=hidden_size, layers=layers,
    )  # fmt: skip
    command = shlex.join(["refimpl", *sys.argv[1:]])
    report = Training(target, out, options, engine_options, command=command, show_progress=sys.stderr.isatty()).run()
    typer.echo(report.acceptance_table())
    typer.echo(
        f"{out}: {report.num_parameters / 1e6:.2f} million parameters, trained on {report.answer_tokens:,} tokens; it can "
        f"draft {report.coverage:.1%} of held-out tokens. report.json and training.svg tell more."
    )


def _write(
    *,
    target: Annotated[str, typer.Option(help="The model that writes, as --model takes it.")] = "smollm2",
    out: Annotated[Path, typer.Option(help="The folder of the drafter that will be trained on it.")],
    part: Annotated[
        int, typer.Option(min=0, help="Which chats of the training text: the first ones, the next, …, from 0.")
    ] = 0,
    chats: Annotated[int, typer.Option(min=1, help="Chats of a part.")] = 4096,
    held_out: Annotated[
        int, typer.Option(min=0, help="Write so many chats of each kind that is held out, in place of a part.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest chat.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the text, as training has it.")] = 0,
    engine_options: dict[str, Any],
) -> None:
    """Write text for `refimpl speculate train` beforehand: several processes at once, where one leaves a device idle."""
    from refimpl.speculate.text_plan import write_held_out, write_part

    options = {**engine_options, "max_model_len": max_tokens}
    if held_out:
        written = write_held_out(target, out, seed + 1, max_tokens, held_out, options)
    else:
        written = write_part(target, out, seed, max_tokens, range(part * chats, (part + 1) * chats), options)
    typer.echo(f"{written:,} tokens of answers")


speculate.command("write")(with_engine_options(_write, but=NOT_OF_TRAINING))
speculate.command("train")(with_engine_options(_train, but=NOT_OF_TRAINING))
speculate.command("profile")(with_engine_options(profile))


def _layers(text: str) -> tuple[int | None, ...]:
    try:
        return tuple(None if part.strip() == "none" else int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"attends is {text!r}; it must be layers with commas between, such as -1, none or 14,-1"
        ) from error
