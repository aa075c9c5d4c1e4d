"""What the simulator knows of models: their shapes, and how many bytes a weight takes in each format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from refimpl.config import ModelConfig, RopeConfig
from refimpl.simulate.hardware import Hardware, nearest

LLAMA_3_70B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=8_192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8_192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
    tie_word_embeddings=False,
)
LLAMA_3_8B = replace(LLAMA_3_70B, hidden_size=4_096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32)
LLAMA_3_2_1B = replace(
    LLAMA_3_70B,
    hidden_size=2_048,
    intermediate_size=8_192,
    num_hidden_layers=16,
    num_attention_heads=32,
    head_dim=64,
    max_position_embeddings=131_072,
    rope=RopeConfig(
        theta=500_000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8_192,
    ),
    tie_word_embeddings=True,
)
MISTRAL_7B = replace(
    LLAMA_3_8B,
    architecture="MistralForCausalLM",
    vocab_size=32_000,
    max_position_embeddings=32_768,
    rope=RopeConfig(),
    windows=(4_096,) * 32,
)
QWEN2_5_7B = replace(
    LLAMA_3_8B,
    architecture="Qwen2ForCausalLM",
    vocab_size=152_064,
    hidden_size=3_584,
    intermediate_size=18_944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0),
    qkv_bias=True,
)
QWEN3_8B = replace(
    LLAMA_3_8B,
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    intermediate_size=12_288,
    num_hidden_layers=36,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0),
    qk_norm=True,
)
MODELS = {
    "llama-3.2-1b": LLAMA_3_2_1B,
    "llama-3-8b": LLAMA_3_8B,
    "llama-3-70b": LLAMA_3_70B,
    "mistral-7b": MISTRAL_7B,
    "qwen2.5-7b": QWEN2_5_7B,
    "qwen3-8b": QWEN3_8B,
}
"""By name: the shapes of Hugging Face's ``meta-llama/Llama-3.2-1B``, ``Meta-Llama-3-8B`` and ``-70B``,
``mistralai/Mistral-7B-v0.1``, ``Qwen/Qwen2.5-7B`` and ``Qwen/Qwen3-8B``."""


def find_model(name: str) -> ModelConfig:
    """The shape of a model: one of ``MODELS``, or what the config.json of a checkpoint folder says (no weights are needed).

    Raises:
        CheckpointError: the folder's config.json is missing or damaged.
        ConfigError: there is neither; the nearest names are named.
        UnsupportedModelError: the folder holds a model of another family.

    """
    if Path(name).is_dir():
        from refimpl.loading.hf_config import read_config  # knows which architectures can run, and so needs torch

        return read_config(Path(name))
    return nearest(name, MODELS, "a folder or model named")


@dataclass(frozen=True)
class WeightFormat:
    """How the matrices of the layers are stored and multiplied. Embeddings and the output head stay in 16 bits."""

    name: str
    bytes_per_weight: float
    bytes_per_output: int = 0
    """Besides, of each output of a matrix: its scale, in float32."""
    computes_in_fp8: bool = False
    """Where the device can; elsewhere, and in all other formats, weights are widened to 16 bits first."""

    def flops(self, hardware: Hardware) -> float:
        """The device's peak rate for this format, in operations a second."""
        fast = hardware.fp8_flops if self.computes_in_fp8 else None
        return fast or hardware.flops


_GROUP = 128
FORMATS = {
    "bfloat16": WeightFormat("bfloat16", 2),
    "float16": WeightFormat("float16", 2),
    "fp8": WeightFormat("fp8", 1, bytes_per_output=4, computes_in_fp8=True),
    "awq": WeightFormat("awq", (4 + (16 + 4) / _GROUP) / 8),  # 4 bits, and a 16-bit scale and a 4-bit zero for each group
}
ALIASES = {"auto": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "int4": "awq"}


def find_format(name: str) -> WeightFormat:
    """The weight format of a name; ``auto`` is bfloat16.

    Raises:
        ConfigError: there is none; the nearest names are named.

    """
    return nearest(ALIASES.get(name.lower(), name), FORMATS, "dtype")


KV_BYTES = {"auto": 2, "fp8": 1}
"""Bytes of one value in the KV cache, by ``kv_cache_dtype``."""
