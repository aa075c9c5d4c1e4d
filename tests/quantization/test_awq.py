"""4-bit weights: rounded as they are loaded, by chance, on a CPU, and what they take of the memory."""

import logging

import pytest
import torch

from refimpl import LLM, SamplingParams
from refimpl.config import EngineArgs
from refimpl.doctor import machine, models
from refimpl.errors import ConfigError, OutOfMemoryError
from refimpl.layers.linear import Linear
from refimpl.loading.checkpoint import load_model
from refimpl.loading.dummy import ShapeCheckpoint
from refimpl.models.tiny import tiny
from refimpl.quantization.awq import Awq, AwqLinear
from refimpl.quantization.choose import choose_method, fits_widened, methods_for
from refimpl.quantization.method import bytes_of_any_dtype, weight_bytes
from refimpl.simulate import MODELS

CPU = torch.device("cpu")
TEXT = list(range(40, 100))


def loaded(checkpoint, dtype=torch.float32, method=None, load_format="auto", seed=0):
    return load_model(checkpoint, load_format, dtype, CPU, seed, method=method)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widens", [True, False])
def test_a_product_is_that_of_rounded_weights(dtype, widens):
    random = torch.Generator().manual_seed(1)
    weight, x = torch.randn(40, 96, generator=random), torch.randn(5, 96, generator=random).to(dtype)
    linear = AwqLinear(96, 40, 32, dtype, CPU, widens)
    first, second = linear.parts(24, 16)
    first.copy_(weight[:24])
    second.copy_(weight[24:])
    exact = linear._widened(0, torch.float64)
    assert 0.02 < float((exact - weight).norm() / weight.norm()) < 0.15
    linear.pack()
    product = linear(x)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    expected = x.double() @ exact.T
    assert float((product.double() - expected).norm() / expected.norm()) < tolerance
    assert (linear.wide is not None) is widens
    assert bool(linear.words.numel()) is not widens


def test_random_weights_are_in_the_form_itself_the_same_by_seed_and_as_wide_as_others():
    def words(seed):
        model = loaded(tiny(), method=Awq(), load_format="dummy", seed=seed)
        return model.layers[1].mlp.down_proj

    one, again, other = words(3), words(3), words(4)
    assert torch.equal(one.words, again.words)
    assert torch.equal(one.zeros, again.zeros)
    assert not torch.equal(one.words, other.words)
    weights = one._widened(0, torch.float64)
    assert float(weights.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(weights.mean())) < 0.001
    assert len(weights.unique()) > 16
    with LLM("tiny", load_format="dummy", quantization="awq", num_gpu_blocks_override=8) as llm:
        assert len(llm.generate([TEXT], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_a_16_bit_checkpoint_is_rounded_and_that_is_said(caplog):
    caplog.set_level(logging.INFO, logger="refimpl")
    with LLM("tiny", quantization="awq", num_gpu_blocks_override=8) as llm:
        llm.generate(["one"], SamplingParams(max_tokens=2), use_tqdm=False)
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (
        "tiny is in 16 bits or more: its weights are rounded to 4 bits as they are loaded, without samples"
        in warning.message
    )


# ---------------------------------------------------------------------- memory


def test_weight_bytes_are_what_is_held():
    model, config = loaded(tiny(), torch.bfloat16, Awq()), tiny().config
    held = sum(one.nbytes for module in model.modules() if isinstance(module, AwqLinear) for one in module.parameters())
    assert held == bytes_of_any_dtype(config, Awq())
    assert held + 2 * config.num_outside_matrices == weight_bytes(config, Awq(), 2)
    widened = loaded(tiny(), torch.bfloat16)
    assert weight_bytes(config, Awq(widens=True), 2) == 2 * config.num_parameters
    assert all(not isinstance(module, AwqLinear) for module in widened.modules())
    shape = MODELS["llama-3-70b"]
    matrices = shape.num_parameters - shape.num_outside_matrices
    expected = matrices * (4 + 20 / 128) / 8 + 2 * shape.num_outside_matrices
    assert weight_bytes(shape, Awq(128), 2) == expected == pytest.approx(39.8e9, rel=1e-2)


def test_a_cpu_widens_where_memory_allows():
    config = tiny().config
    plain = 2 * config.num_parameters
    for free, widens in ((2 * plain, True), (2 * plain - 1, False)):
        method = choose_method("awq", CPU, config, fits_widened(config, torch.bfloat16, free))
        assert method.widens is widens
        model = loaded(tiny(), torch.bfloat16, method)
        assert isinstance(model.layers[0].mlp.down_proj.wide, Linear) is widens
    model.release()


def test_a_machine_too_small_for_the_weights_is_told_of_4_bits(monkeypatch):
    wide = tiny(hidden_size=512, intermediate_size=512, head_dim=128, vocab_size=64)
    room = weight_bytes(wide.config, Awq(), 2)
    options = {"dtype": "bfloat16", "load_format": "dummy", "device": "cpu"}
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: room)
    with pytest.raises(OutOfMemoryError, match=r"in bfloat16; .* quantization=awq takes 0\.0 GiB and fits"):
        LLM(wide, **options)
    with LLM(wide, quantization="awq", num_gpu_blocks_override=4, **options) as llm:
        assert llm.memory_report().weight_bytes == room
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: room - 1)
    with pytest.raises(OutOfMemoryError, match=r"GiB in awq \(embeddings and output head in bfloat16\)"):
        LLM(wide, quantization="awq", **options)


def test_the_doctor_counts_them_too():
    args = EngineArgs(model="tiny", dtype="bfloat16", quantization="awq", device="cpu")
    choices, device, dtype = machine.check_choices(args)
    [served] = [finding for finding in choices if finding.name == "products of 4-bit weights"]
    assert served.value == "torch, on widened weights"
    about = next(finding for finding in models.check_model(args, device, dtype) if finding.name == "tiny")
    assert "GiB in awq and bfloat16" in about.value


# ---------------------------------------------------------------------- devices and sizes


def test_sizes_that_4_bits_cannot_hold_are_refused_with_the_layer(monkeypatch):
    odd = ShapeCheckpoint("odd", tiny(hidden_size=64, intermediate_size=100).config)
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.mlp\.down_proj has 100 inputs; 4-bit weights need a multiple of 32"
    ):
        LLM(odd, load_format="dummy", quantization="awq")
    assert [method.name for method in methods_for(CPU, odd.config)] == ["fp8"]
    assert [method.name for method in methods_for(CPU, tiny().config)] == ["fp8", "awq"]


def test_a_gpu_without_fp8_has_4_bits(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert [method.name for method in methods_for(gpu, MODELS["llama-3-8b"])] == ["awq"]
    chosen = choose_method("awq", gpu, MODELS["llama-3-8b"])
    assert isinstance(chosen, Awq)
    assert not chosen.widens
