"""Which matrices of a layer read one input, and what that input comes out of: where a channel's scale can be folded in.

::

    input_layernorm ──────────► q, k, v
    v ──(attention)───────────► o
    post_attention_layernorm ─► gate, up
    up ──(· silu(gate))───────► down

Multiply an input channel of the matrices by s, and divide by s what makes the channel: the layer computes the same.
Attention mixes tokens and not channels, so a channel of V goes straight to O; where several query heads share a head of V
(grouped-query attention), the channels of O that come of one channel of V have one scale. Up's output reaches down through a
product with the gate, channel by channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from refimpl.config import ModelConfig

MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The matrices of a layer, by Hugging Face's names."""
NORMS = ("input_layernorm", "post_attention_layernorm")


def matrix_names(layer: int) -> list[str]:
    """The full names of a layer's matrices, without ``.weight``."""
    return [f"model.layers.{layer}.{name}" for name in MATRICES]


@dataclass(frozen=True)
class Group:
    """Matrices of one input, and the norm or matrix before it."""

    matrices: tuple[str, ...]
    before: str
    heads: int = 1
    """Heads of ``before``."""
    repeats: int = 1
    """Heads of the input that come of one head of ``before``."""

    @property
    def behind_norm(self) -> bool:
        """Whether a norm makes the input, else a matrix."""
        return self.before in NORMS

    def gathered(self, inputs: Float[Tensor, "C"]) -> Float[Tensor, "B"]:
        """A figure of each input channel, as the mean over those that come of one channel of ``before``."""
        return inputs.view(self.heads, self.repeats, -1).mean(1).flatten()

    def spread(self, scales: Float[Tensor, "B"]) -> Float[Tensor, "C"]:
        """A scale for each channel of ``before``, as one for each input channel."""
        return scales.view(self.heads, 1, -1).expand(-1, self.repeats, -1).flatten()


def groups_of(config: ModelConfig) -> tuple[Group, ...]:
    """The four groups of a layer, in the order in which it computes."""
    heads = config.num_key_value_heads
    return (
        Group(MATRICES[:3], NORMS[0]),
        Group(MATRICES[3:4], MATRICES[2], heads, config.num_attention_heads // heads),
        Group(MATRICES[4:6], NORMS[1]),
        Group(MATRICES[6:], MATRICES[5]),
    )


def fold(layer: Mapping[str, Tensor], group: Group, scales: Float[Tensor, "B"]) -> None:
    """Multiply the group's input channels by ``scales`` and divide what makes them by the same. Mutates the layer's tensors.

    ``layer`` holds them by their names in it (``mlp.up_proj.weight``, and ``.bias`` where there is one).
    """
    before = layer[f"{group.before}.weight"]
    before.div_(scales if group.behind_norm else scales.unsqueeze(1))
    if (bias := layer.get(f"{group.before}.bias")) is not None:
        bias.div_(scales)
    for name in group.matrices:
        layer[f"{name}.weight"].mul_(group.spread(scales))
