"""Calibration tokens through the model, a layer at a time: of each layer's matrices, what their inputs look like.

Only one layer is there at a time, in float32, beside the hidden states of all calibration tokens. It is the engine's own
layer, given matrices that look at what they multiply.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.cache.kv_cache import LayerKV
from refimpl.layers.linear import Linear
from refimpl.models.llama import LlamaLayer
from refimpl.models.registry import build_model
from refimpl.quantization.plain import Plain
from refimpl.quantize.search import Statistics
from refimpl.quantize.source import Source
from refimpl.speculate.dense import DenseStep

TOKENS_AT_ONCE = 4096


class ObservedLinear(Linear):
    """A matrix that keeps statistics of its inputs."""

    statistics: Statistics | None = None

    def forward(self, x: Float[Tensor, "T in_features"]) -> Float[Tensor, "T out_features"]:
        """``x Wᵀ``; x is counted while there are statistics."""
        if self.statistics is not None:
            self.statistics.add(x)
        return F.linear(x, self.weight)


class Observed(Plain):
    """Every matrix an :class:`ObservedLinear`."""

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> ObservedLinear:
        """An empty matrix."""
        return ObservedLinear(in_features, out_features, dtype, device)


class LayerByLayer:
    """Runs calibration windows through one layer after the other.

    Args:
        source: whose layers.
        windows: token ids, each row a text of its own.
        device: where it is computed.

    """

    def __init__(self, source: Source, windows: Int[Tensor, "N L"], device: torch.device) -> None:
        self._source = source
        one_layer = dataclasses.replace(source.config, num_hidden_layers=1, windows=source.config.windows[:1])
        self._model = build_model(one_layer, torch.float32, device, Observed())
        self._windows = windows.shape
        self._hidden = F.embedding(windows, source.weights["model.embed_tokens.weight"]).to(device, torch.float32)
        self._next = 0

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        return self._hidden.device

    def advance(self) -> list[Statistics]:
        """Run the next layer, and give the statistics of its groups' inputs, in the order in which it computes."""
        layer = self._model.layers[0]
        assert isinstance(layer, LlamaLayer)
        layer.attention.window = self._source.config.window(self._next)
        self._fill(self._next)
        self._next += 1
        matrices = [module for module in layer.modules() if isinstance(module, ObservedLinear)]
        found = [Statistics.empty(matrix.weight.shape[1], self.device) for matrix in matrices]
        for matrix, statistics in zip(matrices, found, strict=True):
            matrix.statistics = statistics
        count, length = self._windows
        for start in range(0, count, rows := max(1, TOKENS_AT_ONCE // length)):
            self._run(layer, self._hidden[start : start + rows])
        return found

    def _fill(self, number: int) -> None:
        """Copy a layer's weights into the one that is there."""
        name = "model.layers.0."
        for view, destination in self._model.checkpoint_views().items():
            if view.startswith(name):
                destination.copy_(self._source.weights[f"model.layers.{number}.{view.removeprefix(name)}"])

    def _run(self, layer: LlamaLayer, hidden: Float[Tensor, "N L H"]) -> None:
        """Put the layer's output in the place of its input."""
        count, length, _ = hidden.shape
        positions = torch.arange(length, device=self.device).repeat(count)
        stand_in = LayerKV(*[torch.empty(0, dtype=torch.float32, device=self.device)] * 2)
        rotation = self._model.rotary(positions, torch.float32)
        flat = hidden.flatten(0, 1)
        # The sum may take the residual's place, which is the hidden states themselves.
        added, residual = layer(flat, None, rotation, stand_in, DenseStep([stand_in], count, ()))
        hidden.copy_((added + residual).view(hidden.shape))
