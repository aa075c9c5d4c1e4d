"""`refimpl quantize evaluate`: perplexity and KL divergence are what their formulas say, however the work is cut."""

import dataclasses
import json
import math

import pytest
import torch
from quantize_support import CPU, Changed
from tests_support import full_logits

from refimpl.bench.quantization import ACTIVATIONS, AWQ, FP8, FP8_NEAREST, NEAREST
from refimpl.bench.quantization import run as run_benchmark
from refimpl.bench.report_checkpoints import quantization_table
from refimpl.cli import main
from refimpl.errors import ConfigError
from refimpl.kernels import reference
from refimpl.loading.checkpoint import load_model
from refimpl.models.tiny import tiny
from refimpl.quantize import evaluate as module
from refimpl.quantize.awq import AwqOptions
from refimpl.quantize.evaluate import evaluate, evaluate_rounded_inputs
from refimpl.quantize.fp8 import quantize_fp8

SENTENCE = "The quick brown fox jumps over the lazy dog; it was not a lazy day for the fox."


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE)
    return path


def other():
    """A model that differs from tiny in one matrix."""
    weights = dict(tiny().weights())
    name = "model.layers.1.mlp.down_proj.weight"
    return Changed(tiny(), {name: weights[name] * 1.2})


def test_the_figures_are_those_of_the_formulas(text, monkeypatch):
    itself, found = evaluate([tiny(), other()], tiny(), text=text, window=32, dtype="float64")
    ids = tiny().tokenizer().encode(SENTENCE)
    models = [load_model(checkpoint, "auto", torch.float64, CPU, 0) for checkpoint in (other(), tiny())]
    losses, divergences, same = [], [], []
    for piece in (ids[start : start + 32] for start in range(0, len(ids), 32)):
        q, p = (full_logits(model, piece).log_softmax(-1)[:-1] for model in models)
        losses += [(-q[i, token].item(), -p[i, token].item()) for i, token in enumerate(piece[1:])]
        divergences += (p.exp() * (p - q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    assert found.tokens == len(losses) == len(ids) - 3
    assert found.perplexity == pytest.approx(math.exp(sum(q for q, _ in losses) / len(losses)))
    assert found.reference_perplexity == pytest.approx(math.exp(sum(p for _, p in losses) / len(losses)))
    assert found.kl_mean == pytest.approx(sum(divergences) / len(divergences))
    assert found.kl_p99 == pytest.approx(torch.tensor(divergences, dtype=torch.float64).quantile(0.99).item())
    assert found.same_top_token == pytest.approx(sum(same) / len(same))
    assert (itself.increase, itself.same_top_token, itself.model) == (0, 1, "tiny")
    assert itself.kl_mean == pytest.approx(0, abs=1e-12)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 5 * 320)
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 32)
    [cut] = evaluate([other()], tiny(), text=text, window=32, dtype="float64")
    assert cut.kl_mean == pytest.approx(found.kl_mean)
    assert cut.perplexity == pytest.approx(found.perplexity)


def test_fewer_tokens_are_the_beginning(text):
    [found] = evaluate(["tiny"], "tiny", text=text, tokens=20)
    assert found.tokens == 19


def test_the_text_that_comes_with_refimpl_is_long_enough():
    _, content = module._read(None)
    assert "ALICE'S ADVENTURES IN WONDERLAND" in content[:200]
    assert len(content.split()) > 25_000
    assert content.isascii()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"against": tiny(vocab_size=330)}, "different tokenizers"),
        ({"tokens": -4}, "tokens is -4"),
        ({"tokens": 1}, "the text has 1 tokens; it must have at least 2"),
        ({"window": 1}, "window is 1; it must be from 2 to 2048"),
        ({"window": 4096}, "window is 4096; it must be from 2 to 2048"),
    ],
)
def test_what_cannot_be_compared_is_refused(text, arguments, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(**{"models": ["tiny"], "against": "tiny", "text": text} | arguments)


def test_a_text_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"text cannot be read.*none\.txt"):
        evaluate(["tiny"], "tiny", text=tmp_path / "none.txt")


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``refimpl quantize …`` in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["refimpl", "quantize", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err

    return run


def test_quantise_and_evaluate_from_the_command_line(run, tmp_path, text):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(SENTENCE * 3) + "\n")
    code, out, err = run("awq", "tiny", "--out", tmp_path / "awq", "--prompts-file", prompts, "--window", 64)
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'awq'}: ")
    assert "bits a parameter" in out
    code, out, err = run("evaluate", tmp_path / "awq", "--against", "tiny", "--text", text, "--json")
    assert (code, err) == (0, "")
    [figures] = json.loads(out)
    assert 0 < figures["kl_mean"] < 1
    assert figures["against"] == "tiny"
    code, out, err = run("fp8", "tiny", "--out", tmp_path / "fp8")
    assert code == 0
    code, out, err = run("evaluate", tmp_path / "fp8", "--against", "tiny", "--text", text)
    assert code == 0
    assert "\n| fp8 |" in out
    assert "KL divergence" in out


