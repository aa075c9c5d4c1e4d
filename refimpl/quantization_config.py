"""QuantizationConfig: how a checkpoint's weights are quantised, as its config.json says. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

MATRICES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""What the matrices of a layer are called in a checkpoint: those in a row are one matrix here
(:attr:`ModelConfig.layer_matrices` has their sizes in this order)."""
CUT_BY_INPUTS = ("self_attn.o_proj", "mlp.down_proj")
"""Those of which several ranks have a share of the inputs each, and not of the outputs."""


@dataclass(frozen=True)
class QuantizationConfig:
    """What refimpl reads of a checkpoint's ``quantization_config``."""

    method: str
    """awq, gptq or fp8: what ``EngineArgs.quantization`` calls it."""
    title: str
    """What the checkpoint calls it: its ``quant_method``."""
    group_size: int = -1
    """Of 4-bit weights: inputs that share a scale; -1 for all."""
    zero_point: bool = True
    """Of AWQ: whether zero points are there."""
    zeros_less_one: bool = False
    """Of GPTQ: whether zero points were packed one too small."""
    left_out: tuple[str, ...] = ()
    """Names, or ``re:`` and a pattern, of modules that are not quantised."""

    def leaves_out(self, module: str) -> bool:
        """Whether a module, as ``model.layers.0.mlp.down_proj``, is held in 16 bits: it or what it is part of is named."""
        dotted = f".{module}."
        return any(
            re.match(name[3:], module) is not None if name.startswith("re:") else f".{name.strip('.')}." in dotted
            for name in self.left_out
        )

    def left_matrices(self, num_layers: int) -> list[tuple[int, int, tuple[str, ...]]]:
        """(layer, place in ``MATRICES``, names of the parts that are left out) of each matrix that has such parts."""
        found = []
        for layer in range(num_layers) if self.left_out else ():
            for place, parts in enumerate(MATRICES):
                left = tuple(part for part in parts if self.leaves_out(f"model.layers.{layer}.{part}"))
                if left:
                    found.append((layer, place, left))
        return found
