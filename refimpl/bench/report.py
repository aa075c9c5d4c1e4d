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

from refimpl.bench.report_checkpoints import load_table, quantization_table
from refimpl.bench.report_scaling import scaling_table
from refimpl.bench.report_serving import idle_table, serve_sim_table, serve_table, startup_table
from refimpl.bench.report_speculation import crossing_table, speculation_table
from refimpl.errors import RefimplError

COMMANDS = {
    "offline": "throughput --model-config llama-3-8b",
    "serve": (
        "serve --dtype float32 --workload 32-256/16-64 --request-rate 0.5,1 --num-prompts 48 --goodput ttft:1000,tpot:200"
    ),
    "load": "load FOLDER --stored float8_e4m3fn --gib 12",
    "quantization": "quantization --group-size 32 --train-steps 300",
    "serve_sim": "serve-sim --model-config llama-3-8b",
    "startup": "startup --model-config llama-3-8b",
    "idle": "idle --model-config llama-3-8b",
    "speculation_shape": "speculation --model-config llama-3-70b --quantization fp8",
    "speculation_crossing": "speculation --model-config llama-3-70b --quantization fp8 --batch-sizes 1,64",
    "offline_llama_3_8b_fp8": "throughput --model-config llama-3-8b --quantization fp8",
    "offline_llama_3_70b_fp8": "throughput --model-config llama-3-70b --quantization fp8",
    "offline_llama_3_70b_awq": "throughput --model-config llama-3-70b --quantization awq",
}
"""What measures a topic, where it is not a command of its name."""
_MARKED = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def newest_results() -> dict[str, list[dict[str, Any]]]:
    """The kept results by topic, one for each hardware and dtype: the one of the latest date."""
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for file in sorted(files("refimpl").joinpath("bench/results").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            result = json.loads(file.read_text())
            key = (result["topic"], result["setting"]["hardware"], result["setting"].get("dtype", ""))
            if key not in newest or result["setting"]["date"] >= newest[key]["setting"]["date"]:
                newest[key] = result
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, *_), result in sorted(newest.items()):
        topics.setdefault(topic, []).append(result)
    return topics


def render(text: str) -> str:
    """A document with its marked tables rendered.

    Raises:
        RefimplError: a marked topic has no table.

    """
    results = newest_results()

    def replace(match: re.Match[str]) -> str:
        topic = match[2]
        if topic not in TABLES:
            raise RefimplError(f"no table for the topic {topic!r}; there are {', '.join(TABLES)}")
        tables = [TABLES[topic](result) for result in results.get(topic, [])]
        command = COMMANDS.get(topic, topic)
        unmeasured = f"Not measured yet: `refimpl bench {command} --save refimpl/bench/results`.\n"
        return match[1] + ("\n".join(tables) or unmeasured) + match[3]

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


def caption(result: dict[str, Any]) -> str:
    """The command and what it ran on."""
    s = result["setting"]
    versions = ", ".join(f"{name} {number}" for name, number in s["versions"].items())
    model = s["model"] if s["model"] == "no model" else f"{s['model']} in {s['dtype']}"
    return f"\n`{s['command']}` — {s['hardware']}, {model}, {versions}, {s['date']}.\n"


def _recompute(result: dict[str, Any]) -> str:
    r = result["results"]
    rows = [
        f"| {name} | {side['flops_per_step'] / 1e9:,.2f} | {side['seconds_per_step_median'] * 1e3:,.0f} "
        f"({side['seconds_per_step_min'] * 1e3:,.0f}–{side['seconds_per_step_max'] * 1e3:,.0f}) |"
        for name, side in (("with the KV cache", r["cached"]), ("recomputing everything", r["recomputed"]))
    ]
    head = f"| {result['setting']['workload']} | GFLOP a step | ms a step, median (range) |\n|---|---|---|\n"
    ratio = f"| ratio | {r['flops_ratio']:,.0f} | {r['time_ratio']:,.1f} |\n"
    return head + "\n".join(rows) + "\n" + ratio + caption(result)


