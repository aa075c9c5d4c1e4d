"""The claims page, written by ``refimpl bench report`` from the result files that are kept in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refimpl.bench.claims import CLAIMS
from refimpl.bench.report import COMMANDS, caption, newest_results
from refimpl.errors import RefimplError

_HEAD = """# The claims, measured

A widely read article, "LLM Inference Optimization: KV-Cache, PagedAttention, and GPU Memory Efficiency", tells engineers
what makes inference fast. Here is each claim that refimpl has measured or worked out so far, in our words. `refimpl bench
report` writes this page from the result files in `refimpl/bench/results`; a test holds them equal.

| idea | the claim | our figure | verdict | command |
|---|---|---|---|---|
"""


def render_claims() -> str:
    """The page as Markdown.

    Raises:
        RefimplError: a claim's topic has no result file.

    """
    results = newest_results()
    rows, captions = [], {}
    for claim in CLAIMS:
        measured: dict[str, Any] = {}
        told = "arithmetic"
        if claim.if_measured and claim.topic not in results:
            continue
        if claim.topic is not None:
            command = f"refimpl bench {COMMANDS.get(claim.topic, claim.topic)}"
            if claim.topic not in results:
                raise RefimplError(f"no result file for {claim.topic!r}; run {command} --save FOLDER")
            result = results[claim.topic][0]
            measured, told = result["results"], f"`{command}`"
            captions[claim.topic] = caption(result).strip()
        rows.append("| " + " | ".join((claim.idea, claim.text, *claim.judge(measured), told)) + " |")
    settings = "\n".join(f"- {name}: {text}" for name, text in captions.items())
    return _HEAD + "\n".join(rows) + "\n\nThe settings of what was measured:\n\n" + settings + "\n"


def write_claims(path: Path) -> bool:
    """Write the page; whether anything changed."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else None
        after = render_claims()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(after, encoding="utf-8")
    except OSError as error:
        raise RefimplError(f"{path} cannot be written: {error}") from error
    return before != after
