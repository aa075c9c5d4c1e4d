"""Rows of a comparison within a budget of time: made smaller, left out with a reason, and kept when it is interrupted."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from refimpl.bench import latency, offline, report, rows, sides, throughput
from refimpl.bench.commands import bench
from refimpl.bench.result import report_result
from refimpl.bench.sides import Run
from refimpl.errors import ConfigError, RefimplError
from refimpl.loading.hf_config import write_config
from refimpl.models.tiny import tiny

NAMES = ["decode_b1", "decode_b8", "mixed_32"]


class FakeSide:
    """Answers with zeros, and moves the clock by so many seconds a token, in and out."""

    settings: dict = {}

    def __init__(self, clock, seconds_per_token, fail_at=None, error=None):
        self._clock, self._seconds, self._fail_at, self._error = clock, seconds_per_token, fail_at, error
        self.runs = []

    def run(self, requests):
        self.runs.append([(len(prompt), output) for prompt, output in requests])
        if len(self.runs) == self._fail_at:
            raise self._error
        seconds = self._seconds * sum(len(prompt) + output for prompt, output in requests)
        self._clock.now += seconds
        return Run(seconds / 2, seconds, [[0] * output for _, output in requests])


@pytest.fixture
def clock(monkeypatch):
    """A clock that only fake sides move."""
    made = SimpleNamespace(now=0.0)
    made.perf_counter = lambda: made.now
    for module in (rows, sides, throughput, latency):
        monkeypatch.setattr(module, "time", made)
    return made


def compared(monkeypatch, module, ours, other):
    """Let a benchmark compare two fake sides."""

    @contextmanager
    def open_sides(*_):
        yield {"refimpl": ours, "vllm": other}

    monkeypatch.setattr(module, "open_sides", open_sides)


def run(monkeypatch, ours, other, **options):
    compared(monkeypatch, throughput, ours, other)
    monkeypatch.setattr(throughput.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")  # bounds go by it
    return throughput.run({"model": "tiny"}, dtypes=("bfloat16",), **options)


def test_without_a_budget_every_row_is_whole_and_told_at_once(monkeypatch, clock, capsys):
    result = run(monkeypatch, FakeSide(clock, 1e-3), FakeSide(clock, 2e-3), repeats=2)
    assert list(result.results) == NAMES
    assert all((row["shrink"], row["repeats"]) == (1, 2) for row in result.results.values())
    assert [row["ratios"]["vllm"] for row in result.results.values()] == pytest.approx([2, 2, 2])
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("refimpl: decode_b1: refimpl ")
    assert told[0].endswith("(refimpl over it: 2.00)")
    assert {"decode_b1_vllm", "decode_b8_vllm", "decode_b1_tokens_missing"} <= {check.name for check in result.checks}


def test_a_budget_shrinks_the_lengths_of_both_sides_alike_and_the_row_says_so(monkeypatch, clock, capsys):
    ours, other = FakeSide(clock, 1e-3), FakeSide(clock, 20e-3)
    result = run(monkeypatch, ours, other, repeats=3, max_minutes=8)
    shrinks = [row["shrink"] for row in result.results.values()]
    assert shrinks[0] == 1, "a row that fits its share is whole"
    assert 0 < shrinks[2] < 1
    assert ours.runs == other.runs
    assert max(output for _, output in ours.runs[-1]) == round(256 * shrinks[2])
    assert clock.now <= 8 * 60
    assert f"lengths × {shrinks[2]:g}" in capsys.readouterr().err.splitlines()[2]
    table = report.TABLES["throughput"]({"setting": result.setting, "results": result.results})
    assert f"| mixed_32, lengths × {shrinks[2]:g} | vllm |" in table
    assert {check.name for check in result.checks} >= {f"{name}_tokens_missing" for name in NAMES}


def test_three_repeats_of_whole_lengths_go_before_more_of_shorter_ones(monkeypatch, clock):
    ours, other = FakeSide(clock, 1e-3), FakeSide(clock, 14e-3)
    result = run(monkeypatch, ours, other, repeats=5, workloads=["mixed_32"], max_minutes=8)
    assert (result.results["mixed_32"]["shrink"], result.results["mixed_32"]["repeats"]) == (1, 3)
    assert clock.now <= 8 * 60


def test_repeats_become_fewer_when_the_shortest_lengths_take_too_long(monkeypatch, clock):
    result = run(
        monkeypatch, FakeSide(clock, 0.2), FakeSide(clock, 0.2), repeats=9, workloads=["decode_b8"], max_minutes=4.5
    )
    row = result.results["decode_b8"]
    assert row["shrink"] == throughput.SHRINKS[-1]
    assert 1 <= row["repeats"] < 9
    assert result.setting["tokens_produced"] == row["output_tokens"] * row["repeats"], "the trial is not counted"


def test_a_row_that_does_not_fit_is_left_out_and_says_so(monkeypatch, clock, capsys):
    sides = FakeSide(clock, 1e-3), FakeSide(clock, 0.5)
    result = run(monkeypatch, *sides, repeats=1, workloads=["decode_b1", "mixed_32"], max_minutes=10)
    assert clock.now < 10 * 60
    assert result.not_measured() == ["mixed_32"]
    reason = result.results["mixed_32"]["not_measured"]
    assert "with lengths × 0.125 and one repeat it takes about" in reason
    assert f"refimpl: mixed_32: not measured, {reason}" in capsys.readouterr().err
    table = report.TABLES["throughput"]({"setting": result.setting, "results": result.results})
    assert f"| mixed_32 | | not measured: {reason} | |" in table
    assert not any(check.name.startswith("mixed_32") for check in result.checks)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "interrupted"), (RefimplError("its engine\nended"), "its engine ended")],
)
def test_what_was_measured_is_kept_when_it_is_interrupted(monkeypatch, clock, tmp_path, error, reason):
    ours = FakeSide(clock, 1e-3, fail_at=4, error=error)
    result = run(monkeypatch, ours, FakeSide(clock, 1e-3), repeats=2)
    assert result.results["decode_b1"]["repeats"] == 2
    assert [result.results[name] for name in NAMES[1:]] == [{"not_measured": reason}] * 2
    whole = tmp_path / "throughput-x-bfloat16-2026-01-01.json"
    whole.write_text("{}")
    result.setting.update(hardware="x", date="2026-01-01")
    with pytest.raises(SystemExit, match="1"):
        report_result(result, True, tmp_path)
    kept = json.loads((tmp_path / "throughput-x-bfloat16-2026-01-01-partial.json").read_text())
    assert kept["results"] == json.loads(json.dumps(result.results))
    assert whole.read_text() == "{}", "a part never takes the whole's place"


def test_an_interrupt_before_the_first_row_is_one(monkeypatch, clock):
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, FakeSide(clock, 1, fail_at=1, error=KeyboardInterrupt()), FakeSide(clock, 1))


def test_rows_can_be_chosen(monkeypatch, clock):
    result = run(monkeypatch, FakeSide(clock, 1), FakeSide(clock, 1), repeats=1, workloads=["mixed_32", "decode_b1"])
    assert list(result.results) == ["decode_b1", "mixed_32"]
    with pytest.raises(ConfigError, match="rows are decode_b2; there are decode_b1, decode_b8, mixed_32"):
        throughput.run({"model": "tiny"}, workloads=["decode_b2"])
    with pytest.raises(ConfigError, match="max_minutes is 0; it must be above 0"):
        throughput.run({"model": "tiny"}, max_minutes=0)


def test_latency_repeats_less_often_and_leaves_out_what_no_time_is_left_for(monkeypatch, clock):
    compared(monkeypatch, latency, FakeSide(clock, 0.5), FakeSide(clock, 0.5))
    result = latency.run({"model": "tiny"}, 5, ("bfloat16",), prompts=(19, 99, 999), max_minutes=3)
    assert [result.results[name].get("repeats") for name in ("ttft_19", "ttft_99", "ttft_999")] == [2, 1, None]
    assert result.results["ttft_999"] == {"not_measured": "no time was left"}


def test_random_weights_are_compared_with_nothing():
    for module in (throughput, latency):
        with pytest.raises(ConfigError, match="other engines cannot have the same random weights"):
            module.run({"model": "tiny", "load_format": "dummy"})


def test_throughput_measures_a_shape_without_weights(tmp_path):
    write_config(tiny().config, tmp_path)
    asked = ["throughput", "--model-config", str(tmp_path), "--load-format", "dummy", "--dtype", "float32", "--json"]
    found = CliRunner().invoke(bench, [*asked, "--rows", "decode-1,mixed-2", "--repeats", "2", "--scale", "0.05"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    row = result["results"]["decode-1"]
    assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (1, 26, 13)
    assert row["output_tokens_per_second"] == pytest.approx(13 / (sum(row["seconds"]) / 2))
    assert (result["topic"], result["checks"]) == ("offline", [])  # nothing was measured of vLLM with this shape
    assert "| decode-1 | 26 | 13 |" in report.TABLES["offline"](result)


@pytest.mark.parametrize("more", [["--dtypes", "float32"], ["--compare", "transformers"], ["--compare-python", "x"]])
def test_a_shape_is_compared_with_nothing(more):
    found = CliRunner().invoke(bench, ["throughput", "--model-config", "llama-3-8b", *more])
    assert isinstance(found.exception, ConfigError)
    assert "a shape has random weights and is compared with nothing" in str(found.exception)


def test_a_shape_and_a_model_are_not_measured_at_once():
    with pytest.raises(ConfigError, match="model is 'tiny' and model_config 'llama-3-8b'; give one of them"):
        offline.run({"model": "tiny"}, "llama-3-8b")
