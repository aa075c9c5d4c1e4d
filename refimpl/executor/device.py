"""Which device and which dtype: what "auto" means, and what this hardware refuses."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from refimpl.config import GIB
from refimpl.errors import ConfigError

BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""CPU flags of native bfloat16 arithmetic (x86, x86, Arm)."""


def resolve_device(name: str) -> torch.device:
    """The torch device of an option; "auto" is the first GPU if there is one.

    Raises:
        ConfigError: it is no device, or this machine or torch build has none of the kind.

    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
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
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of an option; "auto" is bfloat16 where the device computes in it natively, else float16 or float32.

    Raises:
        ConfigError: the device cannot compute in it.

    """
    native_bf16 = _native_bf16(device)
    if name == "auto":
        if native_bf16:
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" else torch.float32
    if name == "bfloat16" and device.type == "cuda" and not native_bf16:
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic; use dtype=float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & BF16_CPU_FLAGS)


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
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available
