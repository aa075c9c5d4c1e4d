"""ModelConfig: the numbers of a model, from its checkpoint. What follows from them by arithmetic is here too."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from refimpl.quantization_config import QuantizationConfig
from refimpl.rope_config import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a model of the Llama family or one like it. Names are those of Hugging Face's ``config.json``.

    What families choose differently are the fields with defaults from ``qkv_bias`` on: each is read by the one layer that it
    concerns.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a text."""
    bos_token_id: int | None = None
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values add a bias."""
    output_bias: bool = False
    """Whether attention's output projection does."""
    mlp_bias: bool = False
    """Whether the three projections of the feed-forward layer do."""
    qk_norm: bool = False
    """Whether the queries and the keys of each head are normed before they are turned."""
    windows: tuple[int | None, ...] = ()
    """For each layer, how many tokens one attends to, itself the last of them; None: all. Empty: no layer has a window."""
    quantization: QuantizationConfig | None = field(default=None, repr=False)
    """How the checkpoint's weights are quantised. Not in the repr: that of a shape is hashed, and told in results."""

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied embeddings counted once."""
        layer = sum(outputs * inputs for outputs, inputs in self.layer_matrices)
        return self.num_hidden_layers * layer + self.num_outside_matrices

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of each matrix of a layer: Q, K and V; attention's output; gate and up; down."""
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return (
            (q_size + 2 * kv_size, self.hidden_size),
            (self.hidden_size, q_size),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        )

    @property
    def num_outside_matrices(self) -> int:
        """Weights that are in none of them: embeddings, output head, norms, biases."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        vectors = 2 * self.hidden_size + self.num_biases + (2 * self.head_dim if self.qk_norm else 0)
        return embeddings + self.hidden_size + self.num_hidden_layers * vectors

    @property
    def num_biases(self) -> int:
        """Numbers in the biases of a layer."""
        qkv, output, gate_up, down = (outputs for outputs, _ in self.layer_matrices)
        return self.qkv_bias * qkv + self.output_bias * output + self.mlp_bias * (gate_up + down)

    def window(self, layer: int) -> int | None:
        """How many tokens one attends to in a layer; None: all."""
        return self.windows[layer] if self.windows else None

    @property
    def windowed(self) -> bool:
        """Whether a layer has a window."""
        return any(window is not None for window in self.windows)

    def context_limit(self, asked: int | None = None) -> int:
        """Most tokens of a context, the stretch of its rotary embedding counted (:meth:`RopeConfig.context_limit`)."""
        return self.rope.context_limit(self.max_position_embeddings, asked)

    def for_context(self, length: int) -> ModelConfig:
        """The model as it is built for contexts of at most ``length`` tokens: no shorter than that, a window is none."""
        windows = tuple(window if window is not None and window < length else None for window in self.windows)
        windows = windows if any(windows) else ()
        return dataclasses.replace(self, rope=self.rope.for_context(length), windows=windows)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that the keys and values of one token take over all layers (Llama-3-70B in 16 bits: 327,680).

        A layer with a window keeps them all too: blocks are shared by the layers, and one that has left the window of some
        is still read by others, or may begin a later prompt. What that costs beyond ``window`` tokens of a sequence is that
        layer's share of these bytes, for each token.
        """
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_value
