"""GGUF, llama.cpp's format: one file with metadata, tokenizer and (usually quantised) tensors.

Weights are dequantised to float32 as they are read. Two things differ from Hugging Face's layout: names, and the order of
the rows of Q and K. llama.cpp turns neighbouring pairs ``(x[2i], x[2i + 1])``, Hugging Face (and refimpl) the halves
``(x[i], x[i + D/2])``, so the rows of each head are put back in order.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refimpl.config import ModelConfig, RopeConfig
from refimpl.errors import CheckpointError, UnsupportedModelError
from refimpl.loading.hf_config import check_sizes
from refimpl.tokenizer.tokenizer import Tokenizer

MAX_TENSORS = 100_000
MAX_METADATA = 100_000

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """A GGUF file of architecture ``llama``.

    Raises:
        CheckpointError: the file is no GGUF file, or is damaged or cut short.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        _check_header(path)

    @functools.cached_property
    def _reader(self) -> Any:
        from gguf import GGUFReader

        try:
            return GGUFReader(self.path)
        except Exception as error:  # the reader fails in many ways on damaged files
            raise CheckpointError(_damaged(self.path, error)) from error

    def _field(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def _tensor(self, name: str) -> Any:
        return next((tensor for tensor in self._reader.tensors if tensor.name == name), None)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """From the metadata.

        Raises:
            UnsupportedModelError: another architecture than llama.

        """
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise UnsupportedModelError(f"{self.path} holds the architecture {architecture!r}; refimpl runs llama")
        for name in ("llama.expert_count", "llama.rope.scaling.type"):
            if self._field(name) not in (None, 0, "none"):
                raise UnsupportedModelError(f"{self.path} has {name} = {self._field(name)!r}; refimpl does not run that")
        try:
            heads, hidden = int(self._field("llama.attention.head_count")), int(self._field("llama.embedding_length"))
            head_dim = int(self._field("llama.attention.key_length") or hidden // heads)
            divisors = self._tensor(ROPE_DIVISORS)
            config = ModelConfig(
                architecture="LlamaForCausalLM",
                vocab_size=int(self._tensor("token_embd.weight").shape[1]),
                hidden_size=hidden,
                intermediate_size=int(self._field("llama.feed_forward_length")),
                num_hidden_layers=int(self._field("llama.block_count")),
                num_attention_heads=heads,
                num_key_value_heads=int(self._field("llama.attention.head_count_kv") or heads),
                head_dim=head_dim,
                max_position_embeddings=int(self._field("llama.context_length")),
                rms_norm_eps=float(np.float32(self._field("llama.attention.layer_norm_rms_epsilon"))),
                rope=RopeConfig(
                    theta=float(self._field("llama.rope.freq_base", 10_000.0)),
                    frequency_divisors=() if divisors is None else tuple(float(x) for x in divisors.data),
                ),
                tie_word_embeddings=self._tensor("output.weight") is None,
                eos_token_ids=self._eos_token_ids(),
                bos_token_id=self._field("tokenizer.ggml.bos_token_id"),
            )
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(f"{self.path} lacks metadata of a llama model: {error}") from error
        check_sizes(config, str(self.path))
        return config

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = (self._field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, dequantised to float32.

        Raises:
            CheckpointError: a tensor is damaged.
            UnsupportedModelError: the gguf package cannot dequantise its type.

        """
        from gguf import dequantize

        for tensor in self._reader.tensors:
            if tensor.name == ROPE_DIVISORS:
                continue  # part of the configuration
            try:
                values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"{self.path}: the tensor {tensor.name} has type {tensor.tensor_type.name}, which the gguf package "
                    "cannot dequantise; use a file in another quantisation"
                ) from error
            except Exception as error:
                raise CheckpointError(_damaged(self.path, error)) from error
            yield self._hugging_face(tensor.name, values)

    def _hugging_face(self, name: str, values: Tensor) -> tuple[str, Tensor]:
        """Hugging Face's name and row order. Unknown names stay, and are then named as extra."""
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is None or match[2] not in LAYER_NAMES:
            return TOP_NAMES.get(name, name), values
        if match[2] in ("attn_q", "attn_k"):
            heads = self.config.num_attention_heads if match[2] == "attn_q" else self.config.num_key_value_heads
            values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight", values

    def tokenizer(self) -> Tokenizer:
        """From inside the file, read by transformers."""
        return Tokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    def fingerprint(self) -> str:
        """blake2b of the whole file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _check_header(path: Path) -> None:
    """Look at magic, version and counts before a reader believes them."""
    with path.open("rb") as file:
        head = file.read(24)
    if len(head) < 24 or head[:4] != b"GGUF":
        raise CheckpointError(
            f"{path} is no GGUF file (it does not begin with GGUF); for a Hugging Face checkpoint give its folder"
        )
    version, tensors, metadata = struct.unpack("<IQQ", head[4:])
    if version not in (2, 3) or tensors > MAX_TENSORS or metadata > MAX_METADATA:
        raise CheckpointError(
            f"{path} claims GGUF version {version}, {tensors} tensors and {metadata} metadata keys; refimpl reads versions "
            f"2 and 3 with at most {MAX_TENSORS} of each: the file is damaged"
        )


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged or cut short ({type(error).__name__}: {error}); download it again"
