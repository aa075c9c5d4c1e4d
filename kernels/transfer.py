"""Numbers of the host on their way to a device.

A GPU works through what it was ordered to do while the host prepares the next step. A transfer from ordinary memory ends
that: the system may move such memory at any time, so the host has to wait until the GPU has come to the transfer and made
it. From pinned memory the transfer is one more order, and nobody waits. Torch keeps pinned memory that is given back until
the transfers from it are over.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, in their dtype and shape. On a CPU they are not copied."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
