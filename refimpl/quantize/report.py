"""What a quantisation tells: the folder, its size beside the source's, and the scales that were found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from refimpl.loading.checkpoint import Checkpoint


class LayerReport(msgspec.Struct, frozen=True):
    """Of one layer, by group of matrices (q, k and v; o; gate and up; down); empty where nothing was searched."""

    alphas: list[float]
    """Exponents of the scales."""
    error_shares: list[float]
    """The error of the outputs with these scales, as a share of what rounding to nearest makes; before clipping."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A quantised checkpoint that was written."""

    folder: Path
    bytes: int
    """Of its safetensors files."""
    parameters: int
    layers: list[LayerReport]

    @property
    def bits_per_parameter(self) -> float:
        """Over all parameters, those left in 16 bits as well."""
        return 8 * self.bytes / self.parameters


def written(folder: Path, checkpoint: Checkpoint, layers: Sequence[LayerReport] = ()) -> Written:
    """Look at a finished folder."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Written(folder=folder, bytes=size, parameters=checkpoint.config.num_parameters, layers=list(layers))
