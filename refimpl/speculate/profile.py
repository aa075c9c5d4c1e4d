"""A profile of speculation: for each number of drafts what was accepted, what a round costs, what the law predicts of the
two, and what was measured. Where the last two part, something costs time that is neither a draft nor a check.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from refimpl.bench.rounds import ADAPTIVE, LEAST_SHARE, climb
from refimpl.bench.sides import Requests
from refimpl.bench.speculation import copying_prompts
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.speculative.law import LADDER
from refimpl.speculative.lengths import ladder
from refimpl.speculative_config import SpeculativeConfig
from refimpl.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.table import Table

LEAST_SPEED_UP = 1.05
"""Under it nothing is recommended: other texts and another hour make as much of a difference."""


def run(
    engine_options: dict[str, Any],
    prompts: Sequence[Any] | str = "chat",
    batch_sizes: Sequence[int] = (1,),
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    repeats: int = 2,
) -> dict[str, Any]:
    """Profile the drafter of ``engine_options``, by default n-grams, up to its ``num_speculative_tokens``, by default 8.

    Args:
        engine_options: of the engine; prefix cache and event log are off.
        prompts: texts, ``{"prompt": …}``, ``{"prompt_token_ids": …}``; or "chat" or "copy", the built-in ones.
        batch_sizes: sequences that run together. Prompts come again where there are fewer.
        max_tokens: of each answer; the end-of-text token is ignored.
        temperature: of all requests.
        repeats: times that every number of drafts is measured, in turn.

    Raises:
        ConfigError: a number is out of range, or there is no prompt.

    """
    if repeats < 1 or max_tokens < 2 or min(batch_sizes, default=0) < 1 or not temperature >= 0:
        raise ConfigError(
            f"repeats is {repeats}, max_tokens {max_tokens}, batch_sizes {list(batch_sizes)}, temperature {temperature}; "
            "they must be 1, 2, 1 and 0 or more"
        )
    config = SpeculativeConfig.of(engine_options.get("speculative_config") or {"num_speculative_tokens": LADDER[-1]})
    assert config is not None
    checkpoint = open_checkpoint(engine_options.get("model", EngineArgs.model))
    ids = _token_ids(prompts, checkpoint.tokenizer())
    options = {
        "max_num_seqs": max(batch_sizes),
        "max_model_len": min(max(map(len, ids)) + max_tokens + 1, checkpoint.config.context_limit()),
        **engine_options,
        "speculative_config": replace(config, adaptive=True),
        "enable_prefix_caching": False,
        "event_log_size": 0,
    }
    engine = Engine(EngineArgs.from_options(options))
    numbers = ladder(config.num_speculative_tokens)
    try:
        batches = [
            climb(engine, _enough(ids, size, max_tokens), size, numbers, repeats, temperature=temperature)
            for size in batch_sizes
        ]
    finally:
        engine.close()
    method = config.method if isinstance(config.method, str) else getattr(config.method, "name", "proposer")
    return {
        "model": checkpoint.name,
        "method": method,
        "synthetic_acceptance": config.synthetic_acceptance,
        "temperature": temperature,
        "batches": batches,
        "recommendation": [recommend(batch) for batch in batches],
        "doubts": [line for batch in batches for line in doubts(batch)],
    }


def _token_ids(prompts: Sequence[Any] | str, tokenizer: Tokenizer) -> list[list[int]]:
    if prompts == "copy":
        return [tokenizer.apply_chat_template([{"role": "user", "content": one["prompt"]}]) for one in copying_prompts()]
    if prompts == "chat":
        text = files("refimpl").joinpath("bench/workloads/parity-20.jsonl").read_text(encoding="utf-8")
        chats = [one["messages"] for one in map(json.loads, text.splitlines()) if "messages" in one]
        return [tokenizer.apply_chat_template(chat) for chat in chats]
    if isinstance(prompts, str) or not prompts:
        raise ConfigError(f"prompts are {prompts!r}; the built-in ones are chat and copy, and a file holds one or more")
    found = []
    for prompt in prompts:
        given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        ids = given["prompt_token_ids"] if "prompt_token_ids" in given else tokenizer.encode(given["prompt"])
        found.append(list(ids))
    return found


def _enough(ids: list[list[int]], batch_size: int, max_tokens: int) -> Requests:
    """Whole batches: all prompts, and the first ones again."""
    count = -(-len(ids) // batch_size) * batch_size
    return [(ids[number % len(ids)], max_tokens) for number in range(count)]


def recommend(batch: dict[str, Any]) -> str:
    """What to set for batches of this size, by what was measured."""
    size, best, rungs = batch["batch_size"], batch["best"], batch["rungs"]
    adaptive = rungs[ADAPTIVE]["measured"]
    start = f"batch {size}: "
    if not best or rungs[str(best)]["measured"] < LEAST_SPEED_UP:
        return (
            f"{start}no speculation; no number of drafts is {LEAST_SPEED_UP:g} times as fast, and adaptive is {adaptive:.2f}"
        )
    return (
        f"{start}num_speculative_tokens = {best}, {rungs[str(best)]['measured']:.2f} times as fast as without; adaptive, "
        f"the default, is {adaptive:.2f}"
    )


def doubts(batch: dict[str, Any]) -> list[str]:
    """Where measurement and prediction part, in words."""
    lines = []
    for name, rung in batch["rungs"].items():
        if name == ADAPTIVE:
            continue
        share, start = rung["measured"] / rung["predicted"], f"batch {batch['batch_size']}, {name} drafts: "
        if share < LEAST_SHARE:
            lines.append(f"{start}{share:.0%} of the prediction; something beside drafts and check takes time")
        elif share > 1 / LEAST_SHARE:
            lines.append(f"{start}{share:.0%} of the prediction; c and v were measured while the machine was busy")
    return lines


def tell(found: dict[str, Any]) -> None:
    """Print tables, doubts and the recommendation."""
    from rich.console import Console

    console = Console(highlight=False)
    for batch in found["batches"]:
        console.print(_table(found, batch))
    for line in [*found["doubts"], *found["recommendation"]]:
        console.print(line, soft_wrap=True)


def _table(found: dict[str, Any], batch: dict[str, Any]) -> Table:
    from rich.table import Table

    synthetic = found["synthetic_acceptance"]
    marked = f", SYNTHETIC ACCEPTANCE {synthetic:g}: what is accepted is chance" if synthetic is not None else ""
    title = f"{found['model']}, {found['method']}, batch {batch['batch_size']}, temperature {found['temperature']:g}{marked}"
    table = Table(title=title, title_justify="left")
    heads = (
        "drafts",
        "accepted by position",
        "rows with drafts",
        "tokens a round",
        "c",
        "v",
        "predicted",
        "measured",
        "share",
    )
    for head in heads:
        table.add_column(head, justify="left" if head.startswith("accepted") else "right")
    for name, rung in batch["rungs"].items():
        middle = f"{rung['drafted_share']:.0%}", f"{rung['tokens_a_round']:.2f}"
        if name == ADAPTIVE:
            chosen = ", ".join(f"{number}: {share:.0%}" for number, share in rung["chosen"].items())
            table.add_row(name, f"chose {chosen}", *middle, "", "", "", f"{rung['measured']:.2f}", "")
            continue
        accepted = " ".join(f"{rate:.0%}" for rate in rung["acceptance"])
        costs = f"{rung['c']:.3f}", f"{rung['v']:.2f}", f"{rung['predicted']:.2f}", f"{rung['measured']:.2f}"
        table.add_row(name, accepted, *middle, *costs, f"{rung['measured'] / rung['predicted']:.0%}")
    return table
