"""The form of benchmark results, and that the README's tables are the kept results."""

import json
from pathlib import Path

import pytest

from refimpl.bench import report, scheduler, sharing
from refimpl.bench.flops import flop_counter
from refimpl.bench.recompute import run
from refimpl.bench.result import check

README = Path(__file__).parent.parent / "README.md"
DEFAULTS = {"model": "tiny", "dtype": "float64"}


def test_the_readme_shows_the_kept_results():
    text = README.read_text(encoding="utf-8")
    assert "<!-- bench:recompute -->" in text
    assert report.render(text) == text, "run refimpl bench report"


def test_every_kept_result_has_its_form_and_passes_its_checks():
    results = [result for topic in report.newest_results().values() for result in topic]
    assert results
    for result in results:
        assert {"topic", "setting", "results", "checks"} == set(result)
        assert {"hardware", "versions", "date", "command", "model_hash", "workload_hash"} <= set(result["setting"])
        assert result["checks"]
        assert all(check["ok"] for check in result["checks"])


def test_recompute_counts_what_the_formula_says_and_draws_the_same_tokens():
    result = run(DEFAULTS, context=40, steps=3, repeats=2)
    sides = result.results
    assert sides["cached"]["token_ids"] == sides["recomputed"]["token_ids"]
    assert sides["cached"]["flops_per_step"] == sides["cached"]["flops_per_step_by_formula"]
    assert 20 < result.results["flops_ratio"] < 44
    assert result.setting["tokens_produced"] == 3 * (2 * 2 + 2)
    json.dumps(result.results)


def test_the_counter_knows_packed_products_and_attention():
    import torch

    from refimpl.layers.linear import Linear

    linear = Linear(16, 32, torch.float32, torch.device("cpu"))
    linear.weight.data.normal_()
    for pack in (False, True):
        if pack:
            linear.pack()
        with torch.inference_mode(), flop_counter() as counter:
            linear(torch.randn(5, 16))
        assert counter.get_total_flops() == 2 * 5 * 16 * 32, f"{pack = }"
    q, kv = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with torch.inference_mode(), flop_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(q, kv, kv)
    assert counter.get_total_flops() == 4 * 2 * 4 * 6 * 8


def test_a_check_says_its_bound():
    assert check("x", 3.0, ">=", 2).ok
    assert not check("x", 3.0, "<=", 2).ok
    assert check("x", 3.0, "<=", 2).bound == "<= 2"


@pytest.mark.parametrize("text", ["<!-- bench:nothing -->\n<!-- /bench -->"])
def test_an_unknown_topic_is_an_error(text):
    with pytest.raises(Exception, match="no result file or no table"):
        report.render(text)


def test_the_scheduler_benchmark_measures_full_batches_without_a_model():
    result = scheduler.run(num_sequences=8, steps=20)
    assert result.results["events off"]["steps"] == 20
    assert {check.name for check in result.checks} >= {"schedule_update_ms_256", "queue_length_ratio"}
    assert all(figures["median_ms"] > 0 for figures in result.results.values())


def test_the_sharing_benchmark_counts_blocks_and_computed_tokens():
    figures = sharing.run({"model": "tiny", "dtype": "float32", "max_num_seqs": 8}, repeats=1).results
    assert (figures["shared_blocks"], figures["own_blocks"], figures["copied_blocks"]) == (62, 4, 3)
    assert figures["computed_tokens"] == 62
