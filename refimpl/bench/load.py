"""How fast weights come from a folder into a device, and what that takes of the host's memory beside.

Shards of a model's shape are written with random numbers, as many layers as the size asked for holds, and read several
times: as they are stored, which is what disk, page cache and bus allow, and as the engine's model in its dtype, quantised if
that is asked for (not from 8 bits, which would need scales). What was just written lies in the page cache; with ``cold`` the
system is asked to forget it.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.rows import Figures, Rows
from refimpl.bench.shards import cut_to, written_shards
from refimpl.config import GIB, EngineArgs
from refimpl.errors import ConfigError
from refimpl.executor.device import resolve_device, resolve_dtype
from refimpl.loading.checkpoint import load_model
from refimpl.loading.folder import FolderCheckpoint
from refimpl.quantization.choose import choose_method
from refimpl.quantization.method import LinearMethod, fill
from refimpl.simulate.models import find_model

STORED = ("bfloat16", "float16", "float32", "float8_e4m3fn")
LEAST_ON_H200 = 5.0
"""GB/s from the page cache, on a machine with 16 cores."""
MOST_BESIDE = 1.2
"""Of the largest shard: memory of the host that loading may take beside what is loaded."""


def run(
    engine_options: dict[str, Any],
    model_config: str,
    folder: Path,
    gib: float = 8.0,
    stored: str = "bfloat16",
    repeats: int = 3,
    cold: bool = False,
) -> Result:
    """Write shards, unless the same are there already, and read them.

    Args:
        engine_options: of them device, dtype and quantization count.
        model_config: the shape by name, or a folder with a config.json.
        folder: where the shards are written, and stay. (/dev/shm is memory, and never cold.)
        gib: about as many GiB of them.
        stored: the dtype that they are written in.
        repeats: 1 or more, after one that warms up.
        cold: have the system forget the files before each.

    Raises:
        ConfigError: a name or number is out of range.

    """
    if repeats < 1 or stored not in STORED:
        raise ConfigError(f"repeats is {repeats}, stored {stored!r}; they must be 1 or more, and one of {', '.join(STORED)}")
    args = EngineArgs.from_options(engine_options)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    method = choose_method(args.quantization, device)
    config = cut_to(find_model(model_config), int(gib * GIB), getattr(torch, stored))
    checkpoint = written_shards(folder, config, getattr(torch, stored))
    sizes = [path.stat().st_size for path in checkpoint.files()]
    loads: dict[str, Callable[[], dict[str, Tensor]]] = {"as_stored": partial(_as_stored, checkpoint, device)}
    if getattr(torch, stored).itemsize > 1:  # 8 bits without scales are no model
        loads["as_model"] = partial(_as_model, checkpoint, dtype, device, method)
    wrong = _wrong(checkpoint, loads["as_stored"]())
    rows = Rows(list(loads), _tell)
    with rows.kept_when_interrupted():
        for name, load in loads.items():
            rows.measure(name, partial(_measure, checkpoint, load, device, repeats, cold))
    named = str(dtype).removeprefix("torch.")
    return Result(
        topic="load",
        setting=setting(
            model=f"{model_config}, {config.num_hidden_layers} layer(s)",
            model_hash=checkpoint.fingerprint(),
            dtype=f"{named} with {method.name} weights" if method.name else named,
            device=str(device),
            workload=f"{sum(sizes) / 1e9:.2f} GB of {stored} in {len(sizes)} files, {'cold' if cold else 'just read'}",
            workload_hash=workload_hash(sizes),
            tokens_produced=0,
            repeats=repeats,
        ),
        results=rows.all(),
        checks=[check("wrong_tensors", wrong, "<=", 0), *_checks(rows.measured(), device, cold)],
    )


def _checks(rows: dict[str, Figures], device: torch.device, cold: bool) -> list[Check]:
    if "as_stored" not in rows:
        return []
    row = rows["as_stored"]
    found = [check("peak_beside_in_shards", row["peak_beside"] / row["largest_shard"], "<=", MOST_BESIDE)]
    if device.type == "cuda" and not cold and "H200" in torch.cuda.get_device_name(device):
        found.append(check("gb_per_second", row["gb_per_second"], ">=", LEAST_ON_H200))
    return found


def _as_stored(checkpoint: FolderCheckpoint, device: torch.device) -> dict[str, Tensor]:
    """The tensors on the device, in the dtype that they have."""
    views = {name: torch.empty_like(tensor, device=device) for name, tensor in checkpoint.outlines()}
    for name, tensor in checkpoint.weights():
        fill(views[name], tensor)
    return views


def _as_model(
    checkpoint: FolderCheckpoint, dtype: torch.dtype, device: torch.device, method: LinearMethod
) -> dict[str, Tensor]:
    """The engine's model, by its parameters."""
    return dict(load_model(checkpoint, "auto", dtype, device, 0, method=method).named_parameters())


def _wrong(checkpoint: FolderCheckpoint, loaded: dict[str, Tensor]) -> int:
    """How many tensors did not arrive byte for byte."""
    return sum(
        not torch.equal(loaded[name].cpu().view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in checkpoint.weights()
    )


def _measure(
    checkpoint: FolderCheckpoint,
    load: Callable[[], dict[str, Tensor]],
    device: torch.device,
    repeats: int,
    cold: bool,
    _seconds: float,
) -> Figures:
    """Seconds of each loading, and the host's memory at the worst of them."""
    seconds, peaks = [], []
    for _ in range(repeats + 1):
        if cold:
            _forget(checkpoint.files())
        _settle(device)
        held = _reset_peak()
        began = time.perf_counter()
        loaded = load()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        ours = 0 if device.type == "cuda" else sum(tensor.nbytes for tensor in loaded.values())
        peaks.append(max(0, _peak(device) - held - ours))
        del loaded
    sizes = [path.stat().st_size for path in checkpoint.files()]
    return {
        "bytes": sum(sizes),
        "largest_shard": max(sizes),
        "seconds": seconds[1:],
        "gb_per_second": sum(sizes) / 1e9 / statistics.median(seconds[1:]),
        "peak_beside": max(peaks),
    }


def _tell(figures: Figures) -> str:
    beside, shard = figures["peak_beside"] / 1e9, figures["largest_shard"] / 1e9
    return (
        f"{figures['gb_per_second']:.2f} GB/s, {beside:.2f} GB of the host's memory beside (the largest shard: {shard:.2f})"
    )


def _forget(files: Iterable[Path]) -> None:
    """Have the system drop files from its page cache, where it can."""
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _settle(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _reset_peak() -> int:
    """Begin to watch this process's memory; bytes that it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    """The most bytes since then: pages of mapped files count, and pinned memory where the system does not count it."""
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) if device.type == "cuda" else 0
    return _status("VmHWM") + pinned


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise ConfigError("this system does not tell how much memory a process has; the benchmark needs Linux")
