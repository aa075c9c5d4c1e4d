"""A server under load: what its users feel, for any server that speaks OpenAI's protocol.

Requests come by the clock (:mod:`refimpl.bench.open_loop`), and each answer is streamed
(:mod:`refimpl.bench.openai_stream`). Times count from when a request is sent, connection included; the lateness of the
generator stands beside them. Where it is of the order of what is measured, the figures are the generator's and not the
server's.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from refimpl.bench.http_stream import HttpError
from refimpl.bench.open_loop import Ask, Outcome, drive
from refimpl.bench.openai_stream import Answer, OpenAIStream
from refimpl.bench.request_times import goodput, percentiles
from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.rows import DoesNotFit, Figures, Rows
from refimpl.bench.serve_workload import Workload
from refimpl.errors import ConfigError, RefimplError

WARM_UP_TOKENS = 8
"""Output tokens of the requests that run before anything is measured."""
LATE = 0.1
"""The generator is late if its median lateness is over this share of the median time between tokens, or to the first."""
EXAMPLES = 3
"""Messages that are kept of each class of errors."""


@dataclass(frozen=True)
class Target:
    """The server."""

    url: str
    model: str | None = None
    """Its name there; None: the first that the server lists."""
    api_key: str | None = None
    timeout: float = 600.0
    """Seconds without a byte until a request is given up."""
    body: dict[str, Any] = field(default_factory=dict)
    """More fields of every request."""


@dataclass(frozen=True)
class Pattern:
    """How the requests come."""

    rates: Sequence[float | None] = (math.inf,)
    """Requests a second; each is a row of its own. None: the times of the trace."""
    max_concurrency: int | None = None
    warm_up: int = 4
    """Requests that are sent before each row, a few tokens each."""
    limits: tuple[float, float] = (0.2, 0.05)
    """Of goodput, in seconds: time to the first token, and time per output token."""


def run(
    target: Target,
    workload: Workload,
    pattern: Pattern | None = None,
    max_minutes: float | None = None,
    outcomes: dict[str, Outcome] | None = None,
    **known: Any,
) -> Result:
    """Measure every rate, one after the other.

    Args:
        target: the server.
        workload: what is asked.
        pattern: when.
        max_minutes: for everything; rows that no time is left for say so.
        outcomes: filled with what was measured, by row, for plots.
        known: of the server, for the result's setting: dtype and the like.

    Raises:
        ConfigError: a number or name is out of range.
        RefimplError: the server cannot be reached, or answers no request of the warm-up.

    """
    pattern = pattern or Pattern()
    check_url(target.url)
    if pattern.max_concurrency is not None and pattern.max_concurrency < 1:
        raise ConfigError(f"max_concurrency is {pattern.max_concurrency}; it must be 1 or more")
    asks = {_name(workload, rate): workload.asks(rate, f"row {row} " * (row > 0)) for row, rate in enumerate(pattern.rates)}
    rows = Rows(list(asks), _tell, max_minutes)
    outcomes = {} if outcomes is None else outcomes
    with rows.kept_when_interrupted():
        model = target.model or asyncio.run(_first_model(target))
        for name, listed in asks.items():
            rows.measure(name, partial(_measure, target, model, workload, pattern, name, listed, outcomes))
    first = next(iter(asks.values()))
    return Result(
        topic="serve",
        setting=setting(
            model=target.model or (model if rows.measured() else "unknown"),
            **({"model_hash": None, "dtype": "as served", "server": target.url} | known),
            workload=f"{workload.name}, {workload.num_prompts:,} requests, {'chat' if workload.chat else 'completions'}",
            workload_hash=workload_hash([(ask.prompt, ask.output) for ask in first]),
            pattern=asdict(workload) | {"max_concurrency": pattern.max_concurrency, "warm_up": pattern.warm_up},
            tokens_produced=sum(row["output_tokens"] for row in rows.measured().values()),
        ),
        results=rows.all(),
        checks=checks(rows.measured(), pattern.limits),
    )


def check_url(url: str) -> None:
    """See that a URL can be asked, and may stand in a result.

    Raises:
        ConfigError: it is no http URL, or has a password in it.

    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url is {url!r}; give one like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ConfigError("the url has a user or password in it; give a key by the environment variable OPENAI_API_KEY")


def _name(workload: Workload, rate: float | None) -> str:
    if rate is None:
        return "trace"
    if rate == math.inf:
        return "all-at-once"
    return f"{'poisson' if workload.burstiness == 1 else 'gamma'}-{rate:g}"


def _stream(target: Target, model: str = "", chat: bool = False) -> OpenAIStream:
    return OpenAIStream(target.url, model, chat, target.api_key, target.timeout, target.body)


async def _first_model(target: Target) -> str:
    async with _stream(target) as stream:
        try:
            models = await stream.models()
        except HttpError as error:
            raise RefimplError(
                f"{stream.base}/models does not tell which models there are ({error.kind}: {error}); is the server up? Else "
                "name the model by served_model_name"
            ) from error
    if not models:
        raise RefimplError(f"{target.url} lists no model; name one by served_model_name")
    return models[0]


