"""AWQ's searches: folding changes nothing, each search loses less than rounding does, statistics are the model's own."""

import dataclasses

import pytest
import torch
from family_models import variant
from quantize_support import CPU, PROMPTS, TEXT, Changed, distance, logits, with_outliers
from tests_support import full_logits

from refimpl.layers.linear import Linear
from refimpl.loading.checkpoint import load_model
from refimpl.loading.in_memory import TransformersCheckpoint
from refimpl.models.tiny import tiny
from refimpl.quantization.awq_layout import quantise_groups
from refimpl.quantize import steps
from refimpl.quantize.awq import representable
from refimpl.quantize.calibration import (
    GPU_CACHE_BYTES,
    GPU_TEXTS_AT_ONCE,
    TEXTS_AT_ONCE,
    calibration_windows,
    texts_at_once,
)
from refimpl.quantize.feedback import rounded_in_turn
from refimpl.quantize.groups import Group, fold, groups_of
from refimpl.quantize.layerwise import LayerByLayer
from refimpl.quantize.refine import DAMPING, Levels, damping_for, refine
from refimpl.quantize.search import Statistics, channel_scales, clip, output_error, rounded, search_scales
from refimpl.quantize.source import Source
from refimpl.quantize.steps import fitted_scales


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outlying_inputs(channels=64, tokens=512, seed=1):
    """Activations of which some channels are large, and some go together."""
    x = random(tokens, channels, seed=seed)
    x[:, 3::17] *= 20
    return x + 2 * random(tokens, 1, seed=seed + 1)


def seen(x):
    statistics = Statistics.empty(x.shape[1], CPU)
    for part in x.split(100):
        statistics.add(part)
    return statistics


