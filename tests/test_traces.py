"""Traces of real traffic: what is read from a file, what is fitted to it, and that what is drawn has its figures."""

import gzip
import json
import random
from dataclasses import astuple
from importlib.resources import files
from itertools import pairwise

import pytest

from refimpl.bench import traces
from refimpl.bench.result import workload_hash
from refimpl.bench.traces import TraceRequest, draw, fit, fit_files, generate, read_trace
from refimpl.errors import ConfigError, RefimplError

MAX_LEN, BLOCK_SIZE = 4096, 16

# Figures of the two traces of AzureLLMInferenceDataset2023, computed from their rows as `figures` does.
ORIGINAL = {
    "conv": {"requests": 19366, "prompt": 1154.7, "output": 211.1, "fit": 17754, "use": 0.2787, "waste": 0.00653},
    "code": {"requests": 8819, "prompt": 2047.8, "output": 27.88, "fit": 7562, "use": 0.3538, "waste": 0.00515},
}
SECONDS = {"conv": 3501.7, "code": 3435.9}  # from the first arrival to the last

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
ROWS = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:46.6805900,396,109\r\n2023-11-16 18:15:50.9951690,879,55\r\n"


def figures(trace):
    """Means in tokens; and of the requests that fit ``MAX_LEN``, two shares of the cache over all steps of decoding:
    of a reservation of ``MAX_LEN`` slots what is used, of the blocks of ``BLOCK_SIZE`` slots what is not.
    """
    fitting = [(r.prompt, r.output) for r in trace if r.prompt + r.output <= MAX_LEN]
    used = sum(p * g + g * (g + 1) // 2 for p, g in fitting)
    held = sum(-(-(p + t) // BLOCK_SIZE) * BLOCK_SIZE for p, g in fitting for t in range(1, g + 1))
    return {
        "requests": len(trace),
        "prompt": sum(r.prompt for r in trace) / len(trace),
        "output": sum(r.output for r in trace) / len(trace),
        "fit": len(fitting),
        "use": used / sum(MAX_LEN * g for _, g in fitting),
        "waste": 1 - used / held,
    }


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["conv", "code"])
def test_a_generated_trace_has_the_figures_of_the_original(name):
    original = ORIGINAL[name]
    trace = generate(name, original["requests"], seed=1)
    found = figures(trace)
    assert found["requests"] == original["requests"]
    assert found["prompt"] == pytest.approx(original["prompt"], rel=0.02)
    assert found["output"] == pytest.approx(original["output"], rel=0.02)
    assert found["fit"] == pytest.approx(original["fit"], rel=0.02)
    assert found["use"] == pytest.approx(original["use"], abs=0.01)
    assert found["waste"] == pytest.approx(original["waste"], abs=0.0005)
    assert trace[-1].arrival == pytest.approx(SECONDS[name], rel=0.05)


def test_a_short_trace_has_nearly_the_means_of_the_original():
    found = figures(generate("conv", 500, seed=2))
    assert found["prompt"] == pytest.approx(ORIGINAL["conv"]["prompt"], rel=0.05)
    assert found["output"] == pytest.approx(ORIGINAL["conv"]["output"], rel=0.05)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    assert generate("code", 50, seed=3) == generate("code", 50, seed=3)
    assert generate("code", 50, seed=3) != generate("code", 50, seed=4)


def test_a_seed_gives_the_same_requests_on_every_machine():
    assert generate("conv", 3, seed=0) == [
        TraceRequest(0.0, 1318, 157),
        TraceRequest(0.585555, 1063, 400),
        TraceRequest(0.644235, 400, 91),
    ]
    hashes = [workload_hash([astuple(request) for request in generate(name, 1000, seed=0)]) for name in ("conv", "code")]
    assert hashes == ["744a7820dfe1964b", "9d685bc35afb2a17"]


@pytest.mark.parametrize("count", [1, 2, 15, 17, 300])
def test_a_generated_trace_has_the_count_asked_for_starts_at_zero_and_never_goes_back(count):
    trace = generate("code", count, seed=count)
    assert len(trace) == count
    assert trace[0].arrival == 0.0
    assert all(before.arrival <= after.arrival for before, after in pairwise(trace))
    assert all(type(r.prompt) is int and type(r.output) is int and min(r.prompt, r.output) >= 1 for r in trace)


def test_an_unknown_name_and_a_count_below_one_are_errors():
    with pytest.raises(ConfigError, match="no trace is named 'chat'; there are conv and code"):
        generate("chat", 10, seed=0)
    with pytest.raises(ConfigError, match="a trace of 0 requests was asked for"):
        generate("conv", 0, seed=0)


def test_a_fit_keeps_which_output_goes_with_which_prompt_and_the_gaps():
    rng = random.Random(5)
    prompts = [rng.randrange(1, 2000) for _ in range(2000)]
    original = [TraceRequest(0.5 * i, prompt, 2000 - prompt) for i, prompt in enumerate(prompts)]
    again = draw(json.loads(json.dumps(fit(original))), 2000, seed=6)
    assert figures(again)["prompt"] == pytest.approx(figures(original)["prompt"], rel=0.02)
    assert figures(again)["output"] == pytest.approx(figures(original)["output"], rel=0.02)
    # Were outputs drawn whatever the prompt, these products would sum to half as much again.
    assert sum(r.prompt * r.output for r in again) == pytest.approx(sum(r.prompt * r.output for r in original), rel=0.02)
    assert [r.arrival for r in again] == [r.arrival for r in original]


def test_a_trace_of_one_request_is_fitted_and_drawn_as_that_request():
    fitted = fit([TraceRequest(0.0, 7, 3)])
    assert draw(fitted, 3, seed=0) == [TraceRequest(0.0, 7, 3)] * 3


def test_an_empty_trace_cannot_be_fitted():
    with pytest.raises(RefimplError, match="no lengths to fit"):
        fit([])


def test_the_data_file_is_small_and_names_its_source_and_licence():
    text = files("refimpl").joinpath("bench/workloads/azure-2023.json").read_text(encoding="utf-8")
    data = json.loads(text)
    assert len(text) < 20_000
    assert traces.DATASET in data["source"]
    assert (data["licence"], data["date"]) == ("CC-BY", "2023-11-16")
    assert {name: fitted["requests"] for name, fitted in data["traces"].items()} == {"conv": 19366, "code": 8819}


def test_fit_files_makes_the_data_files_form_and_the_command_without_folders(tmp_path):
    path = written(tmp_path, HEADER + ROWS)
    data = fit_files({"mine": path})
    kept = json.loads(files("refimpl").joinpath("bench/workloads/azure-2023.json").read_text(encoding="utf-8"))
    assert list(data) == list(kept)
    assert list(data["traces"]["mine"]) == list(kept["traces"]["conv"])
    assert data["traces"]["mine"] == fit(read_trace(path))
    assert "fit_files({'mine': 'trace.csv'})" in data["command"]


def test_plain_and_compressed_files_read_alike(tmp_path):
    plain = read_trace(written(tmp_path, HEADER + ROWS))
    assert plain == [TraceRequest(0.0, 374, 44), TraceRequest(0.0, 396, 109), TraceRequest(4.314579, 879, 55)]
    assert read_trace(written(tmp_path, HEADER + ROWS, "trace.csv.gz")) == plain


def test_a_last_line_without_its_end_and_columns_in_another_order_are_read(tmp_path):
    text = "GeneratedTokens,TIMESTAMP,ContextTokens\n44,2023-11-16 18:15:46,374\n9,2023-11-16 18:15:47.5,30"
    assert read_trace(written(tmp_path, text)) == [TraceRequest(0.0, 374, 44), TraceRequest(1.5, 30, 9)]


def test_times_may_be_seconds(tmp_path):
    text = HEADER + "0,374,44\r\n0.25,396,109\r\n3,5,6\r\n"
    assert [request.arrival for request in read_trace(written(tmp_path, text))] == [0.0, 0.25, 3.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:16:00.0000000,many,9", "ContextTokens is 'many'; it must be a whole number of tokens >= 1"),
        ("2023-11-16 18:16:00.0000000,12,9.5", "GeneratedTokens is '9.5'; it must be a whole number"),
        ("2023-11-16 18:16:00.0000000,0,9", "ContextTokens is '0'; it must be a whole number of tokens >= 1"),
        ("2023-11-16 18:16:00.0000000,12,-1", "GeneratedTokens is '-1'; it must be a whole number of tokens >= 1"),
        ("2023-11-16 18:16:00.0000000,12", "GeneratedTokens is ''; it must be a whole number"),
        ("yesterday,12,9", "TIMESTAMP is 'yesterday'; it must be a time like 2023-11-16 18:15:46.6805900"),
        ("2023-11-16 18:16:00+00:00,12,9", "with a zone in all lines or none"),
        ("-3,12,9", "or seconds >= 0"),
        ("nan,12,9", "or seconds >= 0"),
        ("1e400,12,9", "or seconds >= 0"),
        ("2023-11-16 18:15:50.0000000,12,9", "is before 2023-11-16 18:15:50.995169 above it; times must not go back"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_allowed(tmp_path, line, message):
    path = written(tmp_path, HEADER + ROWS + line + "\r\n")
    with pytest.raises(RefimplError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 5: ")
    assert message in str(caught.value)
    assert caught.value.numbers == {"line": 5}


@pytest.mark.parametrize("text", ["", "TIMESTAMP,ContextTokens\r\n", ROWS])
def test_a_missing_column_is_named(tmp_path, text):
    with pytest.raises(RefimplError, match=r"line 1: no column .*GeneratedTokens; a trace's header names TIMESTAMP, Con"):
        read_trace(written(tmp_path, text))


def test_a_missing_file_and_a_trace_without_requests_are_errors(tmp_path):
    with pytest.raises(RefimplError, match=r"none\.csv does not exist; give a trace as \.csv or \.csv\.gz"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(RefimplError, match="no requests below its header"):
        read_trace(written(tmp_path, HEADER))


def test_a_damaged_file_is_an_error(tmp_path):
    whole = gzip.compress((HEADER + ROWS).encode())
    contents = {
        "cut.csv.gz": whole[:-12],
        "no-deflate.csv.gz": whole[:10] + b"\xff" + whole[11:],
        "other-sum.csv.gz": whole[:-8] + bytes(8),
        "plain.csv.gz": HEADER.encode(),
        "compressed.csv": whole,
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(RefimplError, match=rf"{name} cannot be read \(.+get it again from https://"):
            read_trace(path)
    with pytest.raises(RefimplError, match="cannot be read"):
        read_trace(tmp_path)
