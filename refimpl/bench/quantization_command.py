"""The command of ``refimpl bench`` that says what quantising costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from refimpl.bench.app import AsJson, Save, bench


@bench.command()
def quantization(
    *,
    model: Annotated[str, typer.Option(help="The model that is quantised, as of generate.")] = "smollm2",
    text: Annotated[
        Path | None, typer.Option(help="A file to predict, in UTF-8. Default: Alice's Adventures in Wonderland.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Of the text; default: all.")] = None,
    calibration_tokens: Annotated[int, typer.Option(help="How many AWQ is calibrated on.")] = 32_768,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda (cuda:1, …).")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of activations, and of weights that are not quantised.")] = "float32",
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """Perplexity and KL divergence in 4 bits (rounded to nearest, and AWQ) and in FP8, beside the model itself."""
    from refimpl.bench.quantization import run
    from refimpl.bench.result import report_result

    report_result(run(model, text, tokens, calibration_tokens, device, dtype, sys.stderr.isatty()), as_json, save)
