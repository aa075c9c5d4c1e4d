"""Which device and which dtype: what "auto" means and why, and what this hardware refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refimpl.config import GIB
from refimpl.errors import ConfigError

BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""CPU flags of native bfloat16 arithmetic (x86, x86, Arm)."""
NAMED_FLAGS = ", ".join(sorted(BF16_CPU_FLAGS))


class Choice(NamedTuple):
    """What an option comes to on this machine, and why."""

    value: Any
    reason: str


def choose_device(name: str) -> Choice:
    """The torch device of an option; "auto" is the first GPU if there is one.

    Raises:
        ConfigError: it is no device, or this machine or torch build has none of the kind.

    """
    if name == "auto":
        if torch.cuda.is_available():
            return Choice(torch.device("cuda", 0), "the first GPU")
        built = torch.version.cuda or torch.version.hip
        why = "sees no GPU here" if built else "is built for CPUs only"
        return Choice(torch.device("cpu"), f"torch {torch.__version__} {why}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; refimpl runs on cpu and cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = torch.device("cuda", device.index or 0)
        if (device.index or 0) >= count:
            raise ConfigError(f"device is {name!r}, but torch {torch.__version__} sees {count} GPUs here; use device=cpu")
    return Choice(device, "as asked for")


def resolve_device(name: str) -> torch.device:
    """The device of :func:`choose_device`, without the reason."""
    device: torch.device = choose_device(name).value
    return device


def choose_dtype(name: str, device: torch.device) -> Choice:
    """The torch dtype of an option; "auto" is bfloat16 where the device computes in it natively, else float16 or float32.

    Raises:
        ConfigError: the device cannot compute in it.

    """
    native_bf16, how = _native_bf16(device)
    if name == "auto":
        if native_bf16:
            return Choice(torch.bfloat16, f"native here: {how}")
        other = torch.float16 if device.type == "cuda" else torch.float32
        return Choice(other, f"no native bfloat16: {how}")
    if name == "bfloat16" and device.type == "cuda" and not native_bf16:
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic; use dtype=float16")
    return Choice(getattr(torch, name), "as asked for")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of :func:`choose_dtype`, without the reason."""
    dtype: torch.dtype = choose_dtype(name, device).value
    return dtype


def _native_bf16(device: torch.device) -> tuple[bool, str]:
    """Whether a device computes in bfloat16, and by what that is known."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return (major, minor) >= (8, 0), f"compute capability {major}.{minor}, and 8.0 is the least"
    found = cpu_flags() & BF16_CPU_FLAGS
    return bool(found), f"the CPU has {', '.join(sorted(found)) or f'none of {NAMED_FLAGS}'}"


def cpu_flags() -> frozenset[str]:
    """The flags of /proc/cpuinfo (all its words); empty where there is none."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def free_host_memory() -> int:
    """Bytes that this process may still take: the system's available memory, or what its control group leaves."""
    available = 4 * GIB
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:  # not Linux
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(available, _left_by_control_group(Path("/sys/fs/cgroup")))


def _left_by_control_group(group: Path) -> int:
    """Bytes that a control group still allows, or far more than any where it sets no limit.

    What it counts as used are also files that were read and may be forgotten: after a large checkpoint they are most of it.
    """
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        if limit == "max":
            return 2**62
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))
        return max(0, int(limit) - max(0, used - files))
    except (OSError, ValueError):
        return 2**62


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on a CPU, whose allocator's error has no class of its own."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in said or "out of memory" in said)
    )
