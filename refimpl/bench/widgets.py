"""What live widgets cost: the engine beside a dashboard, a frame of a large pool, and the opening of a long log.

The dashboard's messages go to a process of their own, as those of a notebook do. What a browser takes is measured where
playwright and a Chromium are installed; see :mod:`refimpl.bench.widget_page`.
"""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from refimpl.bench import widget_page
from refimpl.bench.logs import Run, large_pool, long_run
from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError, RefimplError
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.sampling_params import SamplingParams

READER = """
import json, struct, sys
frames = 0
while head := sys.stdin.buffer.read(4):
    frames += json.loads(sys.stdin.buffer.read(struct.unpack("<I", head)[0]))["type"] == "frame"
print(frames)
"""
WARM_UP = 5
"""Frames of the large pool that are not counted."""


def run(
    engine_options: dict[str, Any],
    pairs: int = 7,
    requests: int = 16,
    tokens: int = 128,
    frames: int = 60,
    num_blocks: int = 100_000,
    steps: int = 10_000,
) -> Result:
    """Measure all three; ``pairs`` of runs with and without a dashboard, ``frames`` of the large pool."""
    if min(pairs, requests, tokens, frames, num_blocks, steps) < 1:
        raise ConfigError("pairs, requests, tokens, frames, blocks and steps must be 1 or more")
    beside = _beside_the_engine(engine_options, pairs, requests, tokens)
    python_ms, messages, pool = _large_pool(num_blocks, frames)
    opened = _open_a_long_log(steps)
    browser = widget_page.missing() or widget_page.measure(messages[WARM_UP:], messages[:WARM_UP], pool.log)
    checks = [
        check("dashboard_slowdown", beside["slowdown_median"], "<=", 0.05),
        check("frames_per_second", beside["frames_per_second_median"], ">=", 5),
        check("open_log_s", opened["seconds"], "<=", 2),
    ]
    if isinstance(browser, str):
        print(f"refimpl: drawing in a browser is not measured: {browser}", file=sys.stderr)  # noqa: T201
    else:
        checks += _browser_checks(browser)
    checkpoint = open_checkpoint(engine_options["model"])
    workload = {"requests": requests, "tokens": tokens, "pairs": pairs, "blocks": num_blocks, "steps": steps}
    return Result(
        topic="widgets",
        setting=setting(
            checkpoint,
            dtype=engine_options["dtype"],
            workload=f"{requests} requests of {tokens} tokens beside a dashboard; {num_blocks:,} blocks; {steps:,} steps",
            workload_hash=workload_hash(workload),
            tokens_produced=(2 * pairs + 1) * requests * tokens,
            repeats=pairs,
        ),
        results={
            "beside_the_engine": beside,
            "frame_python_ms": _spread(python_ms),
            "open_log": opened,
            "browser": {"not_measured": browser} if isinstance(browser, str) else browser,
        },
        checks=checks,
    )


def _browser_checks(browser: dict[str, Any]) -> list[Check]:
    return [
        check("draw_p95_ms", browser["draw_ms"]["p95"], "<=", 8),
        check("first_paint_ms", browser["first_paint_ms"]["median"], "<=", 200),
    ]


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p95": ordered[len(ordered) * 95 // 100], "max": ordered[-1]}


# ---------------------------------------------------------------------- beside the engine


def _beside_the_engine(options: dict[str, Any], pairs: int, requests: int, tokens: int) -> dict[str, Any]:
    """Seconds of the same requests with and without a dashboard, in turn; frames that reached the reader."""
    engine = Engine(EngineArgs.from_options(options))
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    rates = []
    _serve(engine, "warm-up", requests, tokens)
    for pair in range(pairs):
        for side in ("with", "without") if pair % 2 else ("without", "with"):
            watched = _Watched(engine) if side == "with" else None
            seconds[side].append(_serve(engine, f"{pair} {side}", requests, tokens))
            if watched is not None:
                rates.append(watched.close() / seconds[side][-1])
    engine.close()
    slowdowns = [w / wo - 1 for w, wo in zip(seconds["with"], seconds["without"], strict=True)]
    return {
        "seconds_with": seconds["with"],
        "seconds_without": seconds["without"],
        "slowdowns": slowdowns,
        "slowdown_median": statistics.median(slowdowns),
        "frames_per_second": rates,
        "frames_per_second_median": statistics.median(rates),
    }


def _serve(engine: Engine, name: str, requests: int, tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for number in range(requests):
        engine.add_request(f"{name} {number}", [100 + (7 * number + i) % 150 for i in range(24)], params)
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started


class _Watched:
    """A dashboard on an engine, whose messages a process of its own reads."""

    def __init__(self, engine: Engine) -> None:
        self._reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._view = _dashboard(engine)
        self._view.send = self._send
        self._view._handle_custom_msg({"type": "hello"}, [])

    def _send(self, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        text = json.dumps(message | {"bytes": sum(map(len, buffers or ()))}).encode()
        assert self._reader.stdin is not None
        self._reader.stdin.write(struct.pack("<I", len(text)) + text)
        self._reader.stdin.flush()

    def close(self) -> int:
        """Frames that were read."""
        self._view.close()
        out, _ = self._reader.communicate()
        return int(out)


def _dashboard(source: Any) -> Any:
    try:
        from refimpl.visualizers import Dashboard
    except ImportError as error:
        raise RefimplError(str(error)) from error
    return Dashboard(source)


# ---------------------------------------------------------------------- a large pool, a long log


def _large_pool(num_blocks: int, frames: int) -> tuple[list[float], list[widget_page.Message], Run]:
    """Milliseconds of Python for each frame of a dashboard, two steps of the engine apart; and the messages."""
    from refimpl.visualizers.figures import ALL
    from refimpl.visualizers.frames import Sender
    from refimpl.visualizers.player import Player

    pool = large_pool(num_blocks)
    player, sender = Player(pool.log), Sender(ALL)
    messages, milliseconds = [sender.frame(player, True)], []
    for number in range(frames + WARM_UP):
        pool.step()
        pool.step()
        started = time.perf_counter()
        player.catch_up()
        messages.append(sender.frame(player, False))
        if number >= WARM_UP:
            milliseconds.append(1e3 * (time.perf_counter() - started))
    return milliseconds, messages, pool


def _open_a_long_log(steps: int) -> dict[str, Any]:
    """Seconds from the name of a saved log to the first frame of a dashboard on it."""
    log = long_run(steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.jsonl"
        log.save(path)
        started = time.perf_counter()
        view = _dashboard(path)
        view.send = lambda message, buffers=None: None
        view._handle_custom_msg({"type": "hello"}, [])
        seconds = time.perf_counter() - started
        view.close()
    rows = sum(len(record.sequence_ids) for record in log.records)
    return {"seconds": seconds, "steps": len(log.records), "rows": rows, "requests": 500}
