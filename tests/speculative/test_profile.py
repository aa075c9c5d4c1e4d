"""refimpl speculate profile: figures for each number of drafts and batch size, doubts, and what to set."""

import json
import sys

import pytest

from refimpl.cli import main
from refimpl.errors import ConfigError
from refimpl.models.tiny import tiny
from refimpl.speculate.profile import doubts, recommend, run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("refimpl.executor.round_costs.ROUNDS", 1)


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["refimpl", "speculate", "profile", "--model", "tiny", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


def test_the_command_profiles_n_grams_of_a_file(monkeypatch, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"abcabcabcabc"\n{"prompt_token_ids": [1, 2, 1, 2, 1, 2, 1]}\n')
    options = [
        "--prompts-file",
        prompts,
        "--num-speculative-tokens",
        2,
        "--max-tokens",
        12,
        "--repeats",
        1,
        "--batch-sizes",
        2,
    ]
    code, out, _ = command(monkeypatch, capsys, *options, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["method"], found["synthetic_acceptance"]) == ("ngram", None)
    [batch] = found["batches"]
    assert (batch["batch_size"], batch["requests"], batch["output_tokens"]) == (2, 2, 24)
    assert list(batch["rungs"]) == ["1", "2", "adaptive"]
    code, out, _ = command(monkeypatch, capsys, *options)
    assert code == 0
    assert "tiny, ngram, batch 2" in out
    assert "accepted by position" in out
    assert "batch 2: " in out.splitlines()[-1]


def test_any_drafter_at_any_temperature_and_synthetic_acceptance_is_marked(capsys):
    from refimpl.speculate.profile import tell

    draft = {"method": "draft_model", "model": tiny(vocab_size=24), "num_speculative_tokens": 1}
    options = {"model": tiny(vocab_size=24), "max_num_batched_tokens": 256, "num_gpu_blocks_override": 40}
    asked = {"max_tokens": 6, "repeats": 1, "temperature": 0.7}
    found = run(options | {"speculative_config": draft}, [{"prompt_token_ids": [1, 2, 3]}], **asked)
    assert found["batches"][0]["rungs"]["1"]["acceptance"] == [1.0], "the draft is the target"
    synthetic = options | {"speculative_config": draft | {"synthetic_acceptance": 0.0}}
    found = run(synthetic, [{"prompt_token_ids": [1, 2, 3]}], **asked)
    assert found["batches"][0]["rungs"]["1"]["acceptance"] == [0.0]
    tell(found)
    assert "SYNTHETIC" in capsys.readouterr().out


def batch(best, **rungs):
    named = {
        name.strip("k"): {"measured": measured, "predicted": predicted} for name, (measured, predicted) in rungs.items()
    }
    return {"batch_size": 4, "best": best, "rungs": named | {"adaptive": {"measured": 1.1}}}


def test_what_is_recommended_was_measured_and_what_parts_from_the_prediction_is_said():
    good = batch(3, k1=(1.2, 1.25), k3=(1.5, 1.6))
    assert recommend(good).startswith("batch 4: num_speculative_tokens = 3, 1.50 times")
    assert doubts(good) == []
    assert "no speculation" in recommend(batch(0, k1=(0.9, 1.3)))
    assert "no speculation" in recommend(batch(1, k1=(1.02, 1.0)))
    [line] = doubts(batch(0, k1=(0.9, 1.3)))
    assert line.startswith("batch 4, 1 drafts: 69% of the prediction; something beside")
    [line] = doubts(batch(1, k1=(1.5, 1.0)))
    assert "was" in line or "were measured while" in line


def test_what_is_out_of_range_is_refused(monkeypatch, capsys, tmp_path):
    for wrong in ({"repeats": 0}, {"max_tokens": 1}, {"batch_sizes": []}, {"temperature": -1}):
        with pytest.raises(ConfigError, match="must be 1, 2, 1 and 0 or more"):
            run({"model": "tiny"}, **wrong)
    for options in (["--workload", "poems"], ["--batch-sizes", "1,x"], ["--prompts-file", tmp_path / "none"]):
        code, out, err = command(monkeypatch, capsys, *options)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
