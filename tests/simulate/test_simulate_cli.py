"""``refimpl simulate``: its JSON, its table, its log, and how it fails: one line, exit code 2."""

import gzip
import json
import sys

import pytest

from refimpl.cli import main
from refimpl.events import EventLog

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:46.99,396,10\n2023-11-16 18:15:47.20,9000,5\n"
KEYS = {
    "seconds", "steps", "requests", "finished", "refused", "refusals", "cut", "prompt_tokens", "output_tokens", "throughput",
    "total_throughput", "concurrency_mean", "concurrency_peak", "waiting_peak", "kv_use_mean", "kv_use_peak", "preemptions",
    "busy", "memory_bound", "price_per_gpu_hour", "cost_per_million_tokens", "num_blocks", "max_model_len", "setting",
    "num_host_blocks", "blocks_swapped_out", "blocks_swapped_in", "swap_seconds",
} | {f"{name}_p{level}" for name in ("ttft", "itl", "tpot", "latency") for level in (50, 90, 99)}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``refimpl simulate …`` in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["refimpl", "simulate", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def figures(run):
    """The JSON object that it prints."""

    def figures(*arguments):
        code, out, err = run("--json", *arguments)
        assert (code, err) == (0, "")
        return json.loads(out)

    return figures


@pytest.fixture
def trace(tmp_path):
    """A file with a trace."""

    def trace(text):
        (path := tmp_path / "trace.csv").write_text(text)
        return path

    return trace


def test_json_has_its_keys_in_seconds_and_tokens_a_second(figures):
    found = figures(
        "--requests", 20, "--workload", "mixed:30-60/5-20", "--hardware", "a100-80g", "--tensor-parallel-size", 2
    )
    assert set(found) == KEYS
    assert found["finished"] == found["requests"] == 20
    assert found["throughput"] == pytest.approx(found["output_tokens"] / found["seconds"])
    assert 1e-3 < found["ttft_p50"] <= found["ttft_p99"] < 1
    assert 1e-3 < found["itl_p50"] <= found["itl_p99"] < 1
    assert found["setting"]["hardware"] == "a100-80g"
    assert "less 16.1 GB of weights in bfloat16" in found["setting"]["memory"]


def test_the_same_command_prints_the_same_and_a_seed_changes_it(figures):
    small = ("--requests", 10, "--workload", "mixed:30-60/5-20", "--rate", 50)
    assert figures(*small) == figures(*small)
    assert figures(*small)["seconds"] != figures(*small, "--seed", 1)["seconds"]


def test_people_get_a_table(run):
    code, out, err = run("--requests", 5, "--workload", "fixed:40/6", "--price", 2.5)
    assert (code, err) == (0, "")
    for text in ("llama-3-8b in bfloat16 on 1 × h200, simulated", "throughput", "tokens/s", "preemptions", "2.50 a device"):
        assert text in out
    assert "KV cache: 0.9 · 150.1 GB · 1 = 135.1 GB, less 16.1 GB of weights in bfloat16" in out


def test_options_of_the_engine_and_of_the_deployment_are_taken(figures):
    small = ("--requests", 6, "--workload", "fixed:40/6", "--model", "llama-3-70b", "--hardware", "h200", "--dtype", "fp8")
    plain = figures(*small)
    other = figures(
        *small, "--scheduler", "static", "--kv-cache-manager", "contiguous", "--max-num-seqs", 2, "--kv-cache-dtype", "fp8",
        "--price", 1,
    )  # fmt: skip
    assert other["concurrency_peak"] == 2
    assert other["seconds"] > 2 * plain["seconds"]
    assert other["num_blocks"] > 1.9 * plain["num_blocks"]
    assert (other["setting"]["scheduler"], other["setting"]["kv_cache_manager"]) == ("static", "contiguous")
    assert (other["price_per_gpu_hour"], other["setting"]["price_source"]) == (1, "given")


def test_a_trace_is_served_at_its_own_times_and_what_cannot_fit_is_refused_alone(figures, trace):
    found = figures("--trace", trace(HEADER + ROWS))
    assert (found["finished"], found["refused"], found["output_tokens"]) == (2, 1, 54)
    assert found["refusals"][0].startswith("request 2: the prompt has 9000 tokens")
    assert found["seconds"] > 0.31
    assert figures("--trace", trace(HEADER + ROWS), "--requests", 1)["requests"] == 1
    assert figures("--trace", trace(HEADER + ROWS), "--rate", "inf")["seconds"] < found["seconds"]


def test_a_request_larger_than_the_cache_is_refused_alone_whatever_its_size(figures, trace):
    rows = f"0,{10**15},5\n0,700,5\n0,30,{10**15}\n1,30,5\n"
    found = figures("--trace", trace(HEADER + rows), "--num-gpu-blocks-override", 40)
    assert (found["finished"], found["refused"], found["cut"]) == (2, 2, 1)
    assert found["refusals"][0].startswith(f"request 0: the prompt has {10**15} tokens; with at least one to generate,")
    assert found["refusals"][1].startswith("request 1: the prompt has 700 tokens")


def test_more_requests_than_a_trace_has_are_said(run, trace):
    code, out, err = run("--json", "--trace", trace(HEADER + ROWS), "--requests", 9)
    assert (code, json.loads(out)["requests"]) == (0, 3)
    assert "has 3 requests, fewer than 9: all are served" in err


def test_fitted_traffic_is_a_workload(figures):
    assert figures("--workload", "code", "--requests", 5, "--rate", "inf")["requests"] == 5


def test_the_log_is_written_while_it_grows_and_reads_back(run, figures, tmp_path):
    small = ("--requests", 8, "--workload", "mixed:30-60/5-20")
    found = figures(*small, "--save-log", path := tmp_path / "log.jsonl.gz")
    log = EventLog.load(path)
    assert len(log.records) >= found["steps"] > 5
    again = tmp_path / "again.jsonl.gz"
    figures(*small, "--save-log", again)
    assert gzip.decompress(again.read_bytes()) == gzip.decompress(path.read_bytes())
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "a100"], "did you mean a100-40g or a100-80g?"),
        (["--model", "llama-3-70"], "did you mean llama-3-70b"),
        (["--dtype", "int3"], "dtype 'int3' is not known"),
        (["--hardware", "l4", "--model", "llama-3-70b"], "less 141.1 GB of weights in bfloat16: -119.4 GB are left"),
        (["--hardware", "", "--model", "llama-3-8b"], "hardware '' is not known; "),
        (["--tensor-parallel-size", "0"], "it must be a whole number, 1 or more"),
        (["--tensor-parallel-size", "-2"], "it must be a whole number, 1 or more"),
        (["--tensor-parallel-size", "3"], "give one of 1, 2, 4, 8, 16, 32"),
        (["--workload", "nope"], "are not PROMPT/OUTPUT in tokens"),
        (["--requests", "0"], "give 1 or more"),
        (["--rate", "0"], "it must be above 0"),
        (["--rate", "nan"], "it must be above 0"),
        (["--arrivals", "bursts"], "must be one of poisson, even"),
        (["--price", "-1"], "0 or more"),
        (["--price", "nan"], "0 or more"),
        (["--max-model-len", "9000"], "the model's positions end at 8192"),
        (["--max-num-seqs", "0"], "it must be a whole number, 1 or more"),
        (["--trace", "/none.csv"], "does not exist"),
        (["--trace", "/none.csv", "--workload", "chat"], "give one of them"),
        (["--requests", "2", "--save-log", "/none/log.jsonl"], "cannot be written"),
        (["--device", "cuda"], "No such option"),
    ],
    ids=str,
)
def test_bad_input_fails_in_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("refimpl: ")
    assert message in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column TIMESTAMP or ContextTokens or GeneratedTokens"),
        (HEADER, "has no requests below its header"),
        (HEADER + "2023-11-16 18:15:47,5,5\n2023-11-16 18:15:46,5,5\n", "times must not go back: sort the lines"),
        (HEADER + "2023-11-16 18:15:47,-5,5\n", "must be a whole number of tokens >= 1"),
        (HEADER + "5,5,5\n-1,5,5\n", "line 3: TIMESTAMP is '-1'"),
        (HEADER + "nan,5,5\n", "line 2: TIMESTAMP is 'nan'"),
        (HEADER + "1,nan,5\n", "line 2: ContextTokens is 'nan'; it must be a whole number of tokens >= 1"),
        (HEADER + "1,5,inf\n", "line 2: GeneratedTokens is 'inf'"),
        (HEADER + "1,5,five\n", "line 2: GeneratedTokens is 'five'"),
        (HEADER + "1,5," + "9" * 5_000 + "\n", "line 2: GeneratedTokens is '999"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "no column GeneratedTokens"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(run, trace, text, message):
    code, out, err = run("--trace", trace(text))
    assert (code, out) == (2, "")
    assert message in err
