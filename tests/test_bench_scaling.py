"""The benchmark of ranks beside each other: what fits, what is planned, what figures mean, and all of it on the CPU."""

import json
import time
from contextlib import closing
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from refimpl.bench import report, scaling
from refimpl.bench import scaling_plan as plan
from refimpl.bench.commands import bench
from refimpl.bench.offline import requests_of
from refimpl.bench.rounds import Answered, CountedLength
from refimpl.bench.rows import DoesNotFit
from refimpl.bench.scaling_process import MeasuringProcess, summary
from refimpl.bench.sides import Run
from refimpl.errors import ConfigError
from refimpl.loading.hf_config import write_config
from refimpl.models.tiny import tiny
from refimpl.simulate.models import LLAMA_3_70B
from refimpl.speculative.lengths import FixedLength

H200 = plan.Machine("NVIDIA H200", 8, 150_109_880_320, 4.59e12)
CPU = plan.Machine("cpu", 0, 0, 1e10)


def test_ranks_fit_where_there_are_gpus_and_room_for_the_weights():
    def why(ranks, method, machine=H200):
        return plan.why_not(LLAMA_3_70B, ranks, method, machine, 0.9)

    assert why(1, "none") == "141.1 GB of weights a rank, and a GPU has 135.1 GB for an engine"
    assert [why(2, "none"), why(1, "fp8"), why(1, "awq"), why(8, "fp8")] == [None] * 4
    assert why(16, "fp8") == "16 ranks need as many GPUs, and there are 8 here"
    assert "it can be 1, 2, 4" in why(3, "fp8")
    assert why(1, "none", CPU) is None, "processes share the host's memory, which their engines look at"


def test_rows_of_an_engine_come_together_and_drafts_run_on_the_most_ranks():
    fitting = [(1, "fp8"), (2, "none"), (2, "fp8")]
    rows = [row.name for row in plan.plan(fitting, ("decode-1", "mixed-128"), tuple(plan.VARIANTS), on_gpus=True)]
    assert rows == [
        "tp1-fp8-decode-1", "tp1-fp8-mixed-128", "tp1-fp8-eager-decode-1",
        "tp2-none-decode-1", "tp2-none-mixed-128", "tp2-none-eager-decode-1", "tp2-none-one_shot-decode-1",
        "tp2-none-two_shot-decode-1", "tp2-none-draft-decode-1",
        "tp2-fp8-decode-1", "tp2-fp8-mixed-128", "tp2-fp8-eager-decode-1", "tp2-fp8-one_shot-decode-1",
        "tp2-fp8-two_shot-decode-1", "tp2-fp8-draft-decode-1",
    ]  # fmt: skip
    on_cpu = plan.plan(fitting, ("decode-1",), tuple(plan.VARIANTS), on_gpus=False)
    assert {row.variant for row in on_cpu} == {plan.DEFAULT, plan.DRAFT}


def test_efficiency_and_the_read_floor_are_ratios():
    assert plan.efficiency(6_000, 8, 1_000, 1) == 0.75
    assert plan.efficiency(6_000, 8, 2_000, 2) == 0.75
    assert plan.share_of_floor(9.18e9, 4.59e12, 4e-3) == pytest.approx(0.5)
    assert plan.sums_in_a_step(LLAMA_3_70B) == 161
    assert [plan.batch_of(name) for name in ("decode-64", "mixed-128")] == [64, None]
    assert [H200.hardware, CPU.hardware, replace(H200, name="Some card").hardware] == ["h200", "cpu", None]


def test_a_prediction_is_the_simulators_for_as_many_devices():
    asked = requests_of("decode-1")
    one, eight = (
        plan.predict({}, "llama-3-70b", "h200", plan.Row(n, "fp8", plan.DEFAULT, "decode-1"), 1_000, asked) for n in (1, 8)
    )
    assert 1 < eight["output_tokens_per_second"] / one["output_tokens_per_second"] < 8
    assert 1 / one["itl_p50"] == pytest.approx(one["output_tokens_per_second"], rel=0.05)


