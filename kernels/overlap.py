"""Programmatic dependent launch: a kernel gets ready while the kernel before it still runs.

Kernels of one stream run one after another, and between the last program of one and the first load of the next a GPU reads
nothing for a microsecond or two. A decode step of 32 layers is some 300 launches. From sm_90 up a launch may begin before
the one before it has ended, and its programs wait at a place of their own choice::

    kernel A    ┤ work ├──────── last programs ──┤
    kernel B           ┤ weights on their way … wait ├─ lets C begin ─┤ work ├──────── …

Three rules keep that right, and every kernel of refimpl that overlaps follows them:

- Every program waits, also one that has nothing to do.
- It lets the next kernel begin after it has waited, not before. So whoever runs ahead of its wait runs beside one kernel,
  the one before it, and all earlier ones have ended.
- Before it waits a program writes nothing, and reads nothing that the kernel before it may write: weights, and what a step
  planned earlier.

A kernel that knows nothing of this, such as cuBLAS's, begins after its predecessor has ended, and one that overlaps with it
waits for its end. Source: NVIDIA, CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAPS_FROM = 90
"""The compute capability from which a launch may begin before the one before it has ended."""


@triton.jit
def after_previous(OVERLAP: tl.constexpr) -> None:
    """Wait until the kernel before has ended and what it wrote is there; then let the next one begin."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(tensor: Tensor) -> dict[str, bool]:
    """What a launch on the tensor's device says of it: the kernel's ``OVERLAP``, and Triton's ``launch_pdl``."""
    if tensor.is_cuda and _capability(tensor.device) >= OVERLAPS_FROM:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
