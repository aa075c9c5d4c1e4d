"""The table of speculation: each number of drafts, predicted and measured."""

from __future__ import annotations

from typing import Any

from refimpl.bench.rounds import ADAPTIVE

HEAD = (
    "| | batch | drafts | accepted by position | tokens a round | c | v | predicted | measured | tokens/s (range) |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def speculation_table(result: dict[str, Any]) -> str:
    """Rows of every workload, batch size and number of drafts."""
    rows, told = "", ""
    for name, figures in result["results"].items():
        if "not_measured" in figures:
            rows += f"| {name} | | not measured: {figures['not_measured']} | | | | | | | |\n"
        elif "rates" in figures:
            for rate, found in figures["rates"].items():
                for batch in found["batches"].values():
                    rows += _climb(f"{name}, {float(rate):.0%} accepted", batch)
        else:
            rows += _climb(name, figures)
            if "outside_models" in figures:
                told += f"\n{name}, at the best: {figures['outside_models']:.1%} of the time is neither model's.\n"
    return f"{result['setting']['workload']}:\n\n{HEAD}{rows}{told}"


def crossing_table(result: dict[str, Any]) -> str:
    """How many times as fast as without drafts, by batch size and number of drafts; and from which batch on nothing pays."""
    text = f"{result['setting']['workload']}:\n"
    for name, figures in result["results"].items():
        for rate, found in figures.get("rates", {}).items():
            numbers = [number for batch in found["batches"].values() for number in batch["rungs"]]
            columns = list(dict.fromkeys(numbers))
            text += f"\n| {name}, {float(rate):.0%} accepted: batch | {' | '.join(columns)} | without, tokens/s |\n"
            text += "|---" * (len(columns) + 2) + "|\n"
            for size, batch in found["batches"].items():
                gains = " | ".join(f"{batch['rungs'][number]['measured']:.2f}" for number in columns)
                text += f"| {size} | {gains} | {batch['tokens_per_second_without']['median']:,.0f} |\n"
            chosen, measured = (found["crossing"][side] for side in ("chosen", "measured"))
            if chosen is not None and measured is not None:
                text += (
                    f"\nNothing pays from a batch of {chosen:.0f} on as the engine reckons, of {measured:.1f} as measured.\n"
                )
    return text


def _climb(name: str, figures: dict[str, Any]) -> str:
    def rate(of: dict[str, float]) -> str:
        return f"{of['median']:,.1f} ({of['min']:,.1f}–{of['max']:,.1f})"

    start = f"| {name} | {figures['batch_size']}"
    rows = f"{start} | 0 | | 1 | | | 1 | 1 | {rate(figures['tokens_per_second_without'])} |\n"
    for number, rung in figures["rungs"].items():
        tokens = f"{rung['tokens_a_round']:.2f}"
        if number == ADAPTIVE:
            chosen = ", ".join(f"{drafts}: {share:.0%}" for drafts, share in rung["chosen"].items())
            middle = f"adaptive ({chosen}) | | {tokens} | | | "
        else:
            accepted = ", ".join(f"{one:.0%}" for one in rung["acceptance"])
            middle = f"{number} | {accepted} | {tokens} | {rung['c']:.3f} | {rung['v']:.2f} | {rung['predicted']:.2f}"
        rows += f"{start} | {middle} | {rung['measured']:.2f} | {rate(rung['tokens_per_second'])} |\n"
    return rows
