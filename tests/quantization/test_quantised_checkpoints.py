"""Checkpoints that are quantised already: their models are those of the plain weights that they stand for."""

import copy
import json
import logging
import time

import pytest
import torch
from quantised_folder import AWQ, GPTQ, folder
from safetensors.torch import save_file
from tests_support import full_logits

from refimpl import LLM, SamplingParams
from refimpl.errors import CheckpointError, ConfigError, UnsupportedModelError
from refimpl.layers.linear import Linear
from refimpl.loading.checkpoint import load_model
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.hf_config import read_config
from refimpl.loading.quantization_keys import read_quantization, written_quantization
from refimpl.quantization.awq import Awq, AwqLinear
from refimpl.quantization.choose import choose_method
from refimpl.quantization.fp8 import Fp8
from refimpl.quantization.method import weight_bytes
from refimpl.quantization_config import QuantizationConfig
from refimpl.ranks import ALONE

CPU = torch.device("cpu")
TEXT = list(range(40, 80))


def logits(checkpoint, dtype=torch.float32, method=None):
    with torch.inference_mode():
        return full_logits(load_model(checkpoint, "auto", dtype, CPU, 0, method=method), TEXT)


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


# ---------------------------------------------------------------------- what they compute


@pytest.mark.parametrize(
    "quantization",
    [
        AWQ,
        GPTQ,
        QuantizationConfig("awq", "awq", group_size=32),
        QuantizationConfig("awq", "awq", group_size=-1),
        QuantizationConfig("awq", "awq", group_size=32, zero_point=False),
        QuantizationConfig("gptq", "gptq", group_size=64),
    ],
    ids=str,
)
def test_a_model_of_4_bits_is_that_of_its_weights_run_plainly(tmp_path, quantization):
    path, plain, _ = folder(tmp_path, quantization)
    checkpoint = FolderCheckpoint(path)
    expected = logits(plain)
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-4, atol=1e-4)
    packed = Awq(quantization.group_size, quantization.method)
    torch.testing.assert_close(logits(checkpoint, method=packed), expected, rtol=1e-4, atol=1e-4)
    assert relative(logits(checkpoint, torch.float64, packed), logits(plain, torch.float64)) < 1e-12


@pytest.mark.parametrize("by_tensor", [True, False])
def test_a_model_of_fp8_is_taken_over_as_it_is_whatever_the_scales_of_what_is_fused(tmp_path, by_tensor):
    path, plain, stored = folder(tmp_path, QuantizationConfig("fp8", "fp8"), by_tensor)
    model = load_model(FolderCheckpoint(path), "auto", torch.float32, CPU, 0)
    qkv = model.layers[1].attention.qkv_proj
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    assert torch.equal(qkv.weight.float(), torch.cat([stored[f"{name}.weight"].float() for name in names]))
    scales = [stored[f"{name}.weight_scale"].flatten() for name in names]
    assert len({float(scale[0]) for scale in scales}) == 3, "each part has its own"
    rows = [len(stored[f"{name}.weight"]) for name in names]
    assert torch.equal(qkv.scales, torch.cat([s.expand(n) for s, n in zip(scales, rows, strict=True)]))
    assert 0.001 < relative(full_logits(model, TEXT), logits(plain)) < 0.2, "activations are rounded too"


def test_matrices_that_are_left_in_16_bits_are_so_here_too(tmp_path):
    left = ("lm_head", "model.layers.0.mlp", "re:.*1.self_attn.o_proj")
    quantization = QuantizationConfig("awq", "awq", 64, left_out=left)
    path, plain, _ = folder(tmp_path, quantization)
    checkpoint = FolderCheckpoint(path)
    model = load_model(checkpoint, "auto", torch.bfloat16, CPU, 0, method=Awq(64))
    plainly = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    assert plainly == ["layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj", "layers.1.attention.o_proj", "lm_head"]
    torch.testing.assert_close(logits(checkpoint), logits(plain), rtol=1e-4, atol=1e-4)
    everything = weight_bytes(plain.config, Awq(64), 2)
    matrices = plain.config.layer_matrices
    more = sum(2 * o * i - Awq(64).weight_bytes(i, o, 2) for o, i in (matrices[1], matrices[2], matrices[3]))
    assert weight_bytes(checkpoint.config, Awq(64), 2) == everything + more
    with LLM(str(path), num_gpu_blocks_override=8) as llm:
        assert llm.generate([TEXT], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids


def test_the_engine_takes_the_method_of_the_checkpoint_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="refimpl")
    path, plain, _ = folder(tmp_path, AWQ)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu"}
    with LLM(str(path), num_gpu_blocks_override=8, **options) as llm, LLM(plain, **options) as theirs:
        ours, expected = (one.generate([TEXT], greedy, use_tqdm=False)[0].outputs[0] for one in (llm, theirs))
    assert ours.token_ids == expected.token_ids
    said = [record.message for record in caplog.records if "4-bit weights" in record.message]
    assert len(said) == 1
    assert "products of 4-bit weights: torch, on widened weights (a CPU has none of 4 bits" in said[0]
    assert not any("without samples" in record.message for record in caplog.records)


