"""What a training goes on from: weights, the optimizer's moments, and the figures so far, in one safetensors file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from refimpl.errors import CheckpointError
from refimpl.speculate.report import Trained

SECONDS_BETWEEN = 60.0
MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingState:
    """The file, and whose state it keeps. It is written by a rename, so it is whole whenever a run ends."""

    def __init__(self, path: Path, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> None:
        self._path, self._weights, self._optimizer = path, weights, optimizer
        self._saved = time.monotonic()

    def due(self) -> bool:
        """Whether the last save is some time ago."""
        return time.monotonic() - self._saved > SECONDS_BETWEEN

    @contextmanager
    def kept_on_leaving(self, history: list[Trained], told: list[Tensor]) -> Iterator[None]:
        """Save when the block ends, by Ctrl-C too."""
        try:
            yield
        finally:
            self.save(history, told)

    def save(self, history: list[Trained], told: list[Tensor]) -> None:
        """Write everything. ``told`` are steps' figures, still on the device: loss, acceptances. They go to ``history``."""
        from safetensors.torch import save_file

        if told:
            history.extend(Trained(loss=row[0], acceptance=row[1:]) for row in torch.stack(told).tolist())
            told.clear()
        if not history:
            return
        tensors = {}
        for name, weight in self._weights.items():
            tensors[name] = weight.detach().cpu().contiguous()
            for moment in MOMENTS:
                tensors[f"{moment}/{name}"] = self._optimizer.state[weight][moment].cpu().contiguous()
        work = self._path.with_suffix(".part")
        save_file(tensors, work, metadata={"history": msgspec.json.encode(history).decode()})
        os.replace(work, self._path)
        self._saved = time.monotonic()

    @torch.no_grad()
    def restore(self) -> list[Trained]:
        """Fill weights and optimizer from the file, if there is one, and give the figures of the steps done.

        Raises:
            CheckpointError: it is damaged, or of another drafter.

        """
        from safetensors import SafetensorError, safe_open

        if not self._path.exists():
            return []
        try:
            with safe_open(self._path, framework="pt") as file:
                history = msgspec.json.decode(file.metadata()["history"], type=list[Trained])
                for name, weight in self._weights.items():
                    weight.copy_(file.get_tensor(name))
                    moments = {moment: file.get_tensor(f"{moment}/{name}").to(weight.device) for moment in MOMENTS}
                    self._optimizer.state[weight] = {"step": torch.tensor(float(len(history))), **moments}
        except (OSError, SafetensorError, KeyError, RuntimeError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{self._path} cannot be gone on from ({error}); remove it to begin anew") from error
        return history
