"""Arrivals by the clock, what users feel of them, start-ups, and the idle share: processes, arithmetic, and the commands."""

import gzip
import itertools
import json
import random
import re
import time

import pytest
from typer.testing import CliRunner

from refimpl.bench import compilations, idle, kernels, offline, report, serve_sim, startup, startup_run
from refimpl.bench.arrivals import arrival_times
from refimpl.bench.commands import bench
from refimpl.bench.idle import Work
from refimpl.bench.measured import SECONDS, SEED
from refimpl.bench.request_times import RequestTimes, goodput, percentiles, summary
from refimpl.bench.result import Result, check
from refimpl.bench.serve_sim import Arrival, Pattern
from refimpl.engine import Engine, EngineArgs
from refimpl.errors import ConfigError, RefimplError

TINY = {"model": "tiny", "dtype": "float32"}


def test_arrivals_are_those_that_vllm_was_measured_with():
    drawn, at = random.Random(SEED), 0.0
    for one in arrival_times(20, SECONDS, SEED):
        at += drawn.expovariate(20.0)
        assert one == pytest.approx(at, rel=1e-12)
    assert [len(arrival_times(rate, SECONDS, SEED)) for rate in (10, 20, 30)] == [196, 389, 580]


def test_burstiness_keeps_the_rate_and_changes_the_spread_of_the_gaps():
    spreads = []
    for shape in (0.25, 1.0, 4.0):
        times = arrival_times(50, 200, 1, burstiness=shape)
        assert len(times) == pytest.approx(10_000, rel=0.05)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        spreads.append(sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2)
    assert spreads == pytest.approx([4, 1, 0.25], rel=0.15)  # a gamma distribution's squared spread is 1 / shape


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"seconds": -1}, {"burstiness": 0}, {"rate": float("inf")}])
def test_arrivals_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match="must be a number above 0"):
        arrival_times(**({"rate": 1.0, "seconds": 1.0, "seed": 0} | wrong))


def test_a_time_in_which_nobody_comes_is_refused():
    with pytest.raises(ConfigError, match=r"nobody comes within 0.001 seconds at 1 requests a second"):
        arrival_times(1.0, 0.001, 0)


def times_of(arrival, *tokens):
    request = RequestTimes(arrival)
    for now, count in tokens:
        request.came(now, count)
    return request


def test_what_a_user_feels_of_a_request():
    request = times_of(1.0, (1.5, 1), (1.6, 1), (2.0, 2))
    assert request.to_first_token == pytest.approx(0.5)
    assert request.per_output_token == pytest.approx(0.5 / 3)  # two tokens came together, and count as two
    assert request.widest_gap == pytest.approx(0.4)
    one = times_of(0.0, (0.3, 1), (0.9, 0))
    assert (one.per_output_token, one.last) == (None, 0.3), "an output without a token is none"


def test_percentiles_are_values_that_occurred():
    assert percentiles(range(1, 201)) == {"p50": 101, "p90": 181, "p99": 199}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
    assert percentiles([]) == {}


def test_goodput_counts_requests_that_keep_both_limits():
    served = [times_of(0.0, (0.1, 1), (0.14, 1)), times_of(0.0, (0.3, 1), (0.34, 1)), times_of(0.0, (0.1, 1), (0.2, 1))]
    alone, never = times_of(0.0, (0.1, 1)), times_of(0.0)
    found = goodput([*served, alone, never], 2.0, ttft=0.2, tpot=0.05)
    assert (found["requests_per_second"], found["share"]) == (1.0, 0.4)
    told = summary([*served, alone, never], 2.0)
    assert (told["requests"], told["output_tokens"], told["output_tokens_per_second"]) == (5, 7, 3.5)


def test_requests_are_added_when_they_come_and_counted_from_then():
    with_engine = Engine(EngineArgs.from_options(TINY | {"event_log_size": 0}))
    arrivals = [Arrival(0.0, [5] * 20, 6), Arrival(0.0, [6] * 9, 1), Arrival(0.15, [7] * 4, 3)]
    times, seconds = serve_sim.serve(with_engine, arrivals)
    with_engine.close()
    assert [one.tokens for one in times] == [6, 1, 3]
    assert times[2].arrival == 0.15 <= times[2].first <= seconds, "it is not served before it comes"


