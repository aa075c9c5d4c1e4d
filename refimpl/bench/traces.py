"""Workloads with the lengths of real traffic: read a public trace, fit a small summary to it, draw requests from that.

The source is AzureLLMInferenceDataset2023 of https://github.com/Azure/AzurePublicDataset (CC-BY), from Patel et al.,
"Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024: an hour of requests to a chat service
(``conv``) and to a code completion service (``code``). ``workloads/azure-2023.json`` keeps quantiles of them and none of
their rows. To make it again, download both files and run, where they lie::

    python -c "import json; from refimpl.bench.traces import fit_files; print(json.dumps(fit_files(
        {'conv': 'AzureLLMInferenceTrace_conv.csv', 'code': 'AzureLLMInferenceTrace_code.csv'})))" > azure-2023.json

The output lengths are kept apart for bins of like prompt lengths, because a cache's use depends on which prompt goes with
which output. Gaps between arrivals are drawn each on its own: that busy minutes follow one another is lost, and so is any
tie between a request's lengths and its time.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, TextIO, TypeVar

from refimpl.errors import ConfigError, RefimplError
from refimpl.simulate.workload import TraceRequest as TraceRequest

DATASET = "https://github.com/Azure/AzurePublicDataset"
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BINS = 16  # bins of equal count by prompt length, each with its own output lengths
PROMPT_POINTS, OUTPUT_POINTS, GAP_POINTS = 65, 33, 129  # quantiles kept of each law

T = TypeVar("T")


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a trace in Azure's form, a ``.csv`` or ``.csv.gz``; arrivals in seconds, to the microsecond.

    Raises:
        RefimplError: the file is missing, damaged or empty, or a line of it is wrong; the message says which.

    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            trace = list(_rows(path, file))
    except FileNotFoundError:
        raise RefimplError(f"{path} does not exist; give a trace as .csv or .csv.gz, such as those of {DATASET}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        what = f"{path} cannot be read ({error}); a trace is a .csv in UTF-8, or that as .csv.gz"
        raise RefimplError(f"{what}: get it again from {DATASET}") from error
    if not trace:
        raise RefimplError(f"{path} has no requests below its header; give a trace of at least one")
    return trace


def _rows(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    rows = csv.DictReader(file, restval="")
    if missing := [column for column in COLUMNS if column not in (rows.fieldnames or ())]:
        what = f"no column {' or '.join(missing)}; a trace's header names {', '.join(COLUMNS)}: name its columns so"
        raise _wrong(path, 1, what)
    first = before = None
    for row in rows:
        prompt, output = (_length(path, rows.line_num, column, row[column]) for column in COLUMNS[1:])
        time = _time(path, rows.line_num, row[COLUMNS[0]], before)
        first, before = first or time, time
        yield TraceRequest((time - first).total_seconds(), prompt, output)


def _wrong(path: Path, line: int, what: str) -> RefimplError:
    return RefimplError(f"{path}, line {line}: {what}", line=line)


def _length(path: Path, line: int, column: str, text: str) -> int:
    try:
        length = int(text)
    except ValueError:
        length = 0
    if length < 1:
        raise _wrong(path, line, f"{column} is {text!r}; it must be a whole number of tokens >= 1: mend or drop the line")
    return length


def _time(path: Path, line: int, text: str, before: datetime | None) -> datetime:
    """A row's time; of Azure's seven fractional digits ``fromisoformat`` drops the last."""
    try:
        time = _parsed(text)
        goes_back = before is not None and time < before
    except (ValueError, OverflowError, TypeError):  # TypeError: one of the two times names its zone, the other does not
        what = (
            f"TIMESTAMP is {text!r}; it must be a time like 2023-11-16 18:15:46.6805900 (with a zone in all lines or none)"
        )
        raise _wrong(path, line, f"{what}, or seconds >= 0: mend or drop the line") from None
    if goes_back:
        raise _wrong(path, line, f"TIMESTAMP {text} is before {before} above it; times must not go back: sort the lines")
    return time


def _parsed(text: str) -> datetime:
    """A time, or a number of seconds as the time so long after 1970 began."""
    try:
        seconds = float(text)
    except ValueError:
        return datetime.fromisoformat(text)
    if seconds < 0:
        raise ValueError("before second 0")
    return datetime(1970, 1, 1) + timedelta(seconds=seconds)


def fit(trace: Sequence[TraceRequest]) -> dict[str, Any]:
    """What ``draw`` needs of a trace: quantiles of its prompts and outputs, in tokens, and of its arrival gaps, in seconds.

    Raises:
        RefimplError: the trace is empty.

    """
    if not trace:
        raise RefimplError("an empty trace has no lengths to fit; give one of at least one request")
    by_prompt = sorted(trace, key=lambda request: request.prompt)
    edges = sorted({len(trace) * b // BINS for b in range(BINS + 1)})  # fewer bins where there are fewer requests
    outputs = [[request.output for request in by_prompt[start:end]] for start, end in pairwise(edges)]
    gaps = [after.arrival - before.arrival for before, after in pairwise(trace)]
    return {
        "requests": len(trace),
        "prompt": _quantiles([request.prompt for request in trace], PROMPT_POINTS),
        "output": [_quantiles(output, OUTPUT_POINTS) for output in outputs],
        "gap": _quantiles(gaps or [0.0], GAP_POINTS, digits=6),
    }


def fit_files(paths: Mapping[str, Path | str]) -> dict[str, Any]:
    """The content of ``workloads/azure-2023.json``, from the paths of the traces that it names. Units as in ``fit``."""
    names = {name: Path(path).name for name, path in paths.items()}
    python = f"import json; from refimpl.bench.traces import fit_files; print(json.dumps(fit_files({names})))"
    return {
        "source": f"{DATASET}, AzureLLMInferenceDataset2023: Patel et al., Splitwise, ISCA 2024",
        "licence": "CC-BY",
        "date": "2023-11-16",
        "changes": "instead of rows, quantiles at the levels x * x * (3 - 2 * x), x from 0 to 1 in equal steps: of prompts "
        "(tokens), of outputs (tokens) in bins of equal count by prompt, of gaps between arrivals (seconds)",
        "command": f'python -c "{python}"',
        "traces": {name: fit(read_trace(Path(path))) for name, path in paths.items()},
    }


def generate(name: str, count: int, seed: int) -> list[TraceRequest]:
    """``count`` requests like those of Azure's trace ``conv`` or ``code``; lengths in tokens, arrivals in seconds.

    Raises:
        ConfigError: no trace has that name, or the count is below 1.

    """
    traces = json.loads(files("refimpl").joinpath("bench/workloads/azure-2023.json").read_text(encoding="utf-8"))["traces"]
    if name not in traces:
        raise ConfigError(f"no trace is named {name!r}; there are {' and '.join(traces)}: give one of these")
    return draw(traces[name], count, seed)


def draw(fitted: Mapping[str, Any], count: int, seed: int) -> list[TraceRequest]:
    """``count`` requests of the laws that ``fit`` found; lengths in tokens, arrivals in seconds.

    The same seed gives the same requests everywhere: all chance comes from ``Random.random``, which Python promises to keep.
    Draws are stratified: n draws from a law take one from each nth part of it. So the totals do not hang on how many of the
    few very long outputs come up.

    Raises:
        ConfigError: the count is below 1.

    """
    if count < 1:
        raise ConfigError(f"a trace of {count} requests was asked for; it has at least 1: give a count >= 1", count=count)
    rng = random.Random(seed)  # noqa: S311 - a workload, no secret
    bins = len(fitted["output"])
    lengths: list[tuple[float, float]] = []
    for number, group in groupby(_stratified(count, rng), key=lambda u: min(int(u * bins), bins - 1)):
        levels = list(group)
        prompts = [_at(fitted["prompt"], level) for level in levels]
        outputs = [_at(fitted["output"][number], level) for level in _shuffled(_stratified(len(levels), rng), rng)]
        lengths += zip(prompts, outputs, strict=True)
    gaps = [_at(fitted["gap"], level) for level in _shuffled(_stratified(count - 1, rng), rng)]
    arrivals = accumulate(gaps, initial=0.0)
    return [
        TraceRequest(round(arrival, 6), max(1, round(prompt)), max(1, round(output)))
        for arrival, (prompt, output) in zip(arrivals, _shuffled(lengths, rng), strict=True)
    ]


def _stratified(count: int, rng: random.Random) -> list[float]:
    return [(i + rng.random()) / count for i in range(count)]


def _shuffled(items: list[T], rng: random.Random) -> list[T]:
    return sorted(items, key=lambda _: rng.random())


@cache
def _levels(points: int) -> list[float]:
    """The levels of the quantiles, from 0 to 1: closer at both ends, because the tails are where the tokens are."""
    return [x * x * (3 - 2 * x) for x in (i / (points - 1) for i in range(points))]


def _quantiles(values: Sequence[float], points: int, digits: int | None = None) -> list[float]:
    ordered = sorted(values)
    places = (level * (len(ordered) - 1) for level in _levels(points))
    return [round(_between(ordered, int(place), place % 1), digits) for place in places]


def _at(quantiles: Sequence[float], level: float) -> float:
    """The inverse of the cumulative distribution at a level, linear between the quantiles."""
    levels = _levels(len(quantiles))
    i = min(bisect_right(levels, level), len(levels) - 1) - 1
    return _between(quantiles, i, (level - levels[i]) / (levels[i + 1] - levels[i]))


def _between(values: Sequence[float], i: int, part: float) -> float:
    return values[i] + (values[min(i + 1, len(values) - 1)] - values[i]) * part