def test_mistakes_on_the_command_line_are_told_in_a_sentence(run, tmp_path):
    code, out, err = run("awq", "tiny", "--out", tmp_path / "awq", "--group-size", 128)
    assert (code, out) == (2, "")
    assert "64 or 32 divides them all" in err
    code, out, err = run("awq", "tiny")
    assert code == 2
    assert "--out" in err


def test_rounded_inputs_are_what_fp8_costs_beside_its_weights(text, tmp_path):
    """With weights that e4m3 holds, FP8 costs that and nothing else."""
    weights = {name: tensor for name, tensor in tiny().weights() if "_proj" in name}
    rounded = {name: reference.quantise(tensor) for name, tensor in weights.items()}
    model = Changed(tiny(), {name: values.float() * scales.unsqueeze(1) for name, (values, scales) in rounded.items()})
    quantize_fp8(model, tmp_path / "fp8")
    [whole] = evaluate([tmp_path / "fp8"], model, text=text, tokens=60)
    alone = evaluate_rounded_inputs(model, text=text, tokens=60)
    assert 0 < alone.kl_mean == pytest.approx(whole.kl_mean, rel=0.05)  # the rest is in 16 bits there


# ---------------------------------------------------------------------- the benchmark


def test_the_benchmark_quantises_and_compares(text):
    options = AwqOptions(calibration_tokens=1024)
    result = run_benchmark("tiny", options, text, tokens=60)
    assert set(result.results) == {"perplexity", "text_seconds", NEAREST, AWQ, FP8_NEAREST, ACTIVATIONS}
    assert result.results[FP8_NEAREST]["kl_mean"] < result.results[AWQ]["kl_mean"] < result.results[NEAREST]["kl_mean"]
    assert {check.name for check in result.checks} == {
        "awq_perplexity_increase", "awq_share_of_rounding_to_nearest", "fp8_perplexity_increase_by_weights"
    }  # fmt: skip
    table = quantization_table(json.loads(json.dumps(dataclasses.asdict(result))))
    assert f"\n| {AWQ} | " in table
    assert "59 tokens of text.txt" in table
    assert (
        "Groups of 64; AWQ calibrated on 1,024 tokens that the model wrote; training: none. Writing these texts took "
        in table
    )


def test_the_benchmark_trains_in_the_groups_that_are_asked_for(text, tmp_path, monkeypatch, capsys):
    asked = [
        "quantization",
        "--model",
        "tiny",
        "--text",
        text,
        "--tokens",
        60,
        "--group-size",
        32,
        "--calibration-tokens",
        256,
    ]
    asked += ["--train-steps", 2, "--train-tokens", 1024, "--device", "cpu", "--json", "--save", tmp_path]
    monkeypatch.setattr("sys.argv", ["refimpl", "bench", *map(str, asked)])
    with pytest.raises(SystemExit):  # tiny's random weights keep no bounds
        main()
    result = json.loads(capsys.readouterr().out)
    setting = result["setting"]
    assert (setting["group_size"], setting["training"]) == (32, "2 steps on 1,024 tokens that it wrote")
    assert "--group-size 32 --calibration-tokens 256 --train-steps 2 --train-tokens 1024" in setting["command"]
    assert list(result["results"])[2:] == [NEAREST, AWQ, FP8_NEAREST, FP8, ACTIVATIONS]
    by_weights = result["results"][FP8]["perplexity"] / result["results"][ACTIVATIONS]["perplexity"] - 1
    assert result["checks"][2]["value"] == pytest.approx(by_weights)
    for name in (NEAREST, AWQ):
        row = result["results"][name]
        assert row["bits_per_parameter"] == pytest.approx(8e6 * row["megabytes"] / tiny().config.num_parameters)
    assert result["results"][NEAREST]["megabytes"] == result["results"][AWQ]["megabytes"]
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*.json")] == ["quantization"]
    assert "training: 2 steps on 1,024 tokens that it wrote. Writing" in quantization_table(result)
