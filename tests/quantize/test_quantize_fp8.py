"""`quantize_fp8`: the folder holds each matrix in e4m3 with a scale a row, in the form of compressed-tensors."""

import pytest
import torch
from quantize_support import PROMPTS, config_of, dequantised, distance, left_in, logits, tensors_of, with_outliers

from refimpl import LLM, SamplingParams
from refimpl.errors import UnsupportedModelError
from refimpl.kernels import reference
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.models.tiny import tiny
from refimpl.quantize.distil import Training
from refimpl.quantize.fp8 import Fp8Options, quantize_fp8
from refimpl.quantize.trained_fp8 import TrainedFp8, rounded_rows, steps_at


def test_the_folder_is_in_the_form_of_compressed_tensors(tmp_path):
    written = quantize_fp8(tiny(), tmp_path / "fp8")
    found, source = tensors_of(tmp_path / "fp8"), dict(tiny().weights())
    assert len(found) == len(source) + 14
    name = "model.layers.1.self_attn.k_proj"
    values, scales = reference.quantise(source[f"{name}.weight"])
    assert found[f"{name}.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(found[f"{name}.weight"].float(), values.float())
    assert found[f"{name}.weight_scale"].shape == (32, 1)
    assert torch.equal(found[f"{name}.weight_scale"][:, 0], scales.float())
    assert found["model.embed_tokens.weight"].dtype == found["model.layers.0.input_layernorm.weight"].dtype == torch.float16
    config = config_of(tmp_path / "fp8")["quantization_config"]
    assert (config["quant_method"], config["format"], config["ignore"]) == (
        "compressed-tensors",
        "float-quantized",
        ["lm_head"],
    )
    [group] = config["config_groups"].values()
    assert group["weights"] == {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    assert group["input_activations"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    assert 8 < written.bits_per_parameter < 16


def test_what_is_written_is_close_to_the_model(tmp_path):
    quantize_fp8(tiny(), tmp_path / "fp8", Fp8Options(shard_bytes=50_000))
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 2
    assert 0.001 < distance(logits(dequantised(tmp_path / "fp8", tiny())), logits(tiny())) < 0.15


def test_a_matrix_begins_rounded_to_nearest_and_is_stored_as_it_computes():
    weight = torch.randn(16, 64) * torch.logspace(-6, 1, 16).unsqueeze(1)
    weight[3, :5] *= 1e-5  # numbers below 2^-6, which lie as close as just above it
    weight[4] = 0
    trained = TrainedFp8(weight)
    values, scales = trained.stored()
    expected = reference.quantise(weight)
    assert torch.equal(values.float(), expected[0].float())
    assert torch.equal(scales, expected[1])
    with torch.no_grad():
        trained.numbers += 3 * torch.randn_like(trained.numbers)
    values, scales = trained.stored()
    assert not torch.equal(values.float(), expected[0].float())
    assert torch.equal(trained.weight(torch.float32), values.float() * scales.unsqueeze(1))


def test_a_step_is_the_distance_of_neighbours():
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448, all of them
    assert torch.equal(steps_at(every)[:-1], every.diff())
    assert torch.equal(steps_at(-every), steps_at(every))


def test_gradients_go_past_the_rounding_of_weights_and_inputs_and_stop_at_the_range():
    weight, seen = torch.randn(8, 32), torch.randn(8, 32)
    trained = TrainedFp8(weight)
    with torch.no_grad():
        trained.numbers[0, 0] = 1e6
    (trained.weight(torch.float32) * seen).sum().backward()
    values, scales = reference.quantise(weight)
    expected = seen * scales.unsqueeze(1) * steps_at(values.float())
    expected[0, 0] = 0
    assert torch.allclose(trained.numbers.grad, expected)
    x = torch.randn(4, 32, requires_grad=True)
    rounded = rounded_rows(x)
    (rounded * seen[:4]).sum().backward()
    values, scales = reference.quantise(x.detach())
    assert torch.equal(rounded, values.float() * scales.unsqueeze(1))
    assert torch.equal(x.grad, seen[:4])


def test_training_brings_the_predictions_nearer(tmp_path):
    checkpoint = with_outliers()
    training = Training(steps=30, tokens=512, batch_tokens=256, tokens_at_once=128, level_rate=2e-2)
    quantize_fp8(checkpoint, tmp_path / "before")
    written = quantize_fp8(checkpoint, tmp_path / "after", Fp8Options(prompts=PROMPTS, training=training))
    text = [token for prompt in PROMPTS for token in prompt["prompt_token_ids"]][:512]
    expected = logits(checkpoint, text=text).log_softmax(-1)

    def divergence(name):
        found = logits(open_checkpoint(tmp_path / name), text=text).log_softmax(-1)
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    assert divergence("after") < 0.7 * divergence("before")
    old, new = tensors_of(tmp_path / "before"), tensors_of(tmp_path / "after")
    assert {name: (one.shape, one.dtype) for name, one in old.items()} == {
        name: (one.shape, one.dtype) for name, one in new.items()
    }
    assert all(torch.equal(one, new[name]) for name, one in old.items() if one.dtype != torch.float8_e4m3fn)
    assert config_of(tmp_path / "before") == config_of(tmp_path / "after")
    assert written.bits_per_parameter < 16


def test_the_engine_loads_what_is_written(tmp_path):
    """It computes what it computes when it quantises the weights itself."""
    quantize_fp8(tiny(), tmp_path / "fp8")
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    tokens = []
    for options in ({"model": str(tmp_path / "fp8")}, {"model": "tiny", "quantization": "fp8"}):
        with LLM(**options, dtype="float32", num_gpu_blocks_override=16) as llm:
            [output] = llm.generate("Hello", params, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
    assert tokens[0] == tokens[1]


def test_what_is_quantised_already_is_refused(tmp_path):
    quantize_fp8(tiny(), tmp_path / "fp8")
    with pytest.raises(UnsupportedModelError, match=r"quantised already \(compressed-tensors\)"):
        quantize_fp8(tmp_path / "fp8", tmp_path / "again")
    assert left_in(tmp_path) == ["fp8"]