@pytest.mark.parametrize("quantization", [AWQ, QuantizationConfig("fp8", "fp8")], ids=["awq", "fp8"])
def test_ranks_take_their_shares_of_every_tensor(tmp_path, quantization):
    """Both ranks' matrices side by side are the whole model's."""
    path, *_ = folder(tmp_path, quantization, intermediate_size=256)
    checkpoint = FolderCheckpoint(path)
    method = Awq(64) if quantization is AWQ else Fp8()

    def loaded(rank, size):
        ranks = copy.copy(ALONE)
        ranks.rank, ranks.size = rank, size
        return load_model(checkpoint, "auto", torch.float32, CPU, 0, method=method, ranks=ranks)

    whole, first, second = loaded(0, 1), loaded(0, 2), loaded(1, 2)

    def weight(model):
        down = model.layers[1].mlp.down_proj
        if isinstance(down, AwqLinear):
            return down._widened(0, torch.float32)
        return down.weight.float() * down.scales.unsqueeze(1)

    assert torch.equal(torch.cat([weight(first), weight(second)], dim=1), weight(whole))


# ---------------------------------------------------------------------- what config.json may say


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"},
            QuantizationConfig("awq", "awq", 128),
        ),
        ({"quant_method": "AWQ", "w_bit": 4, "q_group_size": 64}, QuantizationConfig("awq", "awq", 64)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
            QuantizationConfig("gptq", "gptq", 128, zeros_less_one=True),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "checkpoint_format": "gptq_v2"},
            QuantizationConfig("gptq", "gptq", -1),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            QuantizationConfig("fp8", "fp8", left_out=("lm_head",)),
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, QuantizationConfig("fp8", "fbgemm_fp8")),
        (COMPRESSED, QuantizationConfig("fp8", "compressed-tensors", left_out=("lm_head",))),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else "",
)
def test_what_is_run_is_read(raw, expected):
    assert read_quantization({"quantization_config": raw}, "config.json") == expected


@pytest.mark.parametrize(
    "config",
    [AWQ, GPTQ, QuantizationConfig("fp8", "fp8", left_out=("lm_head",)), QuantizationConfig("awq", "awq", -1, False)],
    ids=str,
)
def test_what_is_written_reads_the_same(config):
    assert read_quantization({"quantization_config": json.loads(json.dumps(written_quantization(config)))}, "here") == config


def weights_of(**changes):
    groups = {"group_0": COMPRESSED["config_groups"]["group_0"] | {"weights": changes}}
    return COMPRESSED | {"config_groups": groups}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"is quantised \(bitsandbytes\); refimpl runs awq .*, gptq .*, and fp8"),
        ({"quant_method": "aqlm"}, r"is quantised \(aqlm\); refimpl runs"),
        ({"bits": 4}, r"is quantised \(unknown\); refimpl runs"),
        ("mxfp4", r"is quantised \(mxfp4\); refimpl runs"),
        ({"quant_method": "awq", "bits": 8}, "has AWQ weights of 8 bits; refimpl reads those of 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'.*refimpl reads version gemm"),
        ({"quant_method": "awq", "version": "marlin"}, "version 'marlin'"),
        ({"quant_method": "awq", "group_size": 48}, r"in groups of 48; refimpl reads groups of 128, 64, 32, -1 \(all\)"),
        ({"quant_method": "gptq", "bits": 3}, "has GPTQ weights of 3 bits"),
        ({"quant_method": "gptq", "group_size": 128, "desc_act": True}, r"act-order \(desc_act\).*desc_act false"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "in the format 'marlin'"),
        ({"quant_method": "gptq", "dynamic": {"-:.*": {}}}, "with dynamic set"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"scaled by blocks of \[128, 128\]"),
        (weights_of(num_bits=4, type="int", strategy="group"), "weights of 4 bits, int, scaled by group"),
        (weights_of(num_bits=8, type="float", strategy="block"), "weights of 8 bits, float, scaled by block"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_at_once_by_name_with_what_is(raw, message):
    start = time.monotonic()
    with pytest.raises(UnsupportedModelError, match=message):
        read_quantization({"quantization_config": raw}, "config.json")
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    "raw",
    [
        {"quant_method": "awq", "bits": "four"},
        {"quant_method": "awq", "modules_to_not_convert": "lm_head"},
        {"quant_method": "awq", "modules_to_not_convert": [3]},
        {"quant_method": "awq", "group_size": None, "bits": [4]},
        {"quant_method": "fp8", "ignored_layers": ["re:("]},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": None}}},
    ],
    ids=str,
)
def test_a_damaged_configuration_is_told(raw):
    with pytest.raises(CheckpointError, match="quantization_config with a value of the wrong kind"):
        read_quantization({"quantization_config": raw}, "config.json")