def test_saturated_requests_have_a_thousand_tokens_each_way():
    requests = requests_of("saturated-3")
    assert [(len(prompt), output) for prompt, output in requests] == [(1_000, 1_000)] * 3
    assert requests[0][0][0] != requests[1][0][0]


def test_drafts_bring_several_tokens_of_a_step():
    requests = [([1], 5), ([2], 5)]
    run_of_two = Run(0.1, 1.0, [[0] * 5] * 2, [0.2, 0.2, 0.4])
    plain = summary(requests, [Answered(8, 0.9, [run_of_two], None)])
    assert (plain["step_p50"], plain["itl_p50"], plain["output_tokens_per_second"]) == (0.2, 0.2, 10)
    assert plain["user_tokens_per_second"] == {"by_itl": pytest.approx(5), "by_rate": 5}
    counted = CountedLength(FixedLength(1))
    counted.rows = 4
    drafted = summary(requests, [Answered(8, 0.9, [run_of_two], counted)])
    assert (drafted["tokens_a_step"], drafted["itl_p50"]) == (2, 0.1)
    assert drafted["user_tokens_per_second"]["by_itl"] == pytest.approx(10)


def row(**more):
    return {
        "ranks": 8, "method": "fp8", "variant": "default", "workload": "decode-64", "output_tokens_per_second": 9_000.0,
        "itl_p50": 7e-3, "efficiency": {"of": 1, "share": 0.8}, "over_predicted": 1.2,
        "predicted": {"output_tokens_per_second": 7_500.0},
    } | more  # fmt: skip


def test_checks_are_of_whole_lengths_on_the_hardware_that_they_were_made_for():
    same_tokens = {f"same-tokens-tp{n}": {"differing": 0, "tokens": 96} for n in (1, 8)}
    measured = same_tokens | {"tp8-fp8-decode-64": row()}
    assert scaling.checks_of({"same-tokens-tp1": same_tokens["same-tokens-tp1"]}, "cpu", 1) == [], "nothing was compared"
    [same] = scaling.checks_of(measured, "cpu", 1)
    assert (same.name, same.ok) == ("tokens_differing_by_ranks", True)
    assert len(scaling.checks_of(measured, "NVIDIA H200", 0.5)) == 1
    checks = {one.name: one.ok for one in scaling.checks_of(measured, "NVIDIA H200", 1)}
    assert checks["tp8_decode64_fp8_efficiency"]
    assert not checks["tp8_fp8_decode_64_off_prediction"]
    of_two = {"tp8-fp8-decode-64": row(efficiency={"of": 2, "share": 0.9})}
    assert "tp8_decode64_fp8_efficiency" not in {one.name for one in scaling.checks_of(of_two, "NVIDIA H200", 1)}


def test_the_table_shows_what_was_measured_and_why_the_rest_was_not():
    user = {"by_itl": 200.0, "by_rate": 150.0}
    results = {
        "same-tokens-tp8": {"tokens": 96, "differing": 0},
        "all-reduce-tp8": {"sums": 161, "ways": {"nccl": {"64": {"microseconds": 12.5, "largest_error": 0.0}}}},
        "tp8-fp8-decode-64": row(all_reduce_seconds=2e-3, share_of_floor=0.4),
        "tp8-fp8-saturated-512": row(workload="saturated-512", published=13_181.0),
        "tp8-fp8-eager-decode-64": row(variant="eager", over_default=0.5),
        "tp8-fp8-draft-decode-1": row(
            variant="draft", tokens_a_step=2.5, synthetic_acceptance=0.75, user_tokens_per_second=user
        ),
        "tp8-awq-decode-64": {"not_measured": "no time was left"},
        "machine": vars(H200),
        "left_out": {"tp1-none": "141.1 GB of weights a rank"},
    }
    made_of = {"command": "refimpl bench scaling", "hardware": "8x H200", "model": "x", "dtype": "bfloat16", "date": "today"}
    setting = made_of | {"versions": {"torch": "2"}, "workload": "all at once"}
    table = report.TABLES["scaling"]({"setting": setting, "results": results})
    lines = table.splitlines()
    assert "| 8 | fp8 |  | decode-64 | 9,000.0 | 7.00 | 0.80 | 40% | 2.00 | 7,500 | 1.20 |  |" in lines
    assert "| 8 | fp8 |  | saturated-512 | 9,000.0 | 7.00 | 0.80 |  |  | 7,500 | 1.20 | 13,181 |" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {13}
    for said in (
        "eager (0.50 times the default)", "not measured: no time was left", "tp1-none was left out: 141.1 GB",
        "2.50 tokens a step", "200.0 tokens/s by the median", "nccl 12.5 (64)", "0 of 96 (same-tokens-tp8)", "4.59 TB/s",
    ):  # fmt: skip
        assert said in table


