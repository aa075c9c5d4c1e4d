"""The formula by hand: one step, blocks from memory, all-reduces, formats, and what is refused."""

import dataclasses

import msgspec
import pytest

from refimpl.config import CacheConfig
from refimpl.errors import CheckpointError, ConfigError, OutOfMemoryError
from refimpl.loading.hf_config import write_config
from refimpl.quantization.awq import Awq
from refimpl.quantization.fp8 import Fp8
from refimpl.quantization.method import weight_bytes
from refimpl.simulate import HARDWARE, MODELS, Deployment, Efficiency, StepWork
from refimpl.simulate.hardware import find_hardware
from refimpl.simulate.models import FORMATS, find_format, find_model

IDEAL = Efficiency(bandwidth=1.0, flops=1.0, fp8_flops=1.0, link=1.0, layer_seconds=0.0, row_seconds=0.0)
HEAD_8B, HEAD_70B = 128_256 * 4_096, 128_256 * 8_192
LAYERS_8B = 32 * (2 * 4_096 * 4_096 + 2 * 4_096 * 1_024 + 3 * 4_096 * 14_336 + 2 * 4_096) + 4_096
CACHE = CacheConfig(
    block_size=16,
    num_gpu_blocks_override=None,
    kv_cache_memory_bytes=None,
    gpu_memory_utilization=0.9,
    cpu_kvcache_space=None,
)


def test_a_decode_step_by_hand():
    """64 sequences of 640 tokens, Llama-3-8B on an H200: memory-bound."""
    roofline = Deployment.of("llama-3-8b", "h200", efficiency=IDEAL).roofline
    work = StepWork(tokens=64, rows=64, context=64 * 640, pairs=64 * 640)
    weights = 2 * (LAYERS_8B + HEAD_8B)
    kv = (64 * 640 + 64) * 2 * 32 * 8 * 128 * 2
    operations = 2 * LAYERS_8B * 64 + 2 * HEAD_8B * 64 + 4 * 32 * 32 * 128 * 64 * 640
    assert weights == pytest.approx(15.01e9, rel=1e-3)
    assert roofline.weight_bytes == weights + 2 * HEAD_8B
    assert roofline.times(work).memory == pytest.approx((weights + kv) / 4.8e12, rel=1e-12)
    assert roofline.times(work).compute == pytest.approx(operations / 989e12, rel=1e-12)
    assert roofline.times(work).communication == 0
    assert roofline.times(work).seconds == roofline.times(work).memory


@pytest.mark.parametrize(
    ("name", "published"),
    [("mistral-7b", 7_241_732_096), ("qwen2.5-7b", 7_615_616_512), ("qwen3-8b", 8_190_735_360)],
)
def test_shapes_of_other_families_have_as_many_weights_as_are_published(name, published):
    assert MODELS[name].num_parameters == published


def test_a_prefill_step_by_hand_is_bound_by_arithmetic_and_overheads_come_on_top():
    """One prompt of 2,048 tokens; only its last token draws."""
    efficiency = dataclasses.replace(IDEAL, flops=0.5, layer_seconds=1e-5, row_seconds=1e-4)
    roofline = Deployment.of("llama-3-8b", "h100", efficiency=efficiency).roofline
    pairs = 2_048 * 2_049 // 2
    work = StepWork(tokens=2_048, rows=1, context=2_048, pairs=pairs)
    operations = 2 * LAYERS_8B * 2_048 + 2 * HEAD_8B + 4 * 32 * 32 * 128 * pairs
    assert roofline.times(work).seconds == pytest.approx(operations / (0.5 * 989e12) + 32e-5 + 1e-4, rel=1e-12)


def test_tensor_parallelism_divides_and_adds_two_all_reduces_a_layer():
    work = StepWork(tokens=100, rows=100, context=50_000, pairs=50_000)
    one, eight = (Deployment.of("llama-3-70b", "a100-80g", n, efficiency=IDEAL).roofline for n in (1, 8))
    assert eight.times(work).memory == pytest.approx(one.times(work).memory / 8, rel=1e-12)
    assert eight.times(work).compute == pytest.approx(one.times(work).compute / 8, rel=1e-12)
    moved = 2 * 7 / 8 * 100 * 8_192 * 2
    assert eight.times(work).communication == pytest.approx(2 * 80 * (8e-6 + moved / 300e9), rel=1e-12)
    assert one.times(work).communication == 0


def test_more_devices_than_kv_heads_hold_copies_of_the_cache():
    eight, sixteen = (Deployment.of("llama-3-70b", "h100", n, efficiency=IDEAL) for n in (8, 16))
    assert sixteen.block_bytes(16) == 2 * eight.block_bytes(16) == 2 * 5 * 1024**2
    work = StepWork(tokens=1, rows=1, context=10**6, pairs=0)
    nothing = msgspec.structs.replace(work, context=-1)  # no keys and values at all
    cache = [d.roofline.times(work).memory - d.roofline.times(nothing).memory for d in (eight, sixteen)]
    assert cache[0] == pytest.approx(cache[1], rel=1e-9)