def _sharing(result: dict[str, Any]) -> str:
    r = result["results"]
    cold, cached = (statistics.median(r[f"ttft_{side}_seconds"]) for side in ("cold", "cached"))
    return (
        "| shared | figure |\n|---|---|\n"
        f"| n = 4 samples of 1,000 tokens: blocks shared by all, blocks of one alone | {r['shared_blocks']} + "
        f"{r['own_blocks']} (unshared: {r['unshared_blocks']}) |\n"
        f"| a prompt of {r['prompt_tokens']:,} tokens, 1,500 of them cached: tokens computed | {r['computed_tokens']} |\n"
        f"| its time to the first token, not cached and cached | {cold:.2f} s, {cached:.2f} s ({r['ttft_ratio']:.1f}×) |\n"
        + caption(result)
    )


def _memory(result: dict[str, Any]) -> str:
    paged, contiguous = result["results"]["paged"], result["results"]["contiguous"]
    rows = [
        ("slot-time that holds a token", f"{contiguous['use']:.1%}", f"{paged['use']:.2%}"),
        ("slot-time wasted", f"{contiguous['waste']:.1%}", f"{paged['waste']:.2%}"),
        ("most slots that one sequence wasted", f"{contiguous['most_wasted_slots']:,}", f"{paged['most_wasted_slots']}"),
        ("sequences at once, peak", f"{contiguous['peak_sequences']}", f"{paged['peak_sequences']}"),
        ("sequences at once, on average", f"{contiguous['mean_sequences']:.0f}", f"{paged['mean_sequences']:.0f}"),
        ("steps", f"{contiguous['steps']:,}", f"{paged['steps']:,}"),
        ("preemptions", f"{contiguous['preemptions']}", f"{paged['preemptions']}"),
    ]
    head = f"{result['setting']['workload']}:\n\n| | contiguous | paged |\n|---|---|---|\n"
    return head + "".join("| " + " | ".join(row) + " |\n" for row in rows) + caption(result)


def _batching(result: dict[str, Any]) -> str:
    r = result["results"]
    sides = "".join(
        f"| {name} | {side['steps']:,} | {side['seconds']:,.0f} | {side['tokens_per_second']:,.0f} | "
        f"{r['sides']['static']['seconds'] / side['seconds']:.2f} |\n"
        for name, side in r["sides"].items()
    )
    shares = "".join(
        f"| {row['share_of_short']:.0%} | {row['static_steps']:,} | {row['continuous_steps']:,} | {row['ratio']:.2f} | "
        f"{row['ceiling']:.2f} |\n"
        for row in r["by_share"]
    )
    return (
        f"{result['setting']['workload']}; the ceiling, longest over mean answer, is {r['ceiling']:.2f}:\n\n"
        f"| | steps | seconds | tokens/s | ratio |\n|---|---|---|---|---|\n{sides}\n"
        "Other mixes at full length (50 and 2,000), counted in steps without a model:\n\n"
        f"| short answers | static | continuous | ratio | ceiling |\n|---|---|---|---|---|\n{shares}" + caption(result)
    )


def _scheduler(result: dict[str, Any]) -> str:
    rows = "".join(
        f"| {name} | {figures['median_ms']:.2f} | {figures['p99_ms']:.1f} |\n" for name, figures in result["results"].items()
    )
    return "| 256 sequences that decode | ms a step, median | 99th percentile |\n|---|---|---|\n" + rows + caption(result)


def _throughput(result: dict[str, Any]) -> str:
    head = (
        f"{result['setting']['workload']}:\n\n| | engine | tokens/s, median (range) | refimpl over it |\n|---|---|---|---|\n"
    )
    return head + _sides(result, "tokens_per_second", lambda rate: f"{rate:,.1f}") + caption(result)


def _latency(result: dict[str, Any]) -> str:
    head = "| time to the first token | engine | ms, median (range) | refimpl over it |\n|---|---|---|---|\n"
    return (
        head + _sides(result, "seconds", lambda seconds: f"{1e3 * seconds:,.{0 if seconds > 0.1 else 1}f}") + caption(result)
    )


