"""FP8 weights are quantised as they are loaded: from a folder, part by part of what is fused, or from random numbers."""

import gc
import weakref

import pytest
import torch
from checkpoint_files import random_llama, save_folder
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.kernels import reference
from refimpl.loading.checkpoint import load_model
from refimpl.loading.dummy import fill_with_random
from refimpl.loading.folder import FolderCheckpoint
from refimpl.models.registry import build_model
from refimpl.models.tiny import tiny
from refimpl.quantization.fp8 import Fp8, Fp8Linear

CPU = torch.device("cpu")


def loaded(checkpoint, load_format="auto"):
    return load_model(checkpoint, load_format, torch.bfloat16, CPU, 3, method=Fp8())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_quantised_from_the_dtype_that_it_has(tmp_path, dtype):
    theirs = random_llama(dtype=dtype)
    model = loaded(FolderCheckpoint(save_folder(theirs, tmp_path)))
    tensors = theirs.state_dict()
    layer, name = model.layers[1], "model.layers.1"
    for linear, parts in (
        (layer.attention.qkv_proj, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.attention.o_proj, ("self_attn.o_proj",)),
        (layer.mlp.gate_up_proj, ("mlp.gate_proj", "mlp.up_proj")),
        (layer.mlp.down_proj, ("mlp.down_proj",)),
    ):
        values, scales = reference.quantise(torch.cat([tensors[f"{name}.{part}.weight"] for part in parts]))
        assert torch.equal(linear.weight.float(), values.float()), parts
        assert torch.equal(linear.scales, scales), parts
    assert model.embed_tokens.dtype == torch.bfloat16
    assert model.norm.weight.dtype == layer.input_norm.weight.dtype == torch.float32, "as a CPU computes between products"


def test_random_weights_are_those_of_the_plain_model_quantised():
    ours = loaded(tiny(), "dummy")
    plain = build_model(tiny().config, torch.bfloat16, CPU)
    views = plain.checkpoint_views()
    fill_with_random(views, 3)
    assert torch.equal(plain.embed_tokens, ours.embed_tokens)
    last = ours.layers[-1].mlp.down_proj
    expected = Fp8Linear(last.weight.shape[1], len(last.weight), torch.bfloat16, CPU)
    [whole] = expected.parts()
    whole.copy_(views["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(expected.weight.float(), last.weight.float())
    assert torch.equal(expected.scales, last.scales)


class Living(TorchDispatchMode):
    """Counts the bytes of tensors that live at once, those in FP8 left out; views count once, with what they look at."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.float8_e4m3fn:
                key = tensor.untyped_storage().data_ptr()
                if key and key not in self.sizes:
                    self.sizes[key] = tensor.untyped_storage().nbytes()
                    weakref.finalize(tensor, self.sizes.pop, key, None)
        self.most = max(self.most, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_no_more_than_one_matrix_is_there_in_16_bits_while_it_loads(tmp_path, load_format):
    sizes = {"num_hidden_layers": 12, "intermediate_size": 256, "hidden_size": 64}
    folder = save_folder(random_llama(dtype=torch.bfloat16, **sizes), tmp_path)
    gc.collect()
    with Living() as living:
        model = loaded(FolderCheckpoint(folder), load_format)
    config = model.config
    held = sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()) if weight.dtype != torch.float8_e4m3fn)
    matrix = config.intermediate_size * config.hidden_size
    all_matrices = 2 * (config.num_parameters - config.num_outside_matrices)
    beside = living.most - held
    assert all_matrices > 40 * 2 * matrix, "the bound means something"
    head = 4 * config.vocab_size * config.hidden_size  # a CPU packs it by way of float32
    assert beside < (2 + 3 * 4) * matrix + head + 20_000, "a matrix as it came, and in float32 while it is rounded"
