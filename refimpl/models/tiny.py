"""A random two-layer Llama with a byte tokenizer: the whole engine in well under a second, without a download.

For tests, laws and experiments. Its logits are wide (standard deviation over 2), so that greedy tokens do not hang on
rounding, and its attention matters: a wrong key in the cache changes the text. It computes in any dtype, float64 included.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.config import ModelConfig, RopeConfig
from refimpl.errors import ConfigError
from refimpl.tokenizer.tokenizer import BYTE_VOCABULARY, Tokenizer, stand_in_tokenizer

LOGIT_STD = 4.0


@dataclass(frozen=True)
class TinyCheckpoint:
    """The tiny model as a checkpoint: its configuration, its seeded weights, its tokenizer."""

    config: ModelConfig
    seed: int
    name: str = "tiny"

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face's names and float64 tensors, a function of the seed and the sizes alone."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(rows: int, columns: int, std: float) -> Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * std

        c = self.config
        query, key_value = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        unit = 1 / math.sqrt(c.hidden_size)  # keeps the variance of a normalised input
        yield "model.embed_tokens.weight", normal(c.vocab_size, c.hidden_size, 1.0)
        for i in range(c.num_hidden_layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", torch.ones(c.hidden_size, dtype=torch.float64)
            # Queries and keys twice as wide: attention picks tokens instead of averaging over all of them.
            yield f"{layer}.self_attn.q_proj.weight", normal(query, c.hidden_size, 2 * unit)
            yield f"{layer}.self_attn.k_proj.weight", normal(key_value, c.hidden_size, 2 * unit)
            yield f"{layer}.self_attn.v_proj.weight", normal(key_value, c.hidden_size, 2 * unit)
            yield f"{layer}.self_attn.o_proj.weight", normal(c.hidden_size, query, 1 / math.sqrt(query))
            yield f"{layer}.post_attention_layernorm.weight", torch.ones(c.hidden_size, dtype=torch.float64)
            yield f"{layer}.mlp.gate_proj.weight", normal(c.intermediate_size, c.hidden_size, unit)
            yield f"{layer}.mlp.up_proj.weight", normal(c.intermediate_size, c.hidden_size, unit)
            yield (
                f"{layer}.mlp.down_proj.weight",
                normal(c.hidden_size, c.intermediate_size, 2 / math.sqrt(c.intermediate_size)),
            )
        yield "model.norm.weight", torch.ones(c.hidden_size, dtype=torch.float64)
        yield "lm_head.weight", normal(c.vocab_size, c.hidden_size, LOGIT_STD * unit)

    def tokenizer(self) -> Tokenizer:
        """Bytes where the vocabulary has room for them, else letters."""
        return stand_in_tokenizer(self.config.vocab_size)

    def fingerprint(self) -> str:
        """What tells these weights from others."""
        return hashlib.blake2b(repr((self.config, self.seed)).encode(), digest_size=16).hexdigest()


def tiny(
    vocab_size: int = 320,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 2048,
    seed: int = 0,
) -> TinyCheckpoint:
    """A random Llama of the given sizes, to be passed as ``model``. ``model="tiny"`` is ``tiny()``.

    With a vocabulary under 260 there is no room for bytes: texts are then letters (``"a b c"``), and nothing ends a text
    but ``max_tokens`` and ``stop_token_ids``. Small vocabularies let laws be enumerated.

    Raises:
        ConfigError: the sizes do not fit together.

    """
    sizes = (
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
    )
    if min(sizes) < 1 or min(vocab_size, max_position_embeddings) < 2:
        raise ConfigError("a tiny model needs sizes of at least 1, and at least 2 tokens and 2 positions")
    if num_attention_heads % num_key_value_heads:
        raise ConfigError(f"{num_attention_heads} query heads cannot share {num_key_value_heads} key/value heads evenly")
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; rotary embedding turns pairs, so it must be even")
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=False,
        eos_token_ids=(256,) if vocab_size >= BYTE_VOCABULARY else (),
    )
    return TinyCheckpoint(config, seed)
