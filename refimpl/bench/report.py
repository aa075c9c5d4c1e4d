"""The README's tables, rendered from the result files in ``bench/results``: a number there is a number that was measured.

A table stands between ``<!-- bench:TOPIC -->`` and ``<!-- /bench -->``; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from refimpl.errors import RefimplError

_MARKED = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def newest_results() -> dict[str, list[dict[str, Any]]]:
    """The kept results by topic, one for each hardware: the one of the latest date."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(files("refimpl").joinpath("bench/results").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            result = json.loads(file.read_text())
            key = (result["topic"], result["setting"]["hardware"])
            if key not in newest or result["setting"]["date"] >= newest[key]["setting"]["date"]:
                newest[key] = result
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, _), result in sorted(newest.items()):
        topics.setdefault(topic, []).append(result)
    return topics


def render(text: str) -> str:
    """A document with its marked tables rendered.

    Raises:
        RefimplError: a marked topic has no result file, or no table.

    """
    results = newest_results()

    def replace(match: re.Match[str]) -> str:
        topic = match[2]
        if topic not in results or topic not in TABLES:
            raise RefimplError(
                f"no result file or no table for the topic {topic!r}; run refimpl bench {topic} --save FOLDER"
            )
        return match[1] + "".join(TABLES[topic](result) for result in results[topic]) + match[3]

    return _MARKED.sub(replace, text)


def render_file(path: Path) -> bool:
    """Render a file in place; whether anything changed."""
    try:
        before = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RefimplError(f"{path} cannot be read: {error}") from error
    after = render(before)
    path.write_text(after, encoding="utf-8")
    return before != after


def _caption(result: dict[str, Any]) -> str:
    s = result["setting"]
    versions = ", ".join(f"{name} {number}" for name, number in s["versions"].items())
    return f"\n`{s['command']}` — {s['hardware']}, {s['model']} in {s['dtype']}, {versions}, {s['date']}.\n"


def _recompute(result: dict[str, Any]) -> str:
    r = result["results"]
    rows = [
        f"| {name} | {side['flops_per_step'] / 1e9:,.2f} | {side['seconds_per_step_median'] * 1e3:,.0f} "
        f"({side['seconds_per_step_min'] * 1e3:,.0f}–{side['seconds_per_step_max'] * 1e3:,.0f}) |"
        for name, side in (("with the KV cache", r["cached"]), ("recomputing everything", r["recomputed"]))
    ]
    head = f"| {result['setting']['workload']} | GFLOP a step | ms a step, median (range) |\n|---|---|---|\n"
    ratio = f"| ratio | {r['flops_ratio']:,.0f} | {r['time_ratio']:,.1f} |\n"
    return head + "\n".join(rows) + "\n" + ratio + _caption(result)


def _sharing(result: dict[str, Any]) -> str:
    r = result["results"]
    cold, cached = (statistics.median(r[f"ttft_{side}_seconds"]) for side in ("cold", "cached"))
    return (
        "| shared | figure |\n|---|---|\n"
        f"| n = 4 samples of 1,000 tokens: blocks shared by all, blocks of one alone | {r['shared_blocks']} + "
        f"{r['own_blocks']} (unshared: {r['unshared_blocks']}) |\n"
        f"| a prompt of {r['prompt_tokens']:,} tokens, 1,500 of them cached: tokens computed | {r['computed_tokens']} |\n"
        f"| its time to the first token, not cached and cached | {cold:.2f} s, {cached:.2f} s ({r['ttft_ratio']:.1f}×) |\n"
        + _caption(result)
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"recompute": _recompute, "sharing": _sharing}
"""How each topic's result becomes a Markdown table."""
