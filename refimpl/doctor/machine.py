"""CPU, memory, disk and devices; and what the engine would choose on them."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

from refimpl.attention import Setting, backend_choice
from refimpl.cache_folder import cache_folder
from refimpl.config import GIB, EngineArgs
from refimpl.doctor.findings import Finding
from refimpl.errors import ConfigError
from refimpl.executor.device import choose_device, choose_dtype, cpu_flags, free_host_memory
from refimpl.executor.serving import who_serves
from refimpl.quantization.choose import choose_method

SHOWN_FLAGS = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""CPU flags that matter to how fast matrices are multiplied."""
LEAST_MEMORY = 1.5 * GIB
"""The embedded model in float32, its cache, and Python with torch."""
LEAST_DISK = 1 * GIB
"""The embedded model's download and converted copy, and some notebooks."""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its control group's quota, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def check_machine() -> list[Finding]:
    """What there is, whatever the model."""
    flags = [flag for flag in SHOWN_FLAGS if flag in cpu_flags()]
    return [
        Finding("machine", "system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        Finding("machine", "CPU flags", ", ".join(flags) or "none that are known here"),
        check_threads(),
        check_memory(free_host_memory()),
        check_disk(cache_folder()),
        *_devices(),
    ]


def check_threads() -> Finding:
    """Threads that wait for each other cost more than they give: no more than cores."""
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    value = f"{threads} of torch on {cores} usable core(s)"
    if threads > cores:
        return Finding("machine", "threads", value, "warning", f"set OMP_NUM_THREADS={cores} before Python starts")
    return Finding("machine", "threads", value)


def check_memory(free: int) -> Finding:
    """Bytes that this process may take, against what the embedded model needs."""
    value = f"{free / GIB:.1f} GiB free"
    if free < LEAST_MEMORY:
        advice = f"the embedded model wants {LEAST_MEMORY / GIB:.1f} GiB: close other programs, or use model='tiny'"
        return Finding("machine", "memory", value, "warning", advice)
    return Finding("machine", "memory", value)


def check_disk(folder: Path) -> Finding:
    """Room for models, where the folder is or would be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    value, writable = f"{free / GIB:.1f} GiB free for {folder}", os.access(there, os.W_OK)
    if not writable or free < LEAST_DISK:
        why = "1 GiB is the least" if writable else f"{there} cannot be written to"
        return Finding("machine", "disk", value, "warning", f"{why}: set REFIMPL_CACHE to another folder")
    return Finding("machine", "disk", value)


def _devices() -> list[Finding]:
    import torch

    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            value = f"{name}, sm_{major}{minor}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            found.append(Finding("machine", f"cuda:{index}", value))
        return found
    if Path("/dev/nvidia0").exists():
        advice = (
            "torch cannot use it: install a CUDA build of torch that fits the driver (nvidia-smi names its CUDA version)"
        )
        return [Finding("machine", "GPU", f"an NVIDIA GPU, but torch {torch.__version__} sees none", "warning", advice)]
    return [Finding("machine", "GPU", "none", "note", "the CPU computes")]


def check_choices(args: EngineArgs) -> tuple[list[Finding], Any, Any]:
    """Device, dtype and kernels as the engine chooses them, each with its reason; and the first two themselves."""
    findings, device, dtype = [], None, None
    try:
        device, reason = choose_device(args.device)
        findings.append(Finding("choices", "device", str(device), advice=reason))
        dtype, reason = choose_dtype(args.dtype, device)
        findings.append(Finding("choices", "dtype", str(dtype).removeprefix("torch."), advice=reason))
        choose_method(args.quantization, device)
    except ConfigError as error:
        findings.append(Finding("choices", "device, dtype and quantization", "none", "error", str(error)))
    known = {name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None}
    setting = Setting(head_dim=0, block_size=args.block_size, **known)  # the model, and so its head size, is not looked at
    name, reason = backend_choice(args.attention_backend, setting)
    findings.append(Finding("choices", "attention", name, advice=reason))
    served = who_serves(args, setting)
    return [*findings, *(Finding("choices", one.operation, one.by, advice=one.why) for one in served)], device, dtype
