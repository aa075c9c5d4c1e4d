"""Tables of what a service's users feel: arrivals by the clock, start-ups, and the time in which the GPU idles."""

from __future__ import annotations

from typing import Any

from refimpl.bench.request_times import SHARES


def serve_sim_table(result: dict[str, Any]) -> str:
    """Percentiles of every row, with what others did of the same."""
    shares = " / ".join(SHARES)
    rows = ""
    for name, figures in result["results"].items():
        if "not_measured" in figures:
            rows += f"| {name} | | not measured: {figures['not_measured']} | | | |\n"
            continue
        for side, one in ({"refimpl": figures} | figures.get("beside", {})).items():
            times = " | ".join(_milliseconds(one[figure]) for figure in ("ttft", "tpot", "widest_gap"))
            rows += f"| {name} | {side} | {one['output_tokens_per_second']:,.0f} | {times} |\n"
    head = (
        f"{result['setting']['workload']}; ms, {shares}:\n\n"
        "| arrivals a second | engine | output tokens/s | time to the first token | per output token | widest gap |\n"
        "|---|---|---|---|---|---|\n"
    )
    measured = {name: row["goodput"] for name, row in result["results"].items() if "goodput" in row}
    if not measured:
        return head + rows
    limits = next(iter(measured.values()))
    kept = f"first token within {1e3 * limits['ttft']:,.0f} ms and {1e3 * limits['tpot']:,.0f} ms a token"
    shown = ", ".join(f"{good['share']:.0%} of {name}" for name, good in measured.items())
    return f"{head}{rows}\nRequests with the {kept}: {shown}.\n"


def serve_table(result: dict[str, Any]) -> str:
    """Percentiles of every row, as clients of a server saw them, and how late the generator was."""
    shares = " / ".join(SHARES)
    rows, told = "", ""
    for name, row in result["results"].items():
        if "not_measured" in row:
            rows += f"| {name} | | | not measured: {row['not_measured']} | | | |\n"
            continue
        times = " | ".join(_milliseconds(row[figure]) for figure in ("ttft", "itl", "tpot", "e2e"))
        rows += f"| {name} | {row['requests_per_second']:,.1f} | {row['output_tokens_per_second']:,.0f} | {times} |\n"
        good, late = row["goodput"], row["generator"]
        failed = ", ".join(f"{count:,} {kind}" for kind, count in row["errors"].items()) or "none"
        told += (
            f"{name}: {good['share']:.0%} of the requests had their first token within {1e3 * good['ttft']:,.0f} ms and "
            f"took {1e3 * good['tpot']:,.0f} ms a token at most ({good['requests_per_second']:,.1f} a second); errors: "
            f"{failed}; most at once: {row['most_in_flight']:,}. The generator sent {_milliseconds(late['sent_late'])} ms "
            f"late, and woke up {_milliseconds(late['woken_late'])} ms late.\n"
        )
    head = (
        f"{result['setting']['workload']}; ms, {shares}:\n\n"
        "| arrivals a second | requests/s | output tokens/s | to the first token | between tokens | per output token "
        "| whole |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    return f"{head}{rows}\n{told}"


def _milliseconds(percentiles: dict[str, float]) -> str:
    return " / ".join(f"{1e3 * percentiles[name]:,.1f}" for name in SHARES) if percentiles else ""


def startup_table(result: dict[str, Any]) -> str:
    """Phases of the starts side by side."""
    starts = result["results"]
    rows = {phase: [start["phases"].get(phase, 0.0) for start in starts.values()] for phase in starts["cold"]["phases"]}
    rows["from the weights to the first token"] = [start["first_token_after_weights"] for start in starts.values()]
    shown = "".join(f"| {phase} | " + " | ".join(f"{s:.2f}" for s in seconds) + " |\n" for phase, seconds in rows.items())
    compiled = ", ".join(f"{name} {start['compiled']}" for name, start in starts.items())
    return (
        "| seconds | nothing compiled yet | the next start |\n|---|---:|---:|\n"
        f"{shown}\nKernels compiled: {compiled}; by other kinds of requests after that: "
        f"{starts['cold']['compiled_by_other_requests']}.\n"
    )


def idle_table(result: dict[str, Any]) -> str:
    """What the GPU did in a step."""
    r = result["results"]
    rows = [
        ("ms a step", f"{1e3 * r['seconds_per_step']:.2f}"),
        ("the GPU idles", f"{r['idle_share']:.1%}"),
        ("in gaps of over 20 µs", f"{r['idle_share_in_long_gaps']:.1%} ({r['long_gaps_per_step']:.1f} a step)"),
        ("kernels and copies a step", f"{r['launches_per_step']:.0f}"),
    ]
    shown = "".join(f"| {name} | {figure} |\n" for name, figure in rows)
    return f"| {result['setting']['workload']} | |\n|---|---|\n{shown}"