def test_what_cannot_be_measured_is_refused():
    for wrong in ({"ranks": [0]}, {"repeats": 0}, {"scale": 2}, {"workloads": []}):
        with pytest.raises(ConfigError, match="must be 1 or more each"):
            scaling.Asked(**wrong)
    with pytest.raises(ConfigError, match="rows are int3; there are none, fp8, awq"):
        scaling.Asked(methods=["int3"])


def test_a_process_that_fails_or_takes_too_long_says_so():
    with closing(MeasuringProcess()) as process:
        with pytest.raises(DoesNotFit, match=r"ConfigError: .*nothing-like-it"):
            process.ask("open", {"model": "smollm2"}, "nothing-like-it", None)
        began = time.monotonic()
        with pytest.raises(DoesNotFit, match="it took longer than the 0 seconds that were left"):
            process.ask("look", seconds=0.0)
        with pytest.raises(DoesNotFit, match="it took longer"):
            process.ask("look")
        assert time.monotonic() - began < 60, "it is not waited for"


def test_one_and_two_ranks_of_a_tiny_shape(tmp_path):
    shape = tmp_path / "shape"
    shape.mkdir()
    write_config(tiny(num_attention_heads=8, num_key_value_heads=4, vocab_size=300).config, shape)
    asked = ["scaling", "--model-config", str(shape), "--ranks", "1,2,3", "--quantizations", "none", "--json"]
    small = ["--rows", "decode-1,saturated-2", "--scale", "0.02", "--repeats", "1", "--dtype", "float32"]
    small += [
        "--max-model-len",
        "256",
        "--num-gpu-blocks-override",
        "64",
        "--variants",
        "default",
        "--save",
        str(tmp_path),
        "--max-num-seqs",
        "8",
    ]
    found = CliRunner().invoke(bench, [*asked, *small])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert list(result["results"]["left_out"]) == ["tp3-none"]
    assert result["results"]["same-tokens-tp2"] == {"tokens": 96, "differing": 0}
    rows = {name: row for name, row in result["results"].items() if "workload" in row}
    assert list(rows) == [f"tp{n}-none-{workload}" for n in (1, 2) for workload in ("decode-1", "saturated-2")]
    assert [rows[f"tp{n}-none-decode-1"]["efficiency"]["of"] for n in (1, 2)] == [1, 1]
    two = rows["tp2-none-decode-1"]
    assert (two["requests"], two["prompt_tokens"], two["output_tokens"]) == (1, 10, 5)
    sums = result["results"]["all-reduce-tp2"]
    assert sums["sums"] == 5
    assert two["all_reduce_seconds"] == pytest.approx(5e-6 * sums["ways"]["gloo"]["1"]["microseconds"])
    assert two["over_predicted"] == pytest.approx(
        two["output_tokens_per_second"] / two["predicted"]["output_tokens_per_second"]
    )
    assert two["share_of_floor"] > 0
    assert result["checks"] == [{"name": "tokens_differing_by_ranks", "value": 0, "bound": "<= 0", "ok": True}]
    [kept] = tmp_path.glob("scaling-*.json")
    assert "decode-1" in report.TABLES["scaling"](json.loads(kept.read_text()))
