"""Which operations run by refimpl's Triton kernels: all that have one, on a GPU. Elsewhere they are plain torch.

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
    """Whether an operation on ``x`` runs by a Triton kernel."""
    return x.is_cuda and x.dtype != torch.float64 and _serves(x.device)


@cache
def _serves(device: torch.device) -> bool:
    """Whether triton is installed and the GPU is one that the kernels are compiled for."""
    major, minor = torch.cuda.get_device_capability(device)
    return find_spec("triton") is not None and 10 * major + minor >= TARGETS[0]