def _measure(
    target: Target,
    model: str,
    workload: Workload,
    pattern: Pattern,
    name: str,
    asks: list[Ask],
    outcomes: dict[str, Outcome],
    at_most: float,
) -> Figures:
    if asks[-1].at > at_most:
        raise DoesNotFit(f"its requests come for {asks[-1].at:.0f} seconds, and {at_most:.0f} were left for it")
    some = _warm_up(workload, pattern.warm_up, name)
    with tqdm(total=len(asks), desc=name, unit="request", leave=False, disable=None) as bar:
        outcome = asyncio.run(_served(_stream(target, model, workload.chat), some, asks, pattern, bar.update))
    outcomes[name] = outcome
    return figures(outcome, pattern.limits)


def _warm_up(workload: Workload, count: int, row: str) -> list[Ask]:
    """Requests like those of a row, whose prompts it does not have, but for ``mixed`` and files: there they begin it."""
    some = replace(workload, num_prompts=max(1, count)).asks(math.inf, f"warm-up of {row} ")[:count]
    return [Ask(0.0, ask.prompt, min(ask.output, WARM_UP_TOKENS)) for ask in some]


async def _served(stream: OpenAIStream, some: list[Ask], asks: list[Ask], pattern: Pattern, ended: Any) -> Outcome:
    """Warm up with some requests, then measure."""
    async with stream:
        warm_up = await drive(some, partial(_send, stream), stream.clock, pattern.max_concurrency)
        failed = [answer for answer in warm_up.answers if answer.error]
        if failed and len(failed) == len(some):
            raise RefimplError(
                f"{stream.base} answered none of {len(some)} requests of the warm-up; {failed[0].error}: {failed[0].message}"
            )
        return await drive(asks, partial(_send, stream), stream.clock, pattern.max_concurrency, ended)


async def _send(stream: OpenAIStream, ask: Ask, due: float) -> Answer:
    return await stream.ask(ask.prompt, ask.output, due)


# ---------------------------------------------------------------------- figures


def figures(outcome: Outcome, limits: tuple[float, float]) -> Figures:
    """Percentiles and rates. Latencies are those of the requests that were answered; goodput counts all that were sent."""
    good = [answer for answer in outcome.answers if answer.error is None]
    seconds = max(outcome.seconds, 1e-9)
    tokens = sum(answer.times.tokens for answer in good)
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    kept = goodput([answer.times for answer in good], seconds, *limits)
    kept["share"] = kept["requests_per_second"] * seconds / max(1, len(outcome.answers))
    failed = Counter(answer.error for answer in outcome.answers if answer.error)
    return {
        "requests": len(outcome.answers),
        "answered": len(good),
        "errors": dict(failed.most_common()),
        "error_examples": {
            kind: [answer.message for answer in outcome.answers if answer.error == kind][:EXAMPLES] for kind in failed
        },
        "seconds": outcome.seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": tokens,
        "tokens_counted_by_server": all(answer.counted_by_server for answer in good),
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "tokens_per_second": (tokens + prompt_tokens) / seconds,
        "ttft": spread(value for answer in good if (value := answer.times.to_first_token) is not None),
        "itl": spread(gap for answer in good for gap in answer.gaps),
        "tpot": spread(value for answer in good if (value := answer.times.per_output_token) is not None),
        "widest_gap": spread(answer.times.widest_gap for answer in good if answer.gaps),
        "e2e": spread(answer.whole for answer in good),
        "goodput": kept,
        "most_in_flight": outcome.most_in_flight,
        "generator": {
            "sent_late": spread(outcome.sent_late),
            "woken_late": spread(outcome.woken_late),
            "kept_back": spread(outcome.waited),
        },
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Percentiles (:func:`refimpl.bench.request_times.percentiles`), the mean and the largest; empty of none."""
    listed = list(values)
    return percentiles(listed) | {"mean": fmean(listed), "max": max(listed)} if listed else {}


def generator_is_late(row: Figures) -> str | None:
    """A sentence if the generator was too late for the figures to be the server's."""
    for own, theirs, what in (("sent_late", "ttft", "first token"), ("woken_late", "itl", "gap between tokens")):
        late, felt = row["generator"][own].get("p50", 0.0), row[theirs].get("p50", 0.0)
        if felt and late > LATE * felt:
            return (
                f"the generator was {1e3 * late:,.1f} ms late (median) where a {what} took {1e3 * felt:,.1f} ms: these "
                "figures are more its own than the server's; send fewer requests, or from another machine"
            )
    return None


def checks(found: dict[str, Figures], limits: tuple[float, float]) -> list[Check]:
    """Nothing failed, and the medians keep the limits of goodput. Names are plain where there is one row."""
    made = []
    for name, row in found.items():
        prefix = "" if len(found) == 1 else f"{name.replace('-', '')}_"
        made.append(check(f"{prefix}errors", sum(row["errors"].values()), "<=", 0))
        for figure, limit in (("ttft", limits[0]), ("itl", limits[1])):
            if row[figure]:
                made.append(check(f"{prefix}{figure}_p50", row[figure]["p50"], "<=", limit))
    return made


def _tell(row: Figures) -> str:
    ttft, itl = (f"{1e3 * row[name]['p50']:,.1f} ms" if row[name] else "none" for name in ("ttft", "itl"))
    failed = f", {row['requests'] - row['answered']:,} failed" if row["errors"] else ""
    told = (
        f"first token {ttft}, between tokens {itl}, {row['output_tokens_per_second']:,.0f} output tokens/s, "
        f"goodput {row['goodput']['share']:.0%}{failed}"
    )
    late = generator_is_late(row)
    return f"{told}; {late}" if late else told