def test_serve_sim_measures_a_model_and_makes_a_table():
    asked = ["serve-sim", "--model", "tiny", "--dtype", "float32", "--request-rate", "6,12", "--seconds", "0.5"]
    found = CliRunner().invoke(bench, [*asked, "--scale", "0.05", "--arrival-seed", "3", "--json"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    rows = result["results"]
    assert list(rows) == ["poisson-6", "poisson-12"]
    for name, row in rows.items():
        assert row["tokens_missing"] == 0
        assert row["requests"] == len(arrival_times(float(name.split("-")[1]), 0.5, 3))
        assert 0 < row["ttft"]["p50"] <= row["ttft"]["p99"]
    assert [check["name"] for check in result["checks"]] == ["poisson6_tokens_missing", "poisson12_tokens_missing"]
    assert "| poisson-12 | refimpl |" in report.TABLES["serve_sim"](result)


def test_vllm_stands_beside_us_where_the_same_was_measured(monkeypatch):
    monkeypatch.setattr(serve_sim, "beside_vllm", lambda *_: True)
    pattern = Pattern(rates=(10.0,))
    assert pattern.as_measured
    assert not Pattern(rates=(10.0,), seed=1).as_measured
    row = serve_sim.vllm_figures()["poisson-10"] | {"tokens_missing": 0}
    worse = row | {"tpot": dict.fromkeys(row["tpot"], 1.0), "beside": {"vLLM": row}}
    verdicts = {check.name: check.ok for check in serve_sim._checks({"poisson-10": worse})}
    assert verdicts == {
        "poisson10_tokens_missing": True,
        "poisson10_ttft_p50_8b": True,
        "poisson10_ttft_p90_8b": True,
        "poisson10_tpot_p50_8b": False,
        "poisson10_tpot_p90_8b": False,
    }


def test_a_trace_is_replayed_by_its_times(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,30,4\n0.05,10,2\n9,10,2\n")
    result = serve_sim.run(TINY, Pattern(seconds=0.1, trace=path))
    assert {name: (row["requests"], row["output_tokens"]) for name, row in result.results.items()} == {"trace": (2, 6)}
    assert "the trace trace.csv" in result.setting["workload"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--request-rate", "fast"], "give numbers by commas"),
        (["--goodput", "ttft:200"], "give both limits in milliseconds"),
        (["--scale", "2"], "scale is 2; it must be over 0 to 1"),
        (["--request-rate", "30"], r"shrink all lengths, as by --scale 0\.\d+"),
        (["--model-config", "llama-3-8b"], "model is 'tiny' and model_config 'llama-3-8b'"),
    ],
)
def test_a_service_that_cannot_be_simulated_is_refused(more, message):
    found = CliRunner().invoke(bench, ["serve-sim", "--model", "tiny", "--max-model-len", "64", *more])
    assert isinstance(found.exception, ConfigError)
    assert re.search(message, str(found.exception))


def test_a_row_that_no_time_is_left_for_says_so():
    result = serve_sim.run(TINY, Pattern(rates=(5.0,), seconds=3.0, scale=0.02), max_minutes=0.01)
    assert "its requests come for" in result.results["poisson-5"]["not_measured"]


def test_compilations_are_counted_by_kernel():
    with compilations.counted() as told:
        told.took("one", 1.5, cache_hit=False)
        told.took("one", 0.5, cache_hit=False)
        told.took("two", 0.1, cache_hit=True)
    assert (told.compiled, told.found, told.seconds) == (2, 1, {"one": 2.0})


def test_both_starts_are_told_by_phase(monkeypatch, tmp_path):
    folders = []

    def process(command, env, **_):
        folders.append(env["TRITON_CACHE_DIR"])
        asked = json.loads(command[-1])
        assert asked["engine_options"] == TINY
        phases = {"python and imports": 3.0, "loading the weights": 2.0, "compiling kernels": 1.5, "first token": 0.5}
        told = {"phases": phases, "total": 7.0, "first_token_after_weights": 2.0, "second_request": 0.1}
        told |= {"compiled": 2 - len(folders), "found_in_the_cache": 0, "compile_seconds": {}, "tokens_produced": 2}
        return subprocess_result(f"noise\n{startup.MARK}{json.dumps(told | {'compiled_by_other_requests': 0})}\n")

    monkeypatch.setattr(startup.subprocess, "run", process)
    result = startup.run(TINY)
    assert len(set(folders)) == 1
    assert [check.ok for check in result.checks] == [True]
    shown = report.TABLES["startup"](vars(result))
    assert "| compiling kernels | 1.50 | 1.50 |" in shown
    assert "| from the weights to the first token | 2.00 | 2.00 |" in shown


def test_a_start_is_timed_from_within(capsys):
    startup_run.main({"engine_options": TINY, "model_config": None, "started": time.time() - 1})
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(startup.MARK)]
    told = json.loads(line.removeprefix(startup.MARK))
    phases = told["phases"]
    assert phases["python and imports"] >= 1
    assert {"loading the weights", "compiling kernels", "making the KV cache", "first token"} <= set(phases)
    before = phases["python and imports"] + phases["loading the weights"]
    assert told["first_token_after_weights"] == pytest.approx(told["total"] - before)
    assert told["compiled"] == 0, "on a CPU nothing is"


def subprocess_result(stdout, code=0, stderr=""):
    return type("Ended", (), {"stdout": stdout, "stderr": stderr, "returncode": code})()


def test_a_start_that_fails_says_what_it_said(monkeypatch):
    monkeypatch.setattr(startup.subprocess, "run", lambda *_, **__: subprocess_result("", 1, "Traceback\nBoom: no room"))
    with pytest.raises(RefimplError, match="ended with code 1:\nTraceback\nBoom: no room"):
        startup.run(TINY)


WORK = [
    Work(0.0, 1.0, "a"),
    Work(0.5, 1.5, "b"),  # beside the first
    Work(1.6, 2.6, "a"),
    Work(1.7, 1.8, "copy"),  # within the third
    Work(3.0, 4.0, "a"),
]


def test_the_idle_share_is_what_no_work_covers():
    assert idle.gaps_of(WORK) == pytest.approx([0.1, 0.4])
    figures = idle.figures_of(WORK, steps=2)
    assert figures["idle_share"] == pytest.approx(0.5 / 4)
    assert (figures["seconds_per_step"], figures["launches_per_step"], figures["long_gaps_per_step"]) == (2.0, 2.5, 1.0)
    assert figures["by_name"][0] == {"name": "a", "launches": 3, "share": pytest.approx(3 / 3.5), "mean_seconds": 1.0}
    setting = {"workload": "some steps", "command": "x", "hardware": "y", "model": "m", "dtype": "d"}
    table = report.TABLES["idle"]({"results": figures, "setting": setting | {"versions": {}, "date": "now"}})
    assert "| the GPU idles | 12.5% |" in table


def test_the_timeline_is_a_trace_of_the_first_steps(tmp_path):
    path = tmp_path / "timeline.json.gz"
    idle.write_timeline(WORK, 2 * idle.KEPT_STEPS, path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert (events[0]["name"], events[0]["ts"], events[0]["dur"]) == ("a", 0.0, 1e6)
    assert len(events) == 4, "what began in the second half is left out"


def test_idle_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(idle.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="bench idle needs a GPU"):
        idle.run(TINY)


def test_all_results_of_a_gpu_are_made_whatever_one_of_them_says(monkeypatch, tmp_path):
    called = []

    def result_of(topic, ok):
        def run(*arguments, **options):
            called.append((topic, options.get("timeline")))
            return Result(topic, {"hardware": "one GPU", "date": "today"}, {}, [check("bound", float(ok), ">=", 1)])

        return run

    modules = {"startup": startup, "kernels": kernels, "offline": offline, "serve_sim": serve_sim, "idle": idle}
    for topic, module in modules.items():
        monkeypatch.setattr(module, "run", result_of(topic, ok=topic != "kernels"))
    found = CliRunner().invoke(bench, ["gpu", "--dtype", "bfloat16", "--json", "--save", str(tmp_path)])
    assert found.exit_code == 1, "a check failed"
    assert called == [
        ("startup", None),
        ("kernels", None),
        ("offline", None),
        ("serve_sim", None),
        ("idle", tmp_path / "idle-timeline.json.gz"),
    ]
    assert len(list(tmp_path.iterdir())) == 5
