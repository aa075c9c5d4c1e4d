"""Which method an option names, and which device can do it."""

from __future__ import annotations

import torch

from refimpl.errors import ConfigError
from refimpl.kernels.spec import LEAST_FOR_FP8
from refimpl.quantization.fp8 import Fp8
from refimpl.quantization.method import LinearMethod
from refimpl.quantization.plain import PLAIN


def choose_method(name: str | None, device: torch.device) -> LinearMethod:
    """The method of ``EngineArgs.quantization``.

    Raises:
        ConfigError: the device has no arithmetic for it; the message says what to use there.

    """
    if name is None:
        return PLAIN
    if refusal := why_not_fp8(device):
        raise ConfigError(
            f"quantization is {name!r}, but {refusal}; leave quantization out and use dtype=bfloat16 or float16 "
            "(AWQ, whose 4-bit weights serve such GPUs too, is not implemented yet)"
        )
    return Fp8()


def why_not_fp8(device: torch.device) -> str:
    """Why a device cannot run FP8 weights; empty where it can. A CPU can, slowly."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor >= LEAST_FOR_FP8:
        return ""
    name = torch.cuda.get_device_name(device)
    return f"{name} (sm_{major}{minor}) has no FP8 arithmetic, which begins with sm_{LEAST_FOR_FP8}"