def _sides(result: dict[str, Any], figure: str, show: Callable[[float], str]) -> str:
    """A row for each workload and engine."""
    rows = ""
    for name, figures in result["results"].items():
        if "not_measured" in figures:
            rows += f"| {name} | | not measured: {figures['not_measured']} | |\n"
            continue
        if figures.get("shrink", 1) != 1:
            name += f", lengths × {figures['shrink']:g}"
        for side, value in figures[figure].items():
            over = f"{figures['ratios'][side]:.2f}" if side in figures["ratios"] else ""
            rows += f"| {name} | {side} | {show(value['median'])} ({show(value['min'])}–{show(value['max'])}) | {over} |\n"
    return rows


def _overhead(result: dict[str, Any]) -> str:
    r = result["results"]
    rows = "".join(
        f"| {r['sequences']} sequences, {kind} | {r[kind]['ms_per_step']:,.2f} | {r[kind]['engine_share']:.1%} |\n"
        for kind in ("greedy", "sampled")
    )
    fell_back = r["sampled"]["beyond_head_share"]
    host = f"| {r['many']} sequences, without model and sampler | {r['host_ms']['median']:.2f} | |\n"
    return (
        "| | ms a step, median | outside the forward pass |\n|---|---|---|\n"
        + rows
        + host
        + f"\nFor {fell_back:.0%} of the sampled rows more than the first 256 ranks were looked at.\n"
        + caption(result)
    )


def _swap(result: dict[str, Any]) -> str:
    r = result["results"]
    head = "| tokens of the victim | swapped, ms (range) | predicted | recomputed, ms (range) | predicted |\n"
    rows = ""
    for row in r["lengths"]:
        cells = []
        for mode in ("swap", "recompute"):
            s = {name: 1e3 * seconds for name, seconds in row[mode].items()}
            cells.append(f"{s['median']:,.1f} ({s['min']:,.1f}–{s['max']:,.1f}) | {1e3 * row[f'{mode}_predicted']:,.1f}")
        rows += f"| {row['tokens']:,} | {' | '.join(cells)} |\n"
    measured = r["crossover_measured"]
    crossing = "none up to the longest" if measured is None else f"{measured:,.0f} tokens"
    beside = ", ".join(f"{b['ratio']['median']:.2f} times with {mode}" for mode, b in r["beside"].items())
    return (
        f"{head}|---|---|---|---|---|\n{rows}\nSwapping is the cheaper from {r['crossover_predicted']:,.0f} tokens on as "
        f"predicted; measured: {crossing}. Time between tokens of {r['others']} others in the two steps of a preemption, "
        f"over that without: {beside}.\n" + caption(result)
    )


def _beam(result: dict[str, Any]) -> str:
    r = result["results"]
    shares, copies = r["physical_share_of_each"], sum(r["copied_blocks"])
    ms = {name: 1e3 * figures["median"] for name, figures in r["seconds_per_step"].items()}
    beside = f"{r['step_over_samples']:.2f} times, {r['step_over_greedy']:.2f} times"
    return (
        f"| {result['setting']['workload']} | figure |\n|---|---|\n"
        f"| blocks in use, of those that independent copies take, summed over the steps | {r['physical_share']:.1%} "
        f"({min(shares):.1%}–{max(shares):.1%}) |\n"
        f"| most blocks at once; independent copies | {r['most_blocks']}; {r['unshared_blocks']} |\n"
        f"| blocks copied a step | {copies / sum(r['steps']):.2f} |\n"
        f"| ms a step: search, {r['width']} separate samples, greedy | {ms['beam']:.1f}, {ms['samples']:.1f}, "
        f"{ms['greedy']:.1f} |\n"
        f"| a step of the search over one of the samples, over a greedy one | {beside} |\n" + caption(result)
    )


def _offline(result: dict[str, Any]) -> str:
    rows = "".join(
        f"| {name} | {r['prompt_tokens']:,} | {r['output_tokens']:,} | {r['output_tokens_per_second']:,.0f} |\n"
        for name, r in result["results"].items()
    )
    head = "| requests | tokens in | out | output tokens a second |\n|---|---|---|---|\n"
    return head + rows + caption(result)


