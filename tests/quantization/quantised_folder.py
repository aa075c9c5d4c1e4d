"""Small quantised checkpoints as folders, and the plain weights that they stand for."""

import dataclasses
import json

import torch
from safetensors.torch import save_file

from refimpl.loading.hf_config import write_config
from refimpl.models.tiny import tiny
from refimpl.quantization.awq_layout import pack_awq, pack_in_order, quantise_groups
from refimpl.quantization_config import QuantizationConfig
from refimpl.tokenizer import byte_tokenizer

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
AWQ = QuantizationConfig("awq", "awq", group_size=64)
GPTQ = QuantizationConfig("gptq", "gptq", group_size=32, zeros_less_one=True)


class Plain:
    """A checkpoint of tensors in memory."""

    def __init__(self, config, tensors):
        self.config, self.tensors, self.name = config, tensors, "plain"

    def weights(self):
        yield from self.tensors.items()

    def tokenizer(self):
        return tiny().tokenizer()

    def fingerprint(self):
        return "plain"


def in_4_bits(name, weight, config):
    """A matrix as AWQ or GPTQ stores it, and what it is worth."""
    values, zeros, scales = quantise_groups(weight.float(), config.group_size, config.zero_point)
    size = weight.shape[1] if config.group_size == -1 else config.group_size
    worth = (values.double() - zeros.repeat_interleave(size, 0)) * scales.double().repeat_interleave(size, 0)
    module = name.removesuffix(".weight")
    if config.method == "awq":
        stored = {"qweight": pack_awq(values), "scales": scales}
        stored |= {"qzeros": pack_awq(zeros)} if config.zero_point else {}
    else:
        stored = {"qweight": pack_in_order(values.T.contiguous()).T.contiguous(), "scales": scales}
        stored["qzeros"] = pack_in_order((zeros - int(config.zeros_less_one)) & 15)
        stored["g_idx"] = (torch.arange(weight.shape[1]) // size).to(torch.int32)
    return {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}, worth.T


def in_fp8(name, weight, by_tensor):
    """A matrix in FP8 with a scale for each output or for all, and an input scale that means nothing here."""
    weight = weight.float()
    amax = weight.abs().amax() if by_tensor else weight.abs().amax(1, keepdim=True)
    scale = amax / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return {f"{name.removesuffix('.weight')}.{key}": one for key, one in stored.items()}, values.double() * scale.double()


def folder(path, quantization, by_tensor=False, config_changes=(), **sizes):
    """A quantised folder of a small random model, and the plain model of the same weights."""
    model = tiny(**(SIZES | sizes))
    config = dataclasses.replace(model.config, quantization=quantization)
    stored, plain = {}, {}
    for name, weight in model.weights():
        left = not name.endswith("_proj.weight") or quantization.leaves_out(name.removesuffix(".weight"))
        if left:
            stored[name] = plain[name] = weight.float()
        elif quantization.method == "fp8":
            tensors, plain[name] = in_fp8(name, weight, by_tensor)
            stored |= tensors
        else:
            tensors, plain[name] = in_4_bits(name, weight, quantization)
            stored |= tensors
    path.mkdir(exist_ok=True)
    write_config(config, path)
    if config_changes:
        raw = json.loads((path / "config.json").read_text())
        raw["quantization_config"] = dict(config_changes)
        (path / "config.json").write_text(json.dumps(raw))
    byte_tokenizer(config.vocab_size).backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
    return path, Plain(model.config, plain), stored