CHECKPOINTS = {
    "llama": tiny,
    "own values for each head": lambda: tiny(num_key_value_heads=4),
    "three heads that share values": lambda: tiny(num_attention_heads=6, num_key_value_heads=2),
    "with biases": lambda: TransformersCheckpoint(variant("llama-biases", torch.float64)),
    "with norms of heads": lambda: TransformersCheckpoint(variant("qwen3", torch.float64)),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_folded_scales_change_nothing(name):
    checkpoint = CHECKPOINTS[name]()
    config, weights = checkpoint.config, {name: tensor.clone() for name, tensor in checkpoint.weights()}
    for number in range(config.num_hidden_layers):
        start = f"model.layers.{number}."
        layer = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
        for seed, group in enumerate(groups_of(config)):
            channels = len(layer[f"{group.before}.weight"])
            fold(layer, group, random(channels, seed=seed).double().exp())
    before, after = logits(checkpoint), logits(Changed(checkpoint, weights))
    assert (
        distance(
            weights["model.layers.1.mlp.up_proj.weight"], dict(checkpoint.weights())["model.layers.1.mlp.up_proj.weight"]
        )
        > 0.1
    )
    assert distance(after, before) < 1e-12


def test_biases_are_folded_too():
    up, down = random(8, 4), random(4, 8)
    layer = {"up.weight": up.clone(), "up.bias": random(8, seed=1), "down.weight": down.clone()}
    x, scales = random(5, 4, seed=2), random(8, seed=3).exp()
    expected = (x @ up.T + layer["up.bias"]) @ down.T
    fold(layer, Group(("down",), "up"), scales)
    torch.testing.assert_close((x @ layer["up.weight"].T + layer["up.bias"]) @ layer["down.weight"].T, expected)


def test_heads_that_share_values_share_scales():
    group = Group(("o",), "v", heads=2, repeats=3)
    inputs = torch.arange(24.0)
    assert group.gathered(inputs).tolist() == [4.0, 5.0, 6.0, 7.0, 16.0, 17.0, 18.0, 19.0]
    assert group.spread(torch.arange(8.0)).tolist() == [*[0, 1, 2, 3] * 3, *[4, 5, 6, 7] * 3]


def test_scales_of_a_norm_lose_nothing_in_sixteen_bits():
    weight, scales = random(64), random(64, seed=1).exp()
    weight[5] = 0
    group = Group(("mlp.gate_proj",), "input_layernorm")
    exact = representable({"input_layernorm.weight": weight}, group, scales, torch.float16)
    divided = weight / exact
    torch.testing.assert_close(divided.half().float(), divided, rtol=1e-6, atol=0)
    torch.testing.assert_close(exact[weight != 0], scales[weight != 0], rtol=1e-3, atol=0)
    assert exact[5] == 1


@pytest.mark.parametrize("size", [32, 64])
def test_rounding_is_that_of_the_checkpoint(size):
    weight = random(24, 64) * torch.logspace(-9, 4, 24).unsqueeze(1)
    weight[3, :32], weight[4], weight[5] = 0, weight[4].abs(), -weight[5].abs()
    values, zeros, scales = quantise_groups(weight, size)
    expected = (values.float() - zeros.float().repeat_interleave(size, 0)) * scales.float().repeat_interleave(size, 0)
    assert torch.equal(rounded(weight, size), expected.T)


def test_exponent_zero_is_rounding_to_nearest():
    weight, statistics = random(48, 64), seen(outlying_inputs())
    assert torch.equal(channel_scales(statistics.mean_absolute, 0.0), torch.ones(64))
    chosen = search_scales(Group(("q",), "n"), [weight], statistics, 32, alphas=(0.0,))
    assert (chosen.alpha, chosen.error) == (0.0, 1.0)


def test_large_activations_get_larger_scales_and_smaller_errors():
    weights, x = [random(48, 64), random(16, 64, seed=9)], outlying_inputs()
    statistics = seen(x)
    chosen = search_scales(Group(("q", "k"), "n"), weights, statistics, 32)
    assert 0 < chosen.alpha < 1
    assert chosen.scales[3::17].min() > chosen.scales.median() > 0
    assert chosen.error < 0.7

    def measured(scales):
        return sum(((rounded(w * scales, 32) / scales - w) @ x.T).square().sum() for w in weights)

    share = measured(chosen.scales) / measured(torch.ones(64))
    torch.testing.assert_close(float(share), chosen.error, rtol=1e-3, atol=0)


def test_clipping_lessens_the_error_of_the_outputs():
    weight, statistics = random(48, 64), seen(outlying_inputs())
    weight[:, 10] *= 4
    gram = statistics.scaled(torch.ones(64))
    clipped = clip(weight, gram, 32)
    low, high = (weight.view(48, 2, 32).amin(-1), weight.view(48, 2, 32).amax(-1))
    groups = clipped.view(48, 2, 32)
    assert (groups.amin(-1) >= low).all()
    assert (groups.amax(-1) <= high).all()
    assert (clipped != weight).any()
    errors = [output_error(rounded(w, 32) - weight, gram) for w in (weight, clipped)]
    assert errors[1] < 0.9 * errors[0]


def test_refined_levels_lessen_the_error_further_and_stay_levels():
    weight, gram = random(48, 64), seen(outlying_inputs()).scaled(torch.ones(64))
    nearest = Levels(*quantise_groups(weight, 32))
    once, thrice, fitted = (refine(weight, nearest, gram, sweeps, fits) for sweeps, fits in ((1, 0), (3, 0), (3, 2)))
    errors = [output_error(levels.widened() - weight, gram) for levels in (nearest, once, thrice, fitted)]
    assert errors[3] < errors[2] < errors[1] < 0.9 * errors[0]
    for levels in (thrice, fitted):
        assert levels.values.dtype == torch.uint8
        assert int(levels.values.max()) <= 15
        assert torch.equal(levels.zeros, nearest.zeros)
        assert levels.scales.dtype == torch.float16
    assert torch.equal(thrice.scales, nearest.scales)


def test_rounding_in_turn_mends_what_was_rounded_before():
    weight, gram = random(48, 64), seen(outlying_inputs()).scaled(torch.ones(64))
    nearest = Levels(*quantise_groups(weight, 32))
    steps, zeros = (x.float().repeat_interleave(32, 0) for x in (nearest.scales, nearest.zeros))
    alone = rounded_in_turn(weight, steps, zeros, torch.eye(64))
    assert torch.equal(alone, nearest.values), "what goes together with nothing is not mended"
    found = Levels(rounded_in_turn(weight, steps, zeros, gram), nearest.zeros, nearest.scales)
    errors = [output_error(levels.widened() - weight, gram) for levels in (nearest, found)]
    assert errors[1] < 0.8 * errors[0]


def test_errors_are_mended_as_by_solving_for_the_channels_that_are_left():
    weight, gram = random(5, 80), seen(outlying_inputs(80, seed=7)).scaled(torch.ones(80)).double()
    weight, steps, zeros = weight.double(), torch.full((80, 5), 0.3).double(), torch.full((80, 5), 8.0).double()
    left, wanted, expected = gram.diagonal().argsort(descending=True), weight.T.clone(), torch.empty(80, 5).double()
    while len(left):
        channel, left = left[0], left[1:]
        level = (wanted[channel] / 0.3).round().clamp(-8, 7)
        expected[channel] = level + 8
        error = wanted[channel] - level * 0.3
        wanted[left] += torch.linalg.solve(gram[left][:, left], gram[left, channel].unsqueeze(1)) * error
    assert torch.equal(rounded_in_turn(weight, steps, zeros, gram).double(), expected)


def test_few_tokens_are_believed_less():
    assert damping_for(64, 10**9) == pytest.approx(DAMPING, rel=1e-4)
    weight, x = random(48, 64), outlying_inputs(tokens=4096)
    truth, few = seen(x).scaled(torch.ones(64)), seen(x[:32]).scaled(torch.ones(64))
    nearest = Levels(*quantise_groups(weight, 32))
    found = [refine(weight, nearest, few, damping=damping) for damping in (0.01, damping_for(64, 32))]
    errors = [output_error(levels.widened() - weight, truth) for levels in found]
    assert errors[1] < 0.7 * errors[0]


def test_scales_that_were_lost_are_found_again(monkeypatch):
    weight, gram = random(48, 64), seen(outlying_inputs()).scaled(torch.ones(64))
    true = Levels(*quantise_groups(weight, 32))
    signed = true.values.float() - true.zeros.float().repeat_interleave(32, 0)
    found = fitted_scales(true.widened(), signed, true.scales * 1.25, gram)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, true.scales, rtol=2e-3, atol=0)
    monkeypatch.setattr(steps, "NUMBERS_AT_ONCE", 5 * len(true.scales) ** 2)  # rows in fives, and a rest
    torch.testing.assert_close(fitted_scales(true.widened(), signed, true.scales * 1.25, gram), found)


