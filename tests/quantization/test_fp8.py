"""FP8 weights: the model is its twin with rounded weights and activations, and takes half the memory."""

import logging

import pytest
import torch
from tests_support import full_logits

from refimpl import LLM, SamplingParams
from refimpl.config import EngineArgs
from refimpl.doctor import machine, models
from refimpl.errors import ConfigError, OutOfMemoryError
from refimpl.kernels import reference
from refimpl.layers.linear import Linear
from refimpl.loading.checkpoint import load_model, open_checkpoint
from refimpl.models.tiny import tiny
from refimpl.quantization.choose import choose_method
from refimpl.quantization.fp8 import Fp8, Fp8Linear, quantise
from refimpl.quantization.method import weight_bytes
from refimpl.quantization.plain import PLAIN
from refimpl.simulate import MODELS

CPU = torch.device("cpu")
TEXT = list(range(40, 100))


def loaded(checkpoint, dtype, method=PLAIN):
    return load_model(checkpoint, "auto", dtype, CPU, 0, method=method)


def relative(got, expected):
    """Relative error in the L2 norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def widened(rows):
    """Rounded to e4m3 with a scale a row, and back."""
    values, scales = reference.quantise(rows)
    return values.to(scales.dtype) * scales.unsqueeze(-1)


# ---------------------------------------------------------------------- numbers


def test_rows_use_the_whole_range_and_stay_finite():
    x = torch.tensor([[1.0, -2.0, 0.5], [3e38, -1e38, 1.0], [0.0, 0.0, 0.0], [1e-38, 0.0, -1e-38], [2.0**120, 1.0, 0.0]])
    values, scales = reference.quantise(x)
    assert values.dtype == torch.float8_e4m3fn
    assert values.float().abs().amax(-1).tolist()[:3] == [448.0, 448.0, 0.0]
    assert torch.isfinite(values.float() * scales.unsqueeze(-1)).all()
    torch.testing.assert_close(widened(x)[:2], x[:2], rtol=2**-4, atol=3e38 * 2**-17)
    assert reference.quantise(torch.tensor([[float("nan"), 1.0]]))[0].float().isnan().any(), "what is broken stays so"
    larger, smaller = (reference.quantise(factor * x[:1]) for factor in (20.0, 1.0))
    assert torch.equal(larger[0].float(), smaller[0].float()), "a scale is the row's own, and of nothing before"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_product_is_that_of_rounded_weights_and_activations(dtype, tokens):
    random = torch.Generator().manual_seed(tokens)
    weight = torch.randn(96, 64, generator=random) * torch.logspace(-3, 2, 96).unsqueeze(1)
    x = torch.randn(tokens, 64, generator=random).to(dtype)
    linear = Fp8Linear(64, 96, dtype, CPU)
    [whole] = linear.parts()
    whole.copy_(weight)
    twin = widened(x.double()) @ widened(weight.double()).T
    product = linear(x)
    assert product.dtype == dtype
    assert relative(product, twin) < 1e-2
    assert relative(linear(quantise(x)), twin) < 1e-2
    exact = x.double() @ weight.double().T
    assert 0.01 < relative(product, exact) < 0.06, "three bits of mantissa, twice"
    if tokens > 1:
        each = (product.double() - exact).norm(dim=0) / exact.norm(dim=0)
        assert each.max() < 0.15, "large outputs beside small ones do not cost those their digits"


def test_the_tiny_model_is_its_twin():
    """Layers whose matrices and their inputs are rounded by hand, in float64; head, norms and embeddings are left."""
    ours = full_logits(loaded(tiny(), torch.float64, Fp8()), TEXT)
    twin = loaded(tiny(), torch.float64)
    head = twin.lm_head
    for linear in (module for module in twin.modules() if isinstance(module, Linear) and module is not head):
        linear.weight.data = widened(linear.weight.data)
        linear.register_forward_pre_hook(lambda module, inputs: (widened(inputs[0]),))
    expected = full_logits(twin, TEXT)
    assert relative(ours, expected) < 1e-6, "scales of weights are float32"
    plain = full_logits(loaded(tiny(), torch.float64), TEXT)
    assert 0.01 < relative(ours, plain) < 0.3


def test_the_embedded_model_still_knows_its_language(smollm2):
    text = (
        "The capital of France is Paris. Water boils at one hundred degrees. A dog is an animal that barks, "
        "and a cat is an animal that likes to sleep in the sun. In the morning the sun rises in the east."
    )
    checkpoint = open_checkpoint("smollm2")
    token_ids = checkpoint.tokenizer().encode(text)
    with torch.inference_mode():
        plain = full_logits(loaded(checkpoint, torch.float32), token_ids)
        ours = full_logits(loaded(checkpoint, torch.float32, Fp8()), token_ids)
    agree = (plain.argmax(-1) == ours.argmax(-1)).float().mean()
    assert agree >= 0.8, f"{agree:.0%} of the next tokens are the same"
    targets = torch.tensor(token_ids[1:])
    losses = [torch.nn.functional.cross_entropy(logits[:-1], targets) for logits in (plain, ours)]
    assert abs(losses[1] - losses[0]) < 0.1


# ---------------------------------------------------------------------- memory


def test_weight_bytes_are_what_is_held():
    model = loaded(tiny(), torch.bfloat16, Fp8())
    config = tiny().config
    wide = {name for name, _ in model.named_parameters() if name.endswith("norm.weight")}  # a CPU's norms are float32
    held = sum(weight.nbytes // (1 + (name in wide)) for name, weight in model.named_parameters())
    head = 2 * config.vocab_size * config.hidden_size * (model.lm_head.weight.numel() == 0)  # in a CPU's own layout
    assert held + head == weight_bytes(config, Fp8(), 2)
    with LLM("tiny", dtype="bfloat16", quantization="fp8", num_gpu_blocks_override=8) as llm:
        assert llm.memory_report().weight_bytes == held + head
    shape = MODELS["llama-3-70b"]
    assert weight_bytes(shape, Fp8(), 2) == pytest.approx(72.7e9, rel=1e-3)
    assert weight_bytes(shape, choose_method(None, CPU), 2) == 2 * shape.num_parameters


def test_a_machine_too_small_for_the_weights_is_told_of_fp8(monkeypatch):
    config = tiny().config
    room = weight_bytes(config, Fp8(), 2)
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: room)
    assert room < 2 * config.num_parameters
    with pytest.raises(OutOfMemoryError, match=r"in bfloat16; .* quantization=fp8 takes 0\.0 GiB and fits"):
        LLM("tiny", dtype="bfloat16", device="cpu")
    with pytest.raises(OutOfMemoryError, match=r"GiB in fp8 \(embeddings and output head in float64\)"):
        LLM("tiny", dtype="float64", quantization="fp8", device="cpu")


def test_the_doctor_counts_them_too():
    args = EngineArgs(model="tiny", dtype="bfloat16", quantization="fp8", device="cpu")
    choices, device, dtype = machine.check_choices(args)
    [served] = [finding for finding in choices if finding.name == "products of FP8 weights"]
    assert served.value == "torch"
    about = next(finding for finding in models.check_model(args, device, dtype) if finding.name == "tiny")
    assert about.value.startswith(f"{tiny().config.num_parameters / 1e6:,.1f} million weights, ")
    assert "GiB in fp8 and bfloat16" in about.value


# ---------------------------------------------------------------------- what is refused, and said


@pytest.mark.parametrize("value", ["int8", "AWQ", "FP8", True, ""])
def test_other_methods_are_refused_with_what_there_is(value):
    with pytest.raises(ConfigError, match=r"quantization is .*; it must be awq, fp8, gptq, or None \(as the checkpoint is"):
        EngineArgs(quantization=value)


def test_a_gpu_without_fp8_is_refused_with_the_alternative(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    wanted = r"NVIDIA A100 \(sm_80\) has no FP8 .*; use quantization='awq', .* leave quantization out and use dtype=bfloat16"
    with pytest.raises(ConfigError, match=wanted):
        choose_method("fp8", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choose_method("fp8", torch.device("cuda")).name == "fp8"


def test_a_cpu_says_once_that_it_is_slow(caplog):
    caplog.set_level(logging.INFO, logger="refimpl")
    with LLM("tiny", dtype="float32", device="cpu", quantization="fp8", num_gpu_blocks_override=16) as llm:
        llm.generate(["one", "two"], SamplingParams(temperature=0, max_tokens=3))
    said = [record.message for record in caplog.records if "FP8" in record.message]
    assert len(said) == 1
    assert "products of FP8 weights: torch (slow: a CPU has no FP8 arithmetic" in said[0]
