"""GGUF, llama.cpp's format: one file with metadata, tokenizer and (usually quantised) tensors.

Weights are dequantised to float32 as they are read. Two things differ from Hugging Face's layout: names, and, in files of
the architecture ``llama``, the order of the rows of Q and K. There llama.cpp turns neighbouring pairs
``(x[2i], x[2i + 1])``, Hugging Face (and refimpl) the halves ``(x[i], x[i + D/2])``, so the rows of each head are put back
in order. Of other architectures llama.cpp turns the halves too.

Mistral has no architecture of its own: its files say ``llama``. Those that also name a window are run with it; most, and
llama.cpp itself, leave it out, as the later versions of the model do.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.errors import CheckpointError, UnsupportedModelError
from refimpl.loading.gguf_file import GGUFFile
from refimpl.loading.hf_config import check_sizes
from refimpl.loading.rope_keys import read_gguf_rope
from refimpl.tokenizer.tokenizer import Tokenizer

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS = "rope_freqs.weight"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""``general.architecture``, and what Hugging Face calls it."""
IN_PAIRS = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
"""Tensors whose rows stand in pairs, in files of ``llama``."""


class GGUFCheckpoint:
    """A GGUF file of architecture ``llama``, ``qwen2`` or ``qwen3``.

    Raises:
        CheckpointError: the file is no GGUF file, or is damaged or cut short.
        UnsupportedModelError: it holds tensors of an unknown type.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._file = GGUFFile(path)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """From the metadata.

        Raises:
            CheckpointError: a number is missing, or does not fit the tensors.
            UnsupportedModelError: another architecture, or a variant that refimpl does not have.

        """
        self._refuse_unsupported()
        embeddings = self._file.tensors.get("token_embd.weight")
        if embeddings is None or len(embeddings.shape) != 2:
            raise CheckpointError(f"{self.path} has no token_embd.weight, so it holds no model; download it again")
        heads, hidden = int(self._number("attention.head_count")), int(self._number("embedding_length"))
        choices = {"architecture": ARCHITECTURES[self._architecture], **self._choices()}
        config = ModelConfig(
            vocab_size=embeddings.shape[0],
            hidden_size=hidden,
            intermediate_size=int(self._number("feed_forward_length")),
            num_hidden_layers=self._num_layers,
            num_attention_heads=heads,
            num_key_value_heads=int(self._number("attention.head_count_kv", heads)),
            head_dim=int(self._number("attention.key_length", hidden // max(heads, 1))),
            max_position_embeddings=int(self._number("context_length")),
            rms_norm_eps=float(self._number("attention.layer_norm_rms_epsilon")),
            rope=read_gguf_rope(
                self._architecture, self._file.metadata, self._number, self._frequency_divisors(), str(self.path)
            ),
            tie_word_embeddings="output.weight" not in self._file.tensors,
            eos_token_ids=self._eos_token_ids(),
            bos_token_id=self._file.metadata.get("tokenizer.ggml.bos_token_id"),
            **choices,
        )
        check_sizes(config, str(self.path))
        self._check_against_tensors(config)
        rotated = self._number("rope.dimension_count", config.head_dim)
        if rotated != config.head_dim:
            raise UnsupportedModelError(
                f"{self.path} rotates {rotated} of {config.head_dim} dimensions of a head; refimpl rotates all"
            )
        return config

    @property
    def _architecture(self) -> str:
        return str(self._file.metadata.get("general.architecture"))

    @property
    def _num_layers(self) -> int:
        return int(self._number("block_count"))

    def _choices(self) -> dict[str, Any]:
        """What config.json would say of biases, norms and windows: by the architecture, and by the tensors that are there.

        Those of the first layer tell: a layer that differs is found out when the tensors are loaded.
        """
        there = {name.removeprefix("blk.0.") for name in self._file.tensors if name.startswith("blk.0.")}
        window = int(self._number("attention.sliding_window", 0))
        if self._architecture == "qwen2":
            choices: dict[str, Any] = {"qkv_bias": True}
        else:
            choices = {"qkv_bias": "attn_q.bias" in there, "output_bias": "attn_output.bias" in there}
        if self._architecture == "qwen3":
            choices["qk_norm"] = True
        if self._architecture == "llama":
            choices["mlp_bias"] = "ffn_up.bias" in there
        if window and self._architecture != "llama":
            raise UnsupportedModelError(
                f"{self.path} has {self._architecture}.attention.sliding_window = {window}, but does not say in which "
                "layers; use the model in Hugging Face's format"
            )
        if window:
            choices |= {"architecture": "MistralForCausalLM", "windows": (window,) * self._num_layers}
        return choices

    def _check_against_tensors(self, config: ModelConfig) -> None:
        """Hold the metadata against the tensors before anything is allocated by it."""
        c, last = config, config.num_hidden_layers - 1
        query = c.num_attention_heads * c.head_dim
        for name, shape in {
            "token_embd.weight": (c.vocab_size, c.hidden_size),
            f"blk.{last}.attn_q.weight": (query, c.hidden_size),
            f"blk.{last}.ffn_up.weight": (c.intermediate_size, c.hidden_size),
        }.items():
            tensor = self._file.tensors.get(name)
            if tensor is None or tensor.shape != shape:
                found = "is missing" if tensor is None else f"is {list(tensor.shape)}"
                raise CheckpointError(f"{self.path}: {name} {found}, its metadata makes it {list(shape)}; download it again")

    def _number(self, key: str, default: float | None = None) -> float:
        kind = self._architecture
        value = self._file.metadata.get(f"{kind}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(
                f"{self.path} has {kind}.{key} = {value!r} in its metadata, where {kind} has a number; download it again"
            )
        return value

    def _refuse_unsupported(self) -> None:
        metadata = self._file.metadata
        if metadata.get("general.architecture") not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.path} holds the architecture {metadata.get('general.architecture')!r}; refimpl runs "
                f"{', '.join(ARCHITECTURES)}"
            )
        if experts := metadata.get(f"{self._architecture}.expert_count", 0):
            raise UnsupportedModelError(
                f"{self.path} has {self._architecture}.expert_count = {experts!r}; refimpl does not run that: use another "
                "model, or one without it"
            )
        if metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{self.path} is one of {metadata['split.count']} parts; join them with llama.cpp's "
                "llama-gguf-split --merge, and give the file that comes of it"
            )

    def _frequency_divisors(self) -> tuple[float, ...]:
        if ROPE_DIVISORS not in self._file.tensors:
            return ()
        divisors = tuple(self._dequantize(ROPE_DIVISORS).flatten().tolist())
        if not all(0 < divisor < math.inf for divisor in divisors):
            raise CheckpointError(f"{self.path} has a {ROPE_DIVISORS} that is not above 0; download it again")
        return divisors

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = (self._file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, dequantised to float32.

        Raises:
            CheckpointError: a tensor is damaged.
            UnsupportedModelError: the gguf package cannot dequantise its type.

        """
        for name in self._file.tensors:
            if name != ROPE_DIVISORS:  # part of the configuration
                yield self._hugging_face(name, self._dequantize(name))

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor's name and shape by the file's header, as tensors without numbers (on the device "meta")."""
        for name, tensor in self._file.tensors.items():
            if name != ROPE_DIVISORS:
                yield _hugging_face_name(name), torch.empty(tensor.shape, dtype=torch.float32, device="meta")

    def _dequantize(self, name: str) -> Tensor:
        from gguf import dequantize

        tensor = self._file.tensors[name]
        try:
            with np.errstate(all="ignore"):  # a damaged scale gives infinities, and no warning
                return torch.from_numpy(np.array(dequantize(self._file.data(tensor), tensor.type), dtype=np.float32))
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: the tensor {name} has type {tensor.type.name}, which the gguf package cannot dequantise; "
                "use a file in another quantisation"
            ) from error

    def _hugging_face(self, name: str, values: Tensor) -> tuple[str, Tensor]:
        """Hugging Face's name and row order."""
        if IN_PAIRS.fullmatch(name) and self._architecture == "llama":
            heads = self.config.num_attention_heads if "attn_q" in name else self.config.num_key_value_heads
            if values.shape[0] == heads * self.config.head_dim:  # else it is named as misshapen
                values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return _hugging_face_name(name), values

    def tokenizer(self) -> Tokenizer:
        """From inside the file, read by transformers."""
        return Tokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    def fingerprint(self) -> str:
        """blake2b of the whole file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _hugging_face_name(name: str) -> str:
    """Hugging Face's name of a tensor. Unknown names stay, and are then named as extra."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in LAYER_NAMES:
        return TOP_NAMES.get(name, name)
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