def test_formats_weigh_what_they_should_and_fp8_computes_faster_only_where_it_can():
    weights = {name: Deployment.of("llama-3-70b", "h100", 8, name).roofline.weight_bytes for name in FORMATS}
    shape = MODELS["llama-3-70b"]
    matrices = shape.num_parameters - 2 * HEAD_70B - 161 * 8_192  # two norms a layer, and the last one
    outputs = 80 * (10_240 + 8_192 + 57_344 + 8_192)
    assert weights["bfloat16"] == weights["float16"] == 2 * MODELS["llama-3-70b"].num_parameters
    in_16_bits = 2 * (shape.num_parameters - matrices)
    assert weights["fp8"] == matrices + 4 * outputs + in_16_bits == weight_bytes(shape, Fp8(), 2)
    assert weights["awq"] == matrices * (4 + 20 / 128) / 8 + in_16_bits == weight_bytes(shape, Awq(128), 2)
    fp8 = find_format("fp8")
    assert fp8.flops(HARDWARE["h100"]) == 1_979e12
    assert fp8.flops(HARDWARE["a100-80g"]) == HARDWARE["a100-80g"].flops
    assert find_format("AWQ").flops(HARDWARE["h100"]) == HARDWARE["h100"].flops


def test_blocks_are_what_the_weights_leave_and_the_sum_is_shown():
    deployment = Deployment.of("llama-3-70b", "a100-80g", 8)
    left = int(0.9 * 8 * 80 * 1024**3) - 2 * MODELS["llama-3-70b"].num_parameters
    assert deployment.num_blocks(CACHE) == left // (5 * 1024**2) - 1
    assert deployment.arithmetic(CACHE) == (
        "0.9 · 85.9 GB · 8 = 618.5 GB, less 141.1 GB of weights in bfloat16: 477.4 GB; / 5,242,880 B, less the null block: "
        "91,049 blocks of 16 tokens, 1,456,784 tokens"
    )
    assert (
        Deployment.of("llama-3-70b", "a100-80g", 8, kv_cache_dtype="fp8").num_blocks(CACHE) == left // (5 * 1024**2 // 2) - 1
    )
    fewer = dataclasses.replace(CACHE, num_gpu_blocks_override=7)
    assert deployment.num_blocks(fewer) == 7
    assert "7 blocks of 16" in deployment.arithmetic(fewer)
    bytes_given = dataclasses.replace(CACHE, kv_cache_memory_bytes=10 * 5 * 1024**2)
    assert deployment.num_blocks(bytes_given) == 9


def test_blocks_of_an_8b_model_are_within_two_per_cent_of_what_vllm_found():
    assert Deployment.of("llama-3-8b", "h200").num_blocks(CACHE) == pytest.approx(57_167, rel=0.02)


def test_a_model_that_does_not_fit_is_refused_with_the_sum():
    with pytest.raises(
        OutOfMemoryError, match=r"0\.9 · 24\.2 GB · 1 = 21\.7 GB, less 141\.1 GB of weights .*: -119\.4 GB are left"
    ):
        Deployment.of("llama-3-70b", "l4").num_blocks(CACHE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: find_hardware("a100"), "did you mean a100-40g or a100-80g?"),
        (lambda: find_hardware("h20"), "did you mean h200"),
        (lambda: find_model("llama-3-70"), "did you mean llama-3-70b"),
        (lambda: find_format("int3"), "There are bfloat16, float16, fp8, awq"),
        (lambda: Deployment.of("llama-3-8b", "h200", 3), "give one of 1, 2, 4, 8, 16, 32"),
        (lambda: Deployment.of("llama-3-8b", "h200", 0), "must be a whole number, 1 or more"),
        (lambda: Deployment.of("llama-3-8b", "h200", kv_cache_dtype="fp4"), "kv_cache_dtype 'fp4' is not known"),
    ],
)
def test_what_is_not_known_is_refused_with_the_nearest(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_a_folder_with_a_config_is_a_model(tmp_path):
    write_config(MODELS["llama-3-8b"], tmp_path)
    assert find_model(str(tmp_path)) == MODELS["llama-3-8b"]
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        find_model(str(tmp_path))


def test_names_do_not_ask_for_capitals():
    assert find_hardware("H200") is HARDWARE["h200"]
    assert find_format("BF16") is FORMATS["bfloat16"]


def test_the_table_of_hardware_is_sane():
    for name, device in HARDWARE.items():
        assert name == device.name == name.lower()
        assert 10 * 1024**3 < device.memory_bytes < 200 * 1024**3
        assert 20 < device.flops / device.bandwidth < 500, "operations a byte at the ridge"
        assert device.fp8_flops is None or 1.9 < device.fp8_flops / device.flops < 2.1
        assert device.price > 0
        assert "20" in device.price_source or "assumed" in device.price_source, "dated"