def test_a_group_of_zeros_keeps_its_scale():
    weight = random(8, 64)
    weight[2, :32] = 0
    levels = Levels(*quantise_groups(weight, 32))
    signed = levels.values.float() - levels.zeros.float().repeat_interleave(32, 0)
    found = fitted_scales(weight, signed, levels.scales, torch.eye(64))
    assert found.isfinite().all()
    assert found[0, 2] == levels.scales[0, 2]


def test_refined_levels_are_where_no_single_weight_can_gain():
    weight, gram = random(6, 32), seen(outlying_inputs(32)).scaled(torch.ones(32))
    found = refine(weight, Levels(*quantise_groups(weight, 32)), gram, sweeps=50)
    damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(32)
    error = ((found.widened() - weight) @ damped * (found.widened() - weight)).sum(1)
    for channel in range(32):
        for step in (-1, 1):
            moved = found.values.clone().int()
            moved[channel] = (moved[channel] + step).clamp(0, 15)
            difference = Levels(moved, found.zeros, found.scales).widened() - weight
            assert (((difference @ damped) * difference).sum(1) >= error * (1 - 1e-4)).all()


def test_channels_that_do_not_go_together_stay_at_the_nearest_level():
    weight = random(8, 64)
    nearest = Levels(*quantise_groups(weight, 32))
    assert torch.equal(refine(weight, nearest, torch.eye(64), fits=0).values, nearest.values)


