"""`quantize_awq`: the folder holds what the search found, in AutoAWQ's layout, whole or not at all."""

import json

import pytest
import torch
from quantize_support import PROMPTS, config_of, dequantised, distance, left_in, logits, tensors_of, with_outliers

from refimpl import LLM, SamplingParams
from refimpl.errors import CheckpointError, ConfigError, UnsupportedModelError
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.models.tiny import tiny
from refimpl.quantize.awq import AwqOptions, check_group_size, quantize_awq
from refimpl.quantize.layerwise import LayerByLayer

NEAREST = AwqOptions(search=False)
AWARE = AwqOptions(prompts=PROMPTS)


def test_the_folder_is_in_autoawqs_layout(tmp_path):
    out = tmp_path / "made" / "awq"
    written = quantize_awq(tiny(), out, NEAREST)
    found = tensors_of(out)
    assert found["model.layers.0.mlp.down_proj.qweight"].shape == (128, 64 // 8)
    assert found["model.layers.0.mlp.down_proj.qzeros"].shape == (2, 64 // 8)
    assert found["model.layers.0.mlp.down_proj.scales"].shape == (2, 64)
    kinds = {name.rpartition(".")[2]: tensor.dtype for name, tensor in found.items()}
    assert kinds == {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "weight": torch.float16}
    assert {name for name in found if name.endswith(".weight")} == {
        "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight",
        *(f"model.layers.{i}.{norm}_layernorm.weight" for i in (0, 1) for norm in ("input", "post_attention")),
    }  # fmt: skip
    config = config_of(out)
    assert config["quantization_config"] == {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"
    }  # fmt: skip
    assert config["torch_dtype"] == "float16"
    assert written.bytes == (out / "model.safetensors").stat().st_size
    assert left_in(tmp_path / "made") == ["awq"]


def test_the_engine_computes_with_what_is_written(tmp_path):
    expected, distances = logits(tiny()), {}
    for name, options in (("nearest", NEAREST), ("groups of 32", AwqOptions(search=False, group_size=32)), ("aware", AWARE)):
        quantize_awq(tiny(), tmp_path / name, options)
        found = logits(open_checkpoint(tmp_path / name))
        assert distance(found, logits(dequantised(tmp_path / name, tiny()))) < 1e-3
        distances[name] = distance(found, expected)
    assert distances["groups of 32"] < distances["nearest"]
    assert 0.001 < distances["aware"] < distances["nearest"] < 0.6, "random weights, all alike, leave nothing to be aware of"


def test_without_scales_and_clipping_the_search_rounds_to_nearest(tmp_path):
    quantize_awq(tiny(), tmp_path / "nearest", NEAREST)
    quantize_awq(tiny(), tmp_path / "zero", AwqOptions(prompts=PROMPTS, alphas=(0.0,), clip=False, refine=False))
    nearest, zero = tensors_of(tmp_path / "nearest"), tensors_of(tmp_path / "zero")
    assert nearest.keys() == zero.keys()
    for name in nearest:
        assert torch.equal(nearest[name], zero[name]), name


def test_activation_aware_scales_beat_rounding_where_channels_stand_out(tmp_path):
    checkpoint = with_outliers()
    scaled = AwqOptions(prompts=PROMPTS, clip=False, refine=False)
    reports = quantize_awq(checkpoint, tmp_path / "scales", scaled).layers
    quantize_awq(checkpoint, tmp_path / "all", AWARE)
    quantize_awq(checkpoint, tmp_path / "nearest", NEAREST)
    expected = logits(checkpoint)
    nearest, scales, everything = (
        distance(logits(dequantised(tmp_path / name, checkpoint)), expected) for name in ("nearest", "scales", "all")
    )
    assert scales < 0.8 * nearest
    assert everything < scales
    assert all(layer.alphas[0] > 0 and layer.alphas[2] > 0 for layer in reports)
    assert all(max(layer.error_shares) <= 1 for layer in reports)


def test_the_engine_generates_from_what_is_written(tmp_path):
    quantize_awq(tiny(), tmp_path / "awq", NEAREST)
    with LLM(str(tmp_path / "awq"), dtype="float32", num_gpu_blocks_override=16) as llm:
        [output] = llm.generate("Hello", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_shards_hold_the_same_tensors(tmp_path):
    quantize_awq(tiny(), tmp_path / "one", NEAREST)
    quantize_awq(tiny(), tmp_path / "many", AwqOptions(search=False, shard_bytes=20_000))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert index["weight_map"].keys() == one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in many.values())
    assert left_in(tmp_path / "many") == sorted(
        [
            *names,
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    )


def test_a_folder_is_quantised_with_all_that_is_beside_its_weights(tmp_path):
    source = tmp_path / "source"
    quantize_awq(tiny(), source, NEAREST)  # for its configuration and tokenizer
    config = config_of(source)
    del config["quantization_config"], config["torch_dtype"]
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "of_a_later_version": 1}))
    (source / "LICENSE").write_text("licence")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_text("not copied")
    from safetensors.torch import save_file

    save_file({name: tensor.bfloat16() for name, tensor in tiny().weights()}, source / "model.safetensors")
    quantize_awq(source, tmp_path / "awq", NEAREST)
    copied = ["LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert left_in(tmp_path / "awq") == sorted([*copied, "config.json", "model.safetensors"])
    for name in copied:
        assert (tmp_path / "awq" / name).read_bytes() == (source / name).read_bytes()
    made = config_of(tmp_path / "awq")
    assert (made["dtype"], made["of_a_later_version"]) == ("bfloat16", 1)
    assert "torch_dtype" not in made
    assert tensors_of(tmp_path / "awq")["model.norm.weight"].dtype == torch.bfloat16


# ---------------------------------------------------------------------- what is refused


def test_group_sizes():
    assert check_group_size(tiny().config, None) == 64
    assert check_group_size(tiny().config, 32) == 32
    wide = tiny(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=384).config
    assert check_group_size(wide, None) == 128
    with pytest.raises(ConfigError, match=r"group_size is 128.* 64 input channels \(q, k, v\).* 64 or 32 divides them all"):
        check_group_size(tiny().config, 128)
    with pytest.raises(ConfigError, match="group_size is 48"):
        check_group_size(tiny().config, 48)
    with pytest.raises(ConfigError, match="none of 128, 64, 32 divides"):
        check_group_size(tiny(hidden_size=48).config, None)
    with pytest.raises(ConfigError, match="packs 8 output channels"):
        check_group_size(tiny(num_attention_heads=8, num_key_value_heads=1, head_dim=4, hidden_size=32).config, None)


def test_what_is_quantised_already_is_refused(tmp_path):
    quantize_awq(tiny(), tmp_path / "awq", NEAREST)
    with pytest.raises(UnsupportedModelError, match=r"quantised already \(awq\); give the checkpoint that it was made of"):
        quantize_awq(tmp_path / "awq", tmp_path / "again", NEAREST)
    assert left_in(tmp_path) == ["awq"]


def test_tensors_must_be_llamas(tmp_path):
    class Strange:
        def __init__(self, change):
            self.change = change

        def __getattr__(self, name):
            return getattr(tiny(), name)

        def weights(self):
            return iter(self.change(dict(tiny().weights())).items())

    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(CheckpointError, match=f"lacks {norm}"):
        quantize_awq(Strange(lambda w: {k: v for k, v in w.items() if k != norm}), tmp_path / "awq", NEAREST)
    with pytest.raises(CheckpointError, match=r"has, beyond its architecture, model\.layers\.0\.self_attn\.sinks"):
        quantize_awq(Strange(lambda w: w | {"model.layers.0.self_attn.sinks": torch.ones(4)}), tmp_path / "awq", NEAREST)
    with pytest.raises(UnsupportedModelError, match="beyond 65504"):
        quantize_awq(Strange(lambda w: w | {norm: torch.full((64,), 1e6)}), tmp_path / "awq", NEAREST)
    assert left_in(tmp_path) == []


def test_nothing_is_overwritten_unasked(tmp_path):
    out = tmp_path / "awq"
    out.mkdir()
    quantize_awq(tiny(), out, NEAREST)  # an empty folder is no loss
    before = tensors_of(out)
    with pytest.raises(ConfigError, match=r"exists already.*--overwrite"):
        quantize_awq(tiny(seed=1), out, NEAREST)
    assert torch.equal(tensors_of(out)["lm_head.weight"], before["lm_head.weight"])
    quantize_awq(tiny(seed=1), out, AwqOptions(search=False, overwrite=True))
    assert not torch.equal(tensors_of(out)["lm_head.weight"], before["lm_head.weight"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError, match="no checkpoint folder, so it is not overwritten"):
        quantize_awq(tiny(), tmp_path / "mine", AwqOptions(search=False, overwrite=True))
    with pytest.raises(ConfigError, match="cannot be written"):
        quantize_awq(tiny(), tmp_path / "mine" / "thesis.txt" / "awq", NEAREST)
    with pytest.raises(ConfigError, match="at least 1 byte, not 0"):
        quantize_awq(tiny(), tmp_path / "other", AwqOptions(search=False, shard_bytes=0))
    assert left_in(tmp_path) == ["awq", "mine"]


def test_calibration_needs_text(tmp_path):
    for prompts in ([], [""], [{"prompt": "a"}]):
        with pytest.raises(ConfigError, match="calibration prompts hold no text"):
            quantize_awq(tiny(), tmp_path / "awq", AwqOptions(prompts=prompts))
    with pytest.raises(ConfigError, match="outside the vocabulary; they must be from 0 to 319"):
        quantize_awq(tiny(), tmp_path / "awq", AwqOptions(prompts=[{"prompt_token_ids": [1, 320]}]))
    with pytest.raises(ConfigError, match="at least 1 token in windows of at least 2"):
        quantize_awq(tiny(), tmp_path / "awq", AwqOptions(prompts=PROMPTS, calibration_tokens=0))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_everything_as_it_was(tmp_path, monkeypatch, error):
    quantize_awq(tiny(), tmp_path / "awq", NEAREST)
    before = {path.name: path.read_bytes() for path in (tmp_path / "awq").iterdir()}
    advance, done = LayerByLayer.advance, []

    def interrupted(self):
        if done:
            raise error
        done.append(advance(self))
        return done[-1]

    monkeypatch.setattr(LayerByLayer, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ConfigError):
        quantize_awq(tiny(seed=1), tmp_path / "awq", AwqOptions(prompts=PROMPTS, shard_bytes=10_000, overwrite=True))
    assert done
    assert left_in(tmp_path) == ["awq"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "awq").iterdir()} == before
