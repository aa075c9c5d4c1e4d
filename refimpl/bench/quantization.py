"""What quantising costs: perplexity and KL divergence of checkpoints in 4 bits and FP8 beside the model itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from refimpl.bench.result import Check, Result, check, setting
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.quantize.awq import AwqOptions, check_group_size, quantize_awq
from refimpl.quantize.evaluate import Evaluation, evaluate
from refimpl.quantize.fp8 import quantize_fp8
from refimpl.quantize.report import Written

NEAREST, AWQ, FP8 = "4 bits, rounded to nearest", "4 bits, AWQ", "FP8"


def run(
    model: str,
    text: Path | None = None,
    tokens: int | None = None,
    calibration_tokens: int = AwqOptions.calibration_tokens,
    device: str = "auto",
    dtype: str = "float32",
    show_progress: bool = False,
) -> Result:
    """Quantise a model in each way, and hold what comes of it against the model itself."""
    nearest = AwqOptions(search=False, device=device)
    aware = AwqOptions(calibration_tokens=calibration_tokens, device=device)
    ways: dict[str, Callable[[Path], Written]] = {
        NEAREST: lambda out: quantize_awq(model, out, nearest, show_progress),
        AWQ: lambda out: quantize_awq(model, out, aware, show_progress),
        FP8: lambda out: quantize_fp8(model, out, show_progress=show_progress),
    }
    with tempfile.TemporaryDirectory() as work:
        made = [_timed(write, Path(work) / str(number)) for number, write in enumerate(ways.values())]
        found = evaluate(
            [written.folder for written, _ in made], model, text=text, tokens=tokens, device=device, dtype=dtype,
            show_progress=show_progress,
        )  # fmt: skip
    checkpoint, first = open_checkpoint(model), found[0]
    rows = {name: _row(one, *how) for name, one, how in zip(ways, found, made, strict=True)}
    return Result(
        topic="quantization",
        setting=setting(
            checkpoint,
            dtype=dtype,
            workload=f"{first.tokens:,} tokens of {first.text}, in windows of {first.window:,}",
            workload_hash=first.text_hash,
            group_size=check_group_size(checkpoint.config, None),
            calibration=f"{calibration_tokens:,} tokens that the model wrote",
        ),
        results={"perplexity": first.reference_perplexity} | rows,
        checks=_checks(dict(zip(ways, found, strict=True))),
    )


def _timed(write: Callable[[Path], Written], out: Path) -> tuple[Written, float]:
    start = time.perf_counter()
    return write(out), time.perf_counter() - start


def _row(found: Evaluation, written: Written, seconds: float) -> dict[str, Any]:
    figures = msgspec.to_builtins(found)
    kept = ("perplexity", "kl_mean", "kl_p99", "same_top_token")
    return {name: figures[name] for name in kept} | {
        "increase": found.increase,
        "bits_per_parameter": written.bits_per_parameter,
        "seconds": seconds,
    }


def _checks(found: dict[str, Evaluation]) -> list[Check]:
    losses = {name: one.increase for name, one in found.items()}
    return [
        check("awq_perplexity_increase", losses[AWQ], "<=", 0.06),
        check("awq_share_of_rounding_to_nearest", losses[AWQ] / losses[NEAREST], "<=", 0.5),
        check("fp8_perplexity_increase", losses[FP8], "<=", 0.01),
    ]