# ---------------------------------------------------------------------- what does not fit


def test_option_and_checkpoint_must_not_contradict_each_other(tmp_path):
    path, *_ = folder(tmp_path, AWQ)
    with pytest.raises(
        ConfigError, match="quantization is 'fp8', but the checkpoint's weights are quantised already, by awq"
    ):
        LLM(str(path), quantization="fp8")
    config = read_config(path)
    assert choose_method("awq", CPU, config).name == choose_method(None, CPU, config).name == "awq"
    assert isinstance(
        choose_method(None, CPU, config, widens=lambda method: False).linear(128, 8, torch.float32, CPU), AwqLinear
    )
    assert isinstance(choose_method("fp8", CPU), Fp8)


def test_a_checkpoint_that_lacks_a_tensor_or_has_a_wrong_one_is_refused_with_its_name(tmp_path):
    path, _, stored = folder(tmp_path, AWQ)
    name = "model.layers.1.mlp.up_proj"
    wrong = {
        f"missing: {name}.qzeros": {f"{name}.qzeros": None},
        f"missing: {name}.scales": {f"{name}.scales": None},
        rf"misshapen: {name}.qweight is \[128, 23\], its configuration makes it \[128, 24\]": {
            f"{name}.qweight": stored[f"{name}.qweight"][:, :23]
        },
        rf"misshapen: {name}.scales is \[4, 192\], its configuration makes it \[2, 192\]": {
            f"{name}.scales": stored[f"{name}.scales"].repeat(2, 1)
        },
        f"of another type: {name}.qweight is int64, not int32": {f"{name}.qweight": stored[f"{name}.qweight"].long()},
        f"of another type: {name}.scales is int32, not float16 or bfloat16 or float32": {
            f"{name}.scales": stored[f"{name}.scales"].int()
        },
        f"not in this architecture: {name}.weight": {f"{name}.weight": torch.zeros(192, 128)},
        "of another type: lm_head.weight is float8_e4m3fn, not a float type of 16 bits or more": {
            "lm_head.weight": stored["lm_head.weight"].to(torch.float8_e4m3fn)
        },
    }
    for message, changes in wrong.items():
        tensors = {key: one.contiguous() for key, one in (stored | changes).items() if one is not None}
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(FolderCheckpoint(path), "auto", torch.float32, CPU, 0)
    broken = stored[f"{name}.scales"].clone()
    broken[1, 3] = torch.inf
    save_file(stored | {f"{name}.scales": broken}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}.scales holds infinite numbers or NaN"):
        load_model(FolderCheckpoint(path), "auto", torch.float32, CPU, 0)


def test_groups_that_do_not_divide_a_layer_are_refused_before_anything_is_loaded(tmp_path):
    path, *_ = folder(tmp_path, AWQ, config_changes={"quant_method": "awq", "bits": 4, "group_size": 128})
    wanted = r"model\.layers\.0\.mlp\.down_proj has 192 inputs, .* in groups of 128, .*; group sizes that would do: 64, 32$"
    with pytest.raises(CheckpointError, match=wanted):
        LLM(str(path))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (QuantizationConfig("awq", "awq", 64, left_out=("k_proj",)), r"leaves .*\.k_proj in 16 bits, but not the others of"),
        (
            QuantizationConfig("fp8", "fp8", left_out=("mlp",)),
            r"leaves .*gate_proj, .*up_proj in 16 bits, among layers of FP8",
        ),
    ],
    ids=["part of what is fused", "fp8"],
)
def test_what_cannot_be_left_out_is_refused(tmp_path, quantization, message):
    path, *_ = folder(tmp_path, quantization)
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(str(path))
