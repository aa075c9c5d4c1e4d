"""The command of ``refimpl bench`` that says what quantising costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from refimpl.bench.app import AsJson, Save, bench
from refimpl.quantize.commands import CalibrationTokens, Device, GroupSize, TextSeed, TrainSteps, TrainTokens


@bench.command()
def quantization(
    *,
    model: Annotated[str, typer.Option(help="The model that is quantised, as of generate.")] = "smollm2",
    text: Annotated[
        Path | None, typer.Option(help="A file to predict, in UTF-8. Default: Alice's Adventures in Wonderland.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Of the text; default: all.")] = None,
    group_size: GroupSize = None,
    calibration_tokens: CalibrationTokens = 32_768,
    train_steps: TrainSteps = 0,
    train_tokens: TrainTokens = 1_000_000,
    seed: TextSeed = 0,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Of activations, and of weights that are not quantised.")] = "float32",
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """Perplexity and KL divergence in 4 bits (rounded to nearest, and AWQ) and in FP8, beside the model itself.

    With --train-steps, AWQ's scales and levels are trained as well, and FP8's weights in a further row.
    """
    from refimpl.bench.quantization import run
    from refimpl.bench.result import report_result
    from refimpl.quantize.awq import AwqOptions
    from refimpl.quantize.distil import Training

    options = AwqOptions(
        group_size=group_size, calibration_tokens=calibration_tokens, seed=seed, device=device,
        training=Training.asked(train_steps, train_tokens, seed),
    )  # fmt: skip
    report_result(run(model, options, text, tokens, dtype, sys.stderr.isatty()), as_json, save)
