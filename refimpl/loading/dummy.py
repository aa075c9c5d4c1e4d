"""Random weights in a model's shape (``load_format="dummy"``): for benchmarks of models that are not at hand."""

from __future__ import annotations

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02


def fill_with_random(views: dict[str, Tensor], seed: int) -> None:
    """Fill every view, seeded, on its own device: norms with ones, matrices with Normal(0, 0.02). Mutates the views."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, view in views.items():
        if "norm" in name:
            view.fill_(1.0)
            continue
        if view.device not in generators:
            generators[view.device] = torch.Generator(view.device).manual_seed(seed)
        view.normal_(0.0, STANDARD_DEVIATION, generator=generators[view.device])
