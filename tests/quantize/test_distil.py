"""Training scales and levels: what is trained is what is stored, and it comes nearer to the model."""

import re

import pytest
import torch
from family_models import variant
from quantize_support import CPU, PROMPTS, TEXT, distance, logits, tensors_of, with_outliers

from refimpl.executor import device
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.loading.in_memory import TransformersCheckpoint
from refimpl.quantization.awq_layout import quantise_groups
from refimpl.quantize.awq import AwqOptions, quantize_awq
from refimpl.quantize.dense_layers import DenseModel
from refimpl.quantize.distil import HELD_OUT_TOKENS, Training, divergence, product_dtype, share_of_rate, split
from refimpl.quantize.refine import Levels
from refimpl.quantize.source import Source
from refimpl.quantize.trained_levels import TrainedLevels

SHORT = Training(steps=30, tokens=512, batch_tokens=256, tokens_at_once=128, level_rate=2e-2, scale_rate=2e-3)


@pytest.mark.parametrize("name", ["llama-biases", "mistral", "qwen3", "qwen3-biases-window"])
def test_the_dense_model_computes_what_the_engine_does(name):
    source = Source(TransformersCheckpoint(variant(name)))
    model = DenseModel(source.config, dict(source.outside_layers()), torch.float32, CPU)

    def layer(number):
        start = f"model.layers.{number}."
        return {name.removeprefix(start): one for name, one in source.weights.items() if name.startswith(start)}

    other = [(5 * i + 1) % 256 for i in range(len(TEXT))]
    hidden = model.hidden(layer, torch.tensor([other, TEXT]))[len(TEXT) :]
    assert distance(hidden @ model.head.T, logits(source.checkpoint, torch.float32)) < 1e-5


def test_a_matrix_begins_with_its_levels_and_is_stored_as_it_computes():
    weight = torch.randn(16, 128)
    levels = Levels(*quantise_groups(weight * 0.8, 64))
    trained = TrainedLevels(levels, weight)
    assert torch.allclose(trained.weight(torch.float32), levels.widened(), atol=1e-6)
    assert torch.equal(trained.stored().values, levels.values)
    with torch.no_grad():
        trained.numbers += torch.randn_like(trained.numbers)
        trained.growth += 0.1
    stored = trained.stored()
    assert int(stored.values.max()) <= 15
    assert not torch.equal(stored.values, levels.values)
    assert torch.equal(stored.zeros, levels.zeros)
    assert torch.allclose(trained.weight(torch.float32), stored.widened(), rtol=1e-3)


def test_gradients_go_past_the_rounding_and_stop_at_the_range():
    trained = TrainedLevels(Levels(*quantise_groups(torch.randn(8, 64), 64)), torch.zeros(8, 64))
    with torch.no_grad():
        trained.numbers[0, 0, 0] = 40.0  # beyond the range
    seen = torch.randn(8, 64)
    (trained.weight(torch.float32) * seen).sum().backward()
    scales = trained.stored().scales.float().T.unsqueeze(2)
    expected = seen.view(8, 1, 64) * scales
    expected[0, 0, 0] = 0
    assert torch.allclose(trained.numbers.grad, expected, rtol=1e-3)
    by_hand = (trained.weight(torch.float32).detach() * seen).sum(1)  # d(w)/d(growth) is w itself
    assert torch.allclose(trained.growth.grad.flatten(), by_hand, rtol=1e-3, atol=1e-4)


def test_the_divergences_gradient_is_that_of_autograd(monkeypatch):
    monkeypatch.setattr("refimpl.quantize.distil.LOGITS_AT_ONCE", 3 * 50)  # three rows at a time
    head, expected, found = torch.randn(50, 8), torch.randn(10, 8), torch.randn(10, 8, requires_grad=True)
    p, q = ((x @ head.T).log_softmax(-1) for x in (expected, found))
    wanted = (p.exp() * (p - q)).sum() / 20
    wanted.backward()
    loss, gradient = divergence(head, expected, found.detach(), 20)
    assert torch.allclose(loss, wanted, rtol=1e-5)
    assert torch.allclose(gradient, found.grad, atol=1e-6)


@pytest.mark.parametrize(("flags", "dtype"), [({"amx_bf16"}, torch.bfloat16), ({"avx2"}, torch.float32)])
def test_products_are_in_bfloat16_where_it_is_native(monkeypatch, flags, dtype):
    monkeypatch.setattr(device, "cpu_flags", lambda: flags)
    assert product_dtype(CPU) == dtype


def test_the_rate_rises_and_falls():
    shares = [share_of_rate(step / 100) for step in range(100)]
    assert 0 < shares[0] < shares[4] <= shares[5] == max(shares)
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert shares[99] < 0.01


@pytest.mark.parametrize(
    ("level_rate", "search"),
    [(0.0, True), (SHORT.level_rate, True), (SHORT.level_rate, False)],
    ids=["scales", "levels", "rounded to nearest"],
)
def test_training_brings_the_predictions_nearer(tmp_path, level_rate, search):
    checkpoint = with_outliers()
    training = Training(
        steps=SHORT.steps, tokens=512, batch_tokens=256, tokens_at_once=128, level_rate=level_rate, scale_rate=2e-3
    )
    quantize_awq(checkpoint, tmp_path / "before", AwqOptions(prompts=PROMPTS, search=search))
    quantize_awq(checkpoint, tmp_path / "after", AwqOptions(prompts=PROMPTS, search=search, training=training))
    # On the texts that it is trained on: what a random model learns from them says nothing of others.
    text = [token for prompt in PROMPTS for token in prompt["prompt_token_ids"]][:512]
    expected = logits(checkpoint, text=text).log_softmax(-1)
    before, after = (
        float(
            (expected.exp() * (expected - logits(open_checkpoint(tmp_path / name), text=text).log_softmax(-1)))
            .sum(-1)
            .mean()
        )
        for name in ("before", "after")
    )
    assert after < before
    old, new = tensors_of(tmp_path / "before"), tensors_of(tmp_path / "after")
    assert old.keys() == new.keys()
    changed = {name.rpartition(".")[2] for name in old if not torch.equal(old[name], new[name])}
    assert changed == ({"scales"} if level_rate == 0 else {"scales", "qweight"})


def test_some_texts_of_every_kind_are_held_out():
    windows = torch.arange(200)[:, None].expand(-1, 8)
    trained_on, held_out = split(windows)
    assert held_out[:, 0].tolist() == [0, 50, 100, 150]
    assert sorted([*trained_on[:, 0].tolist(), *held_out[:, 0].tolist()]) == list(range(200))
    assert [len(part) for part in split(windows[:49])] == [49, 0]
    assert split(torch.zeros(4000, 512))[1].numel() == HELD_OUT_TOKENS


def test_training_that_makes_held_out_predictions_worse_changes_nothing(tmp_path, capsys):
    wild = Training(steps=4, tokens=512, batch_tokens=64, tokens_at_once=64, level_rate=8.0, scale_rate=0.5)
    quantize_awq(with_outliers(), tmp_path / "before", AwqOptions(prompts=PROMPTS, window=8))
    options = AwqOptions(prompts=PROMPTS, window=8, training=wild)
    quantize_awq(with_outliers(), tmp_path / "after", options, show_progress=True)
    old, new = tensors_of(tmp_path / "before"), tensors_of(tmp_path / "after")
    assert all(torch.equal(old[name], new[name]) for name in old)
    last, least = re.findall(r"held out ([\d.]+), least ([\d.]+)", capsys.readouterr().err)[-1]
    assert float(least) < float(last)
