"""What quantising costs: perplexity and KL divergence of checkpoints in 4 bits and FP8 beside the model itself."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from refimpl.bench.result import Check, Result, check, setting
from refimpl.loading.checkpoint import Checkpoint, open_checkpoint
from refimpl.quantize.awq import AwqOptions, check_group_size, quantize_awq
from refimpl.quantize.calibration import calibration_windows
from refimpl.quantize.evaluate import Evaluation, evaluate, evaluate_rounded_inputs
from refimpl.quantize.fp8 import Fp8Options, quantize_fp8
from refimpl.quantize.report import Written

NEAREST, AWQ, FP8_NEAREST, FP8 = "4 bits, rounded to nearest", "4 bits, AWQ", "FP8, rounded to nearest", "FP8, trained"
ACTIVATIONS = "activations in FP8, weights as they are"
"""What no weights in FP8 can be better than."""


def run(
    model: str,
    options: AwqOptions | None = None,
    text: Path | None = None,
    tokens: int | None = None,
    dtype: str = "float32",
    show_progress: bool = False,
) -> Result:
    """Quantise a model in each way, and hold what comes of it against the model itself.

    Of each way the result tells the file's size in 10⁶ bytes, and the seconds from model to file. The texts that the model
    writes are the same for all, and their seconds are told apart.

    Args:
        model: as ``EngineArgs.model``.
        options: of AWQ; group size and device are those of rounding to nearest too. With training, FP8 is trained likewise.
        text: to predict, in UTF-8; None: the one that comes with refimpl.
        tokens: of its beginning; None: all.
        dtype: of activations while it is predicted, and of weights that are not quantised.
        show_progress: draw bars on stderr.

    """
    checkpoint = open_checkpoint(model)
    aware, text_seconds = _with_text(checkpoint, options or AwqOptions(), show_progress)
    nearest = dataclasses.replace(aware, search=False, training=None)
    ways: dict[str, Callable[[Path], Written]] = {
        NEAREST: lambda out: quantize_awq(model, out, nearest, show_progress),
        AWQ: lambda out: quantize_awq(model, out, aware, show_progress),
        FP8_NEAREST: lambda out: quantize_fp8(model, out, show_progress=show_progress),
    }
    if aware.training is not None:
        fp8 = Fp8Options(training=aware.training, prompts=aware.prompts, window=aware.window, device=aware.device)
        ways[FP8] = lambda out: quantize_fp8(model, out, fp8, show_progress)
    with tempfile.TemporaryDirectory() as work:
        made = [_timed(write, Path(work) / str(number)) for number, write in enumerate(ways.values())]
        how: dict[str, Any] = {
            "text": text,
            "tokens": tokens,
            "device": aware.device,
            "dtype": dtype,
            "show_progress": show_progress,
        }
        found = evaluate([written.folder for written, _ in made], model, **how)
        least = evaluate_rounded_inputs(model, **how)
    first, trained = found[0], aware.training
    rows = {name: _row(one) | _made(*file) for name, one, file in zip(ways, found, made, strict=True)}
    return Result(
        topic="quantization",
        setting=setting(
            checkpoint,
            dtype=dtype,
            workload=f"{first.tokens:,} tokens of {first.text}, in windows of {first.window:,}",
            workload_hash=first.text_hash,
            group_size=check_group_size(checkpoint.config, aware.group_size),
            calibration=f"{aware.calibration_tokens:,} tokens that the model wrote",
            training="none" if trained is None else f"{trained.steps:,} steps on {trained.tokens:,} tokens that it wrote",
        ),
        results={"perplexity": first.reference_perplexity, "text_seconds": text_seconds} | rows | {ACTIVATIONS: _row(least)},
        checks=_checks(dict(zip(ways, found, strict=True)), least),
    )


def _with_text(checkpoint: Checkpoint, options: AwqOptions, show_progress: bool) -> tuple[AwqOptions, float]:
    """The options with the texts that the model writes, which all that look at texts share, and the seconds it took."""
    start = time.perf_counter()
    tokens = max(options.calibration_tokens, options.training.tokens if options.training else 0)
    windows = calibration_windows(
        checkpoint, options.prompts, tokens, options.window, options.seed, options.device, show_progress
    )
    prompts = [{"prompt_token_ids": window} for window in windows.tolist()]
    return dataclasses.replace(options, prompts=prompts), time.perf_counter() - start


def _timed(write: Callable[[Path], Written], out: Path) -> tuple[Written, float]:
    start = time.perf_counter()
    return write(out), time.perf_counter() - start


def _row(found: Evaluation) -> dict[str, Any]:
    figures = msgspec.to_builtins(found)
    kept = ("perplexity", "kl_mean", "kl_p99", "same_top_token")
    return {name: figures[name] for name in kept} | {"increase": found.increase}


def _made(written: Written, seconds: float) -> dict[str, Any]:
    megabytes = written.bytes / 1e6
    return {"megabytes": megabytes, "bits_per_parameter": written.bits_per_parameter, "seconds": seconds}


def _checks(found: dict[str, Evaluation], activations: Evaluation) -> list[Check]:
    """FP8's is what its weights add to what rounding activations costs alone: that is more than 1% of small models."""
    losses = {name: one.increase for name, one in found.items()}
    fp8 = found.get(FP8, found[FP8_NEAREST])
    return [
        check("awq_perplexity_increase", losses[AWQ], "<=", 0.06),
        check("awq_share_of_rounding_to_nearest", losses[AWQ] / losses[NEAREST], "<=", 0.5),
        check("fp8_perplexity_increase_by_weights", fp8.perplexity / activations.perplexity - 1, "<=", 0.01),
    ]
