"""The benchmark of speculation, on tiny models: rows, figures that belong together, checks, and tables."""

import pytest

from refimpl.bench import report, rounds, speculation
from refimpl.bench.model_clock import models_timed
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.executor.check_graphs import CheckGraphs
from refimpl.loading.hf_config import write_config
from refimpl.models.tiny import tiny
from refimpl.speculative.law import speedup
from refimpl.speculative.lengths import FixedLength


@pytest.fixture(scope="module")
def engine():
    config = {"method": "draft_model", "model": tiny(vocab_size=24), "num_speculative_tokens": 3}
    options = {"model": tiny(vocab_size=24), "speculative_config": config, "enable_prefix_caching": False}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("refimpl.executor.round_costs.ROUNDS", 1)
        made = Engine(EngineArgs.from_options(options | {"max_num_seqs": 2, "max_model_len": 96, "dtype": "float64"}))
    yield made
    made.close()


REQUESTS = [([1, 2, 3, 4 + i], 20) for i in range(4)]


def test_figures_of_rounds_belong_together(engine):
    figures = rounds.climb(engine, REQUESTS, 2, [1, 3], 1)
    assert list(figures["rungs"]) == ["1", "3", rounds.ADAPTIVE]
    for K in (1, 3):
        rung = figures["rungs"][str(K)]
        assert rung["acceptance"] == [1.0] * K, "the draft is the target"
        assert rung["drafted_share"] > 0.8
        # the last rounds of a request draft less, or nothing
        assert 0.8 * (K + 1) < rung["tokens_a_round"] <= K + 1
        whole = speedup(1.0, K, rung["c"], rung["v"])
        assert rung["drafted_share"] * min(1, whole) <= rung["predicted"] <= max(1, whole)
        assert figures["same_tokens"][str(K)] == 1
    chosen = figures["rungs"][rounds.ADAPTIVE]["chosen"]
    assert sum(chosen.values()) == pytest.approx(1)
    assert figures["best"] in (0, 1, 3)


def test_what_a_request_drafts_can_be_counted_and_the_length_is_put_back(engine):
    before = engine.scheduler.drafting.length
    answered = rounds.answer(engine, REQUESTS[:1], 1, FixedLength(2))
    assert engine.scheduler.drafting.length is before
    assert answered.tokens == 19
    assert answered.counted.accepted == answered.counted.drafted
    assert (answered.counted.rounds, answered.counted.rows) == (6, 7), "3 tokens each, and the last token needs no draft"
    assert rounds.answer(engine, REQUESTS[:1], 1, None).counted is None


def test_the_clock_times_the_models_calls_and_recorded_checks_too(engine, monkeypatch):
    runner = rounds.runner_of(engine)
    monkeypatch.setattr(runner, "check_graphs", object.__new__(CheckGraphs))  # as a GPU has them
    with models_timed(runner) as clock:
        assert set(vars(runner.check_graphs)) == {"replay"}
        assert clock.seconds() == 0
        rounds.answer(engine, REQUESTS[:1], 1, None)
        assert clock.seconds() > 0
    assert not vars(runner.check_graphs)


@pytest.fixture
def shape(monkeypatch, tmp_path):
    """Rows of a tiny shape with a tiny draft."""
    write_config(tiny(vocab_size=300).config, tmp_path)
    monkeypatch.setattr(speculation, "DRAFTS", {"1b": str(tmp_path), "8b": str(tmp_path)})
    monkeypatch.setattr(speculation, "SHAPE_PROMPT", 16)
    monkeypatch.setattr("refimpl.executor.round_costs.ROUNDS", 1)
    monkeypatch.setattr("refimpl.executor.round_costs.CONTEXT", 8)
    return str(tmp_path)


def test_rows_of_a_shape_say_everywhere_that_acceptance_is_synthetic(shape, caplog):
    options = {"dtype": "float32", "num_gpu_blocks_override": 200, "max_num_batched_tokens": 512}
    result = speculation.run(options, shape, ["draft_1b", "adaptive_1b"], 1, (2,), 0.5, scale=0.1, most_drafts=2)
    assert list(result.results) == ["draft_1b", "adaptive_1b"]
    assert result.setting["synthetic_acceptance"] == [0.5, 0.4, 0.75]
    assert any("what comes out means nothing" in record.message for record in caplog.records)
    draft = result.results["draft_1b"]
    assert draft["synthetic_acceptance"] == 0.5
    assert 0 <= draft["outside_models"] < 1
    accepted = [rung["acceptance"][0] for rung in draft["rungs"].values() if "acceptance" in rung]
    assert min(accepted) < 1, "by chance, though the draft is the target"
    adaptive = result.results["adaptive_1b"]["rates"]
    assert {rate: list(found["batches"]) for rate, found in adaptive.items()} == {"0.4": ["2"], "0.75": ["2"]}
    names = {check.name for check in result.checks}
    assert {"draft_1b", "draft_1b_of_prediction", "draft_1b_outside_models", "adaptive_1b_40", "adaptive_1b_75"} <= names
    table = report.TABLES["speculation_shape"]({"setting": result.setting, "results": result.results})
    assert "SYNTHETIC ACCEPTANCE" in table
    assert "| draft_1b | 1 | 1 |" in table


def test_several_batch_sizes_show_from_which_on_nothing_pays(shape):
    options = {"dtype": "float32", "num_gpu_blocks_override": 200, "max_num_batched_tokens": 512}
    result = speculation.run(options, shape, ["adaptive_8b"], 1, (1, 2), scale=0.1, rates=(0.25,), most_drafts=2)
    assert result.topic == "speculation_crossing"
    [(rate, found)] = result.results["adaptive_8b"]["rates"].items()
    assert (rate, list(found["batches"])) == ("0.25", ["1", "2"])
    found["crossing"] = {"chosen": 2.0, "measured": 1.5}
    table = report.TABLES["speculation_crossing"]({"setting": result.setting, "results": result.results})
    assert "| adaptive_8b, 25% accepted: batch | 1 | 2 | adaptive | without, tokens/s |" in table
    assert "from a batch of 2 on as the engine reckons, of 1.5 as measured" in table


def test_the_copying_prompts_are_five_of_each_task():
    prompts = speculation.copying_prompts()
    assert [one["task"] for one in prompts] == ["repeat"] * 5 + ["rename"] * 5
    assert all(len(one["prompt"]) > 900 for one in prompts)


def test_what_is_out_of_range_is_refused():
    for wrong in ({"repeats": 0}, {"scale": 0}, {"acceptance": 2}, {"batch_sizes": [0]}, {"rates": [1.5]}, {"rates": []}):
        with pytest.raises(ConfigError, match="must be 1 or more"):
            speculation.run({"model": "tiny"}, **wrong)
    with pytest.raises(ConfigError, match="rows are draft_8b; there are ngram, drafter"):
        speculation.run({"model": "tiny"}, rows=["draft_8b"])
    with pytest.raises(ConfigError, match="the benchmark's own"):
        speculation.run({"model": "tiny", "speculative_config": {"method": "ngram"}})
