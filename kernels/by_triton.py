"""Which operations run by refimpl's Triton kernels: all that have one, on a GPU. Elsewhere they are plain torch,
or on a CPU the few operations of :mod:`refimpl.kernels.native`.

Who has a kernel and plain torch to choose from asks :func:`by_triton` of the tensor in hand, so the same model runs on any
device. float64 is torch's everywhere.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from refimpl.kernels.spec import TARGETS


def by_triton(x: Tensor) -> bool:
    """Whether an operation on ``x`` runs by a Triton kernel. They have no backward pass: what is trained is plain torch."""
    return x.is_cuda and x.dtype != torch.float64 and not x.requires_grad and _serves(x.device)


@cache
def _serves(device: torch.device) -> bool:
    return not obstacle(device, torch.float32)


def obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why operations on a device and dtype are torch's; empty where they run by Triton kernels."""
    if device.type != "cuda":
        return "on a CPU torch's operations are the fastest"
    if dtype == torch.float64:
        return "the kernels compute in bfloat16, float16 and float32, not in float64"
    if find_spec("triton") is None:
        return "triton is not installed (torch's CUDA builds bring it)"
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < TARGETS[0]:
        return f"the kernels are made for sm_{TARGETS[0]} and later, and this is sm_{major}{minor}"
    return ""
