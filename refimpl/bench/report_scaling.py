"""The table of scaling: every number of ranks and method, with what its figures are held against."""

from __future__ import annotations

from typing import Any

HEAD = (
    "| ranks | weights | | requests | output tokens/s | ms a token | efficiency | of the read floor "
    "| all-reduces, ms a step | predicted | measured over it | another engine, unchecked |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def scaling_table(result: dict[str, Any]) -> str:
    """Rows of every engine; below them what was left out, the sums between ranks, and whether tokens are the same."""
    results = result["results"]
    rows = "".join(_row(name, row) for name, row in results.items() if "workload" in row or "not_measured" in row)
    told = [f"{name} was left out: {why}." for name, why in results["left_out"].items()]
    told += [_drafted(name, row) for name, row in results.items() if "tokens_a_step" in row]
    told += [_sums(name, row) for name, row in results.items() if "ways" in row]
    same = {name: row for name, row in results.items() if "differing" in row}
    if same:
        of = "; ".join(f"{row['differing']} of {row['tokens']} ({name})" for name, row in same.items())
        told.append(f"Greedy tokens of a small model of the same heads that differ from those on the fewest ranks: {of}.")
    ceiling = results["machine"]["read_bytes_per_second"] / 1e12
    told.append(f"The read floor goes by {ceiling:.2f} TB/s, measured in the same run.")
    return f"{result['setting']['workload']}:\n\n{HEAD}{rows}\n" + "\n".join(told) + "\n"


def _row(name: str, row: dict[str, Any]) -> str:
    if "not_measured" in row:
        return f"| {name} | | | | not measured: {row['not_measured']} | | | | | | | |\n"
    how = "" if row["variant"] == "default" else row["variant"]
    if "over_default" in row:
        how += f" ({row['over_default']:.2f} times the default)"
    predicted = f"{row['predicted']['output_tokens_per_second']:,.0f}" if "predicted" in row else ""
    cells = [
        str(row["ranks"]),
        row["method"].replace("none", "16 bits"),
        how,
        row["workload"],
        f"{row['output_tokens_per_second']:,.1f}",
        f"{1e3 * row['itl_p50']:.2f}",
        _if_there(row.get("efficiency", {}), "share", "{:.2f}"),
        _if_there(row, "share_of_floor", "{:.0%}"),
        _if_there(row, "all_reduce_seconds", "{:.2f}", 1e3),
        predicted,
        _if_there(row, "over_predicted", "{:.2f}"),
        _if_there(row, "published", "{:,.0f}"),
    ]
    return "| " + " | ".join(cells) + " |\n"


def _if_there(row: dict[str, Any], name: str, form: str, factor: float = 1.0) -> str:
    return form.format(factor * row[name]) if name in row else ""


def _drafted(name: str, row: dict[str, Any]) -> str:
    user = row["user_tokens_per_second"]
    accepted = f"{row['synthetic_acceptance']:.0%} of the drafts accepted by chance"
    return (
        f"{name}, {accepted}: {row['tokens_a_step']:.2f} tokens a step; a user gets {user['by_itl']:,.1f} tokens/s by the "
        f"median time between two tokens, {user['by_rate']:,.1f} as the rate of all over their number."
    )


def _sums(name: str, row: dict[str, Any]) -> str:
    ways = [
        f"{way} " + ", ".join(f"{one['microseconds']:,.1f} ({tokens})" for tokens, one in sums.items())
        for way, sums in row["ways"].items()
    ]
    return f"{name}, µs of one of {row['sums']} sums (tokens): {'; '.join(ways)}."
