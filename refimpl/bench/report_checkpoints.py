"""The tables of checkpoints: what each way of holding weights costs, and how fast they come into a device."""

from __future__ import annotations

from typing import Any

HEAD = (
    "| | MB | bits a parameter | perplexity | KL, mean | KL, 99th percentile | same top token | seconds to make |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def quantization_table(result: dict[str, Any]) -> str:
    """A row for the model itself, and one for each checkpoint made of it."""
    results = result["results"]
    rows = f"| not quantised | | | {results['perplexity']:.3f} | | | | |\n"
    for name, row in results.items():
        if isinstance(row, dict):
            made = "megabytes" in row
            size = f"{row['megabytes']:,.1f} | {row['bits_per_parameter']:.2f}" if made else "|"
            rows += (
                f"| {name} | {size} | {row['perplexity']:.3f} ({row['increase']:+.2%}) | {row['kl_mean']:.4f} | "
                f"{row['kl_p99']:.3f} | {row['same_top_token']:.1%} | {format(row['seconds'], '.0f') if made else ''} |\n"
            )
    s = result["setting"]
    told = f"\nGroups of {s['group_size']}; AWQ calibrated on {s['calibration']}; training: {s['training']}. Writing "
    told += f"these texts took {results['text_seconds']:.0f} s.\n"
    return f"{s['workload']}:\n\n{HEAD}{rows}{told}"


def load_table(result: dict[str, Any]) -> str:
    """A row for the shards as they are stored, and one for the engine's model where that was read too."""
    rows = "".join(
        f"| {name.replace('_', ' ')} | {row['gb_per_second']:.1f} | {min(row['seconds']):.2f}–{max(row['seconds']):.2f} | "
        f"{row['peak_beside'] / 1e9:.1f} |\n"
        if "not_measured" not in row
        else f"| {name.replace('_', ' ')} | not measured: {row['not_measured']} | | |\n"
        for name, row in result["results"].items()
    )
    return f"| {result['setting']['workload']} | GB/s | seconds | GB of the host beside |\n|---|---|---|---|\n{rows}"