def test_nothing_to_gain_leaves_the_weights_alone():
    weight = (torch.arange(16.0) - 8).repeat(4, 4)  # lies on the 16 levels
    assert torch.equal(clip(weight, torch.eye(64), 16), weight)


@pytest.mark.parametrize("family", [None, "qwen3-biases-window"])
def test_a_layer_at_a_time_sees_what_the_whole_model_sees(family):
    checkpoint = with_outliers(num_attention_heads=6) if family is None else TransformersCheckpoint(variant(family))
    windows = calibration_windows(checkpoint, PROMPTS, 512, 96, 0)
    model = load_model(checkpoint, "auto", torch.float32, CPU, 0)
    expected = []
    for module in (module for module in model.modules() if isinstance(module, Linear) and module is not model.lm_head):
        expected.append([])
        module.register_forward_pre_hook(lambda _, inputs, rows=expected[-1]: rows.append(inputs[0]))
    with torch.inference_mode():
        for window in windows.tolist():
            full_logits(model, window)
        layers = LayerByLayer(Source(checkpoint), windows, CPU)
        found = [statistics for _ in model.layers for statistics in layers.advance()]
    assert len(found) == len(expected) == 4 * checkpoint.config.num_hidden_layers
    for statistics, rows in zip(found, expected, strict=True):
        x = torch.cat(rows)
        assert statistics.tokens == len(x) == windows.numel()
        assert distance(statistics.gram, x.T @ x) < 1e-4
        assert distance(statistics.mean_absolute, x.abs().mean(0)) < 1e-4


def test_the_model_writes_what_it_is_calibrated_on():
    windows = calibration_windows(tiny(), None, 80, 32, seed=3)
    assert windows.shape == (2, 32)
    assert torch.equal(windows, calibration_windows(tiny(), None, 80, 32, seed=3))
    assert not torch.equal(windows, calibration_windows(tiny(), None, 80, 32, seed=4))


def test_half_of_what_it_writes_are_chats_and_half_begin_anywhere():
    windows = calibration_windows(tiny(), None, 256, 32, seed=3)
    half = windows.flatten()[128:].view(4, 32)
    assert len({row[0].item() for row in half}) > 1, "each begins with a token of its own"
    more = calibration_windows(tiny(), None, 512, 32, seed=3)
    assert torch.equal(more.flatten()[256:384], half.flatten()), "texts are the same however many are written"


def test_a_gpu_writes_more_texts_at_once_as_far_as_their_keys_and_values_stay_small():
    config = tiny().config
    assert texts_at_once(config, 512, on_gpu=False) == TEXTS_AT_ONCE
    assert texts_at_once(config, 512, on_gpu=True) == GPU_TEXTS_AT_ONCE
    large = dataclasses.replace(config, num_hidden_layers=80, num_key_value_heads=8, head_dim=128)
    assert texts_at_once(large, 512, on_gpu=True) == TEXTS_AT_ONCE
    assert texts_at_once(large, 128, on_gpu=True) == GPU_CACHE_BYTES // (128 * 327_680)


def test_text_is_written_under_one_bar(capsys):
    calibration_windows(tiny(), None, 256, 32, seed=3, show_progress=True)
    bars = capsys.readouterr().err
    assert "calibration text: 100%" in bars
    assert bars.count("\n") == 1


def test_prompts_are_cut_into_windows():
    windows = calibration_windows(tiny(), ["Hello", {"prompt": " there"}, {"prompt_token_ids": TEXT[:9]}], 16, 5, 0)
    assert windows.tolist() == [list(b"Hello"), list(b" ther"), [ord("e"), *TEXT[:4]]]
