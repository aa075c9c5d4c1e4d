"""How long until the first token: an engine is started in a process of its own, with nothing compiled yet, and once more.

A process is given an empty folder for Triton's cache, and the next one the folder as that one left it. What each phase took
is told by :mod:`refimpl.bench.startup_run`, which such a process runs. What counts is the time from when the weights are
there: loading them is a matter of the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.rows import Figures
from refimpl.bench.serve_sim import beside_vllm
from refimpl.bench.startup_run import MARK, PROMPT
from refimpl.bench.subject import model_or_shape
from refimpl.errors import RefimplError

BOUNDS = {"cold": 15.0, "warm": 8.0}
"""Seconds from the weights to the first token, of Llama-3-8B's shape on an H200."""


def run(engine_options: dict[str, Any], model_config: str | None = None) -> Result:
    """Start the engine twice.

    Args:
        engine_options: of the engine.
        model_config: a shape with random weights (llama-3-8b, or a folder with a config.json) in place of the model.

    Raises:
        ConfigError: both a model and a shape are given, or there is no such model.
        RefimplError: a start failed; what it said is part of the message.

    """
    _, checkpoint = model_or_shape(engine_options, model_config)
    results: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in tqdm(BOUNDS, desc="starts", leave=False, disable=None):
            results[name] = _start(engine_options, model_config, Path(cache))
    return Result(
        topic="startup",
        setting=setting(
            checkpoint,
            dtype=engine_options["dtype"],
            workload=f"a new process, then one request of {PROMPT} tokens",
            workload_hash=workload_hash([PROMPT]),
            tokens_produced=sum(row["tokens_produced"] for row in results.values()),
        ),
        results=results,
        checks=_checks(engine_options, model_config, results),
    )


def _start(engine_options: dict[str, Any], model_config: str | None, cache: Path) -> Figures:
    """One start; its phases as the process tells them."""
    asked = {"engine_options": engine_options, "model_config": model_config, "started": time.time()}
    command = [sys.executable, "-m", "refimpl.bench.startup_run", json.dumps(asked)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    for line in ended.stdout.splitlines():
        if line.startswith(MARK):
            told: Figures = json.loads(line.removeprefix(MARK))
            return told
    said = "\n".join(ended.stderr.splitlines()[-8:])
    raise RefimplError(f"the engine did not start; its process ended with code {ended.returncode}:\n{said}")


def _checks(engine_options: dict[str, Any], model_config: str | None, results: dict[str, Figures]) -> list[Check]:
    """A warm start compiles nothing anew; on the hardware that has bounds, they are kept."""
    checks = [check("compiled_in_a_warm_start", results["warm"]["compiled"], "<=", 0)]
    if beside_vllm(engine_options, model_config):
        checks += [
            check(f"start_{name}_8b", results[name]["first_token_after_weights"], "<=", BOUNDS[name]) for name in BOUNDS
        ]
    return checks
