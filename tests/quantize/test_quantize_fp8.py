"""`quantize_fp8`: the folder holds each matrix in e4m3 with a scale a row, in the form of compressed-tensors."""

import pytest
import torch
from quantize_support import config_of, dequantised, distance, left_in, logits, tensors_of

from refimpl import LLM, SamplingParams
from refimpl.errors import UnsupportedModelError
from refimpl.kernels import reference
from refimpl.models.tiny import tiny
from refimpl.quantize.fp8 import Fp8Options, quantize_fp8


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
