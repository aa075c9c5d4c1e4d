"""What the tests of `refimpl quantize` share: checkpoints with changed weights, and what a written folder stands for."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests_support import full_logits

from refimpl.loading.checkpoint import load_model
from refimpl.models.tiny import tiny
from refimpl.quantization.awq_layout import unpack_awq

CPU = torch.device("cpu")
TEXT = [(7 * i * i + 3 * i) % 256 for i in range(96)]
PROMPTS = [{"prompt_token_ids": [(31 * i * (i + j) + 5 * j) % 256 for i in range(64)]} for j in range(8)]


@dataclass
class Changed:
    """A checkpoint with some tensors replaced."""

    checkpoint: object
    tensors: dict
    name: str = "changed"

    def __getattr__(self, name):
        return getattr(self.checkpoint, name)

    def weights(self):
        yield from (dict(self.checkpoint.weights()) | self.tensors).items()


def with_outliers(**sizes):
    """A tiny model whose layers' inputs have a few channels that are far larger than the others, as in large models."""
    checkpoint = tiny(**sizes)
    tensors = {}
    for name, tensor in checkpoint.weights():
        if "layernorm" in name:
            grown = tensor.clone()
            grown[3::17] *= 20
            tensors[name] = grown
        if "q_proj" in name or "k_proj" in name:  # their products stay as small as they were
            tensors[name] = tensor / 4
    return Changed(checkpoint, tensors)


def logits(checkpoint, dtype=torch.float64, text=TEXT):
    """Of a text's tokens."""
    with torch.inference_mode():
        return full_logits(load_model(checkpoint, "auto", dtype, CPU, 0), text)


def tensors_of(folder):
    return {name: tensor for path in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(path).items()}


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def dequantised(folder, source):
    """The folder's weights, widened, as a checkpoint: what an engine that reads it computes with."""
    found, wide = tensors_of(folder), {}
    for name, tensor in found.items():
        matrix, _, part = name.rpartition(".")
        if part == "qweight":
            values, zeros, scales = unpack_awq(tensor), unpack_awq(found[f"{matrix}.qzeros"]), found[f"{matrix}.scales"]
            size = len(values) // len(zeros)
            levels = values.double() - zeros.repeat_interleave(size, 0).double()
            wide[f"{matrix}.weight"] = (levels * scales.repeat_interleave(size, 0).double()).T
        elif part == "weight" and f"{matrix}.weight_scale" in found:
            wide[name] = tensor.float() * found[f"{matrix}.weight_scale"]
        elif part == "weight":
            wide[name] = tensor
    return Changed(source, wide)


def distance(got, expected):
    """Relative error in the L2 norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def left_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())