def _kernels(result: dict[str, Any]) -> str:
    ceilings = result["results"]["ceilings"]
    measured = result["results"]["kernels"]
    peer = result["results"].get("peer", "none")
    beside = f" {peer}, µs |" if peer != "none" else ""
    head = f"| kernel | shape | dtype | µs | MB | share of the ceiling |{beside}\n|---|---|---|---|---|---|"
    head += "---|\n" if beside else "\n"
    rows = ""
    for row in measured:
        shape = ", ".join(f"{axis} {size:,}" for axis, size in row["shape"].items())
        warm = "" if row["cold"] else " (from the cache)"
        rows += f"| {row['kernel']} | {shape} | {row['dtype']} | {row['microseconds']:,.1f} | {row['bytes'] / 1e6:,.2f} | "
        theirs = f"{row['peer_microseconds']:,.1f}" if "peer_microseconds" in row else ""
        rows += f"{row['share']:.0%}{warm} |" + (f" {theirs} |\n" if beside else "\n")
    told = (
        f"\nCeilings of this run: {ceilings['read_bytes_per_second'] / 1e12:.2f} TB/s read, "
        f"{ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s copied, {ceilings['flops_per_second'] / 1e12:,.0f} TFLOP/s in "
        f"16 bits; a launch that does nothing takes {ceilings['launch_microseconds']:.1f} µs.\n"
    )
    return head + rows + told + caption(result)


def _widgets(result: dict[str, Any]) -> str:
    r = result["results"]
    beside, log = r["beside_the_engine"], r["open_log"]
    rows = [
        ("a dashboard beside requests: slow-down", f"{beside['slowdown_median']:.1%}"),
        ("frames a second that reach it", f"{beside['frames_per_second_median']:.1f}"),
        ("Python's part of a frame", f"{r['frame_python_ms']['median']:.0f} ms"),
        (f"opening a log of {log['steps']:,} steps of {log['requests']:,} requests", f"{log['seconds']:.1f} s"),
    ]
    if isinstance(browser := r["browser"], dict):
        draw, pages = browser["draw_ms"], browser["exported_page_ms"]
        rows += [
            (
                "drawing a frame, 1% of the blocks changed: median, 95th percentile",
                f"{draw['median']:.1f}, {draw['p95']:.1f} ms",
            ),
            ("first picture of a widget", f"{browser['first_paint_ms']['median']:.0f} ms"),
            (
                "first picture of an exported page (of an empty page)",
                f"{pages['page']['median']:.0f} ms ({pages['empty']['median']:.0f})",
            ),
        ]
    table = "".join(f"| {what} | {figure} |\n" for what, figure in rows)
    return f"| {result['setting']['workload']} | |\n|---|---|\n{table}{caption(result)}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "recompute": _recompute,
    "sharing": _sharing,
    "memory": _memory,
    "batching": _batching,
    "scheduler": _scheduler,
    "throughput": _throughput,
    "latency": _latency,
    "overhead": _overhead,
    "swap": _swap,
    "beam": _beam,
    "widgets": _widgets,
    "offline_llama_3_8b_fp8": _offline,
    "offline_llama_3_70b_fp8": _offline,
    "offline_llama_3_70b_awq": _offline,
    "kernels": _kernels,
    "offline": _offline,
    "speculation": lambda result: speculation_table(result) + caption(result),
    "speculation_shape": lambda result: speculation_table(result) + caption(result),
    "speculation_crossing": lambda result: crossing_table(result) + caption(result),
    "scaling": lambda result: scaling_table(result) + caption(result),
    "load": lambda result: load_table(result) + caption(result),
    "quantization": lambda result: quantization_table(result) + caption(result),
    "serve": lambda result: serve_table(result) + caption(result),
    "serve_sim": lambda result: serve_sim_table(result) + caption(result),
    "startup": lambda result: startup_table(result) + caption(result),
    "idle": lambda result: idle_table(result) + caption(result),
}
"""How each topic's result becomes a Markdown table."""
