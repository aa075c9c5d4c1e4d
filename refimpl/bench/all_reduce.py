"""The sums between ranks: microseconds each, as many back to back as a step of Llama-3-70B has, by every way there is.

On GPUs they are recorded in a CUDA graph, as a decode step's are, and NCCL is measured beside one-shot and two-shot kernels
over symmetric memory (:mod:`refimpl.parallel.symmetric`). On a CPU gloo is measured alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.bench.result import Result, setting
from refimpl.errors import ConfigError, RankFailedError
from refimpl.parallel.collectives import Collectives, file_store, join
from refimpl.parallel.symmetric import WAYS, SymmetricMemory

HIDDEN_SIZE = 8192
TOKENS = (1, 8, 64)
IN_A_STEP = 160
"""Of Llama-3-70B: two for each of 80 layers."""
REPEATS = 20


def run(ranks: int, tokens: Sequence[int] = TOKENS, hidden_size: int = HIDDEN_SIZE, count: int = IN_A_STEP) -> Result:
    """Measure on so many ranks of this machine, each a process of its own.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        RankFailedError: one of them failed.

    """
    on_gpus = torch.cuda.is_available()
    if ranks < 2 or (on_gpus and ranks > torch.cuda.device_count()):
        most = f"2 to {torch.cuda.device_count()} here" if on_gpus else "2 or more"
        raise ConfigError(f"ranks is {ranks}; it must be {most}")
    with tempfile.TemporaryDirectory(prefix="refimpl-") as folder:
        given = {"size": ranks, "tokens": list(tokens), "hidden_size": hidden_size, "count": count, "folder": folder}
        command = [sys.executable, "-m", "refimpl.bench.all_reduce", json.dumps(given)]
        processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(ranks)]
        told = _first_ones_answer(processes)
    return Result(
        topic="all_reduce",
        setting=setting(
            dtype="bfloat16" if on_gpus else "float32",
            workload=f"{count} sums of [tokens, {hidden_size}] back to back{', in a CUDA graph' if on_gpus else ''}",
            tensor_parallel_size=ranks,
            repeats=REPEATS,
        ),
        results=json.loads(told),
        checks=[],
    )


def _first_ones_answer(processes: list[subprocess.Popen[bytes]]) -> bytes:
    """What rank 0 prints; when one fails, all are ended."""
    try:
        while processes[0].poll() is None:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        for process in processes:
            if failed or processes[0].returncode is None:
                process.kill()
        told = [process.communicate()[0] for process in processes]
    if failed:
        raise RankFailedError(f"rank {failed[0]} of the measurement failed: see above")
    return told[0]


def measure(rank: int, size: int, tokens: list[int], hidden_size: int, count: int, folder: str) -> dict[str, Any]:
    """What one rank measures, with all others: microseconds of a sum, by way and number of tokens."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store, dtype = file_store(Path(folder), size), torch.bfloat16 if on_gpu else torch.float32
    ranks = join(store, rank, size, device)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"nccl" if on_gpu else "gloo": ranks.all_reduce}
    if on_gpu:
        memory = SymmetricMemory(store, rank, size, max(tokens) * hidden_size, dtype, device)
        ways |= {name: memory.way(name) for name in WAYS}
    return {
        name: {str(rows): _time(way, rows, hidden_size, count, ranks, dtype) for rows in tokens}
        for name, way in ways.items()
    }


def _time(
    way: Callable[[Tensor], Tensor], rows: int, hidden_size: int, count: int, ranks: Collectives, dtype: torch.dtype
) -> dict[str, float]:
    """Microseconds of one of the sums, the median, and the largest error of a sum of known numbers."""
    device = ranks.device
    x = torch.full((rows, hidden_size), float(ranks.rank + 1), dtype=dtype, device=device)
    error = float((way(x.clone()).float() - sum(range(1, ranks.size + 1))).abs().max())
    x.zero_()

    def every() -> None:
        for _ in range(count):
            way(x)

    every()
    seconds = _replayed(every, ranks) if device.type == "cuda" else _called(every, ranks)
    return {"microseconds": 1e6 * sorted(seconds)[len(seconds) // 2] / count, "largest_error": error}


def _called(every: Callable[[], None], ranks: Collectives) -> list[float]:
    seconds = []
    for _ in range(REPEATS):
        ranks.least(0)
        began = time.perf_counter()
        every()
        seconds.append(time.perf_counter() - began)
    return seconds


def _replayed(every: Callable[[], None], ranks: Collectives) -> list[float]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(ranks.device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        every()
    seconds = []
    for _ in range(REPEATS):
        ranks.least(0)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


if __name__ == "__main__":
    found = measure(int(sys.argv[2]), **json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(found) if sys.argv[2] == "0" else "")
    sys.stdout.flush()
    os._exit(0)  # not every rank ends at the same time, which libraries may take amiss
