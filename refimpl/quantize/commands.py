"""The commands of ``refimpl quantize``. As with all commands, what needs torch is imported when it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from refimpl.cli_checks import above_zero
from refimpl.cli_prompts import read_prompts

if TYPE_CHECKING:
    from refimpl.quantize.report import Written

quantize = typer.Typer(help="Write quantised checkpoints, and see what they lose.", no_args_is_help=True)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, ORG/NAME, or smollm2 (the embedded model).")
]
Out = Annotated[Path, typer.Option(help="The folder to write; it is whole or not there.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint folder that is there.")]
ShardGigabytes = Annotated[
    float, typer.Option(callback=above_zero, help="The most that one safetensors file holds, in 10⁹ bytes.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda (cuda:1, …).")]
GroupSize = Annotated[
    int | None,
    typer.Option(min=1, help="Input channels of one scale: 128, 64 or 32. Default: the largest that divides every matrix."),
]
CalibrationTokens = Annotated[int, typer.Option(min=1, help="How many tokens to calibrate on.")]
TrainSteps = Annotated[
    int,
    typer.Option(
        min=0, help="Steps in which scales and levels of all layers are trained together, after the searches, if any."
    ),
]
Window = Annotated[int, typer.Option(min=2, help="Tokens of one text to calibrate or train on.")]
TrainTokens = Annotated[int, typer.Option(min=1, help="How many tokens to train on.")]
TextSeed = Annotated[int, typer.Option(help="Of the texts that the model writes, and of their order in training.")]


@quantize.callback()
def _commands() -> None:
    """Write quantised checkpoints, and see what they lose."""


@quantize.command()
def awq(
    model: Model,
    *,
    out: Out,
    group_size: GroupSize = None,
    no_search: Annotated[
        bool, typer.Option("--no-search", help="Round to nearest: no scales, no clipping, no calibration (a baseline).")
    ] = False,
    no_clip: Annotated[bool, typer.Option("--no-clip", help="Search scales, and clip no ranges.")] = False,
    no_refine: Annotated[
        bool, typer.Option("--no-refine", help="Round to the nearest level after both searches, as AWQ was published.")
    ] = False,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="Texts to calibrate on: JSON lines, as of generate. Default: texts that the model writes itself."),
    ] = None,
    calibration_tokens: CalibrationTokens = 32_768,
    train_steps: TrainSteps = 0,
    train_tokens: TrainTokens = 1_000_000,
    window: Window = 512,
    seed: TextSeed = 0,
    device: Device = "auto",
    shard_gigabytes: ShardGigabytes = 5.0,
    overwrite: Overwrite = False,
) -> None:
    """Quantise the layers' matrices to 4 bits with activation-aware scales, in AutoAWQ's "gemm" layout."""
    from refimpl.quantize.awq import AwqOptions, quantize_awq
    from refimpl.quantize.distil import Training

    options = AwqOptions(
        group_size=group_size, search=not no_search, clip=not no_clip, refine=not no_refine,
        prompts=None if prompts_file is None else read_prompts(prompts_file), calibration_tokens=calibration_tokens,
        training=Training.asked(train_steps, train_tokens, seed), window=window, seed=seed, device=device,
        shard_bytes=int(shard_gigabytes * 10**9), overwrite=overwrite,
    )  # fmt: skip
    _tell(quantize_awq(model, out, options, show_progress=sys.stderr.isatty()))


@quantize.command()
def fp8(
    model: Model,
    *,
    out: Out,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="Texts to train on: JSON lines, as of generate. Default: texts that the model writes itself."),
    ] = None,
    train_steps: Annotated[
        int,
        typer.Option(min=0, help="Steps in which the weights of all layers are trained together; 0: rounded to nearest."),
    ] = 0,
    train_tokens: TrainTokens = 1_000_000,
    window: Window = 512,
    seed: TextSeed = 0,
    device: Device = "auto",
    shard_gigabytes: ShardGigabytes = 5.0,
    overwrite: Overwrite = False,
) -> None:
    """Quantise the layers' matrices to FP8 with a scale for each output channel, in the form of compressed-tensors."""
    from refimpl.quantize.distil import Training
    from refimpl.quantize.fp8 import Fp8Options, quantize_fp8

    options = Fp8Options(
        training=Training.asked(train_steps, train_tokens, seed), window=window, seed=seed, device=device,
        prompts=None if prompts_file is None else read_prompts(prompts_file),
        shard_bytes=int(shard_gigabytes * 10**9), overwrite=overwrite,
    )  # fmt: skip
    _tell(quantize_fp8(model, out, options, show_progress=sys.stderr.isatty()))


def _tell(written: Written) -> None:
    typer.echo(
        f"{written.folder}: {written.bytes / 1e6:,.1f} MB, {written.bits_per_parameter:.2f} bits a parameter. "
        f"refimpl generate --model {written.folder} runs it."
    )


@quantize.command()
def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="One or more quantised models, as of generate.")],
    *,
    against: Annotated[str, typer.Option(help="The model that it was made of, given as MODEL is.")],
    text: Annotated[
        Path | None, typer.Option(help="A file to predict, in UTF-8. Default: Alice's Adventures in Wonderland.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Of its beginning; default: all.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are predicted together; each window begins anew.")] = 1024,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Of activations, and of weights that are not quantised.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, with an object for each model.")] = False,
) -> None:
    """Compare quantised models with the one they were made of: perplexity, and the KL divergence of the next token."""
    import msgspec

    from refimpl.quantize.evaluate import evaluate as compare
    from refimpl.quantize.evaluate import evaluation_table

    found = compare(
        models, against, text=text, tokens=tokens, window=window, device=device, dtype=dtype,
        show_progress=sys.stderr.isatty(),
    )  # fmt: skip
    typer.echo(json.dumps([msgspec.to_builtins(one) for one in found]) if as_json else str(evaluation_table(found)))
