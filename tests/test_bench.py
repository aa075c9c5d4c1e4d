"""The form of benchmark results, and that the README's tables are the kept results."""

import gc
import json
import re
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from refimpl.bench import (
    batching,
    beam,
    claims,
    claims_page,
    latency,
    memory,
    offline,
    overhead,
    peer_vllm,
    report,
    scheduler,
    sharing,
    swap,
    throughput,
)
from refimpl.bench.flops import flop_counter
from refimpl.bench.peers import OtherEnvironment, Transformers, open_sides
from refimpl.bench.recompute import run
from refimpl.bench.result import check, workload_hash
from refimpl.bench.sides import Run, mixed, ratio
from refimpl.errors import ConfigError, RefimplError
from refimpl.events import EventLog
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.visualizers import export_html

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DEFAULTS = {"model": "tiny", "dtype": "float64"}


def test_the_readme_shows_the_kept_results():
    text = README.read_text(encoding="utf-8")
    assert "<!-- bench:recompute -->" in text
    assert report.render(text) == text, "run refimpl bench report"


def test_the_claims_page_is_the_kept_results():
    assert (ROOT / "notebooks/CLAIMS.md").read_text(encoding="utf-8") == claims_page.render_claims(), (
        "run refimpl bench report"
    )


def test_a_claim_is_never_said_without_its_result(monkeypatch):
    monkeypatch.setattr(claims_page, "newest_results", dict)
    with pytest.raises(RefimplError, match="no result file for 'recompute'; run refimpl bench recompute"):
        claims_page.render_claims()


def test_the_arithmetic_of_the_claims_page_is_right():
    assert claims.TOKEN == 2 * 80 * 8 * 128 * 2
    assert claims.LLAMA_3_70B.num_parameters == 70_553_706_496
    page = claims_page.render_claims()
    for figure in (
        "1.342 GB (1.25 GiB)",
        "134 GB",
        "85.9 GB (80 GiB)",
        "687 GB",
        "430,626 tokens",
        "491.5 MB (469 MiB)",
        "87.8%",
    ):
        assert figure in page


def test_every_kept_result_has_its_form_and_passes_its_checks():
    results = [result for topic in report.newest_results().values() for result in topic]
    assert results
    for result in results:
        assert {"topic", "setting", "results", "checks"} == set(result)
        assert {"hardware", "versions", "date", "command", "model_hash", "workload_hash"} <= set(result["setting"])
        assert result["checks"]
        assert all(check["ok"] for check in result["checks"])
        assert not [text for text in strings_of(result) if re.search(r"(^| )/(root|home|tmp)/", text)]


def strings_of(value):
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [text for one in value for text in strings_of(one)]
    return [value] if isinstance(value, str) else []


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

    for dtype, pack in product((torch.float32, torch.bfloat16), (False, True)):
        linear = Linear(16, 32, dtype, torch.device("cpu"))
        linear.weight.data.normal_()
        if pack:
            linear.pack()
        with torch.inference_mode(), flop_counter() as counter:
            linear(torch.randn(5, 16))
        assert counter.get_total_flops() == 2 * 5 * 16 * 32, f"{dtype}, {pack = }"
    q, kv = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with torch.inference_mode(), flop_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(q, kv, kv)
    assert counter.get_total_flops() == 4 * 2 * 4 * 6 * 8


def test_a_check_says_its_bound():
    assert check("x", 3.0, ">=", 2).ok
    assert not check("x", 3.0, "<=", 2).ok
    assert check("x", 3.0, "<=", 2).bound == "<= 2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sharing", "--repeats", "0"], "'--repeats'"),
        (["scheduler", "--steps", "-3"], "'--steps'"),
        (["throughput", "--scale", "0"], "0 is not above 0"),
        (["scheduler", "--save", "no/such/folder"], "'no/such/folder' does not exist"),
        (["swap", "--timeline", "no/such/folder/log.jsonl"], "there is no folder no/such/folder"),
        (["serve", "--plot", "."], ". is a folder"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_before_anything_is_measured(monkeypatch, capsys, arguments, said):
    from refimpl.cli import main

    monkeypatch.setattr("sys.argv", ["refimpl", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text", ["<!-- bench:nothing -->\n<!-- /bench -->"])
def test_an_unknown_topic_is_an_error(text):
    with pytest.raises(RefimplError, match="no table for the topic 'nothing'; there are recompute"):
        report.render(text)


def test_a_table_without_results_says_how_to_make_them(monkeypatch):
    monkeypatch.setattr(report, "newest_results", dict)
    rendered = report.render("<!-- bench:latency -->\nold\n<!-- /bench -->")
    assert rendered == (
        "<!-- bench:latency -->\nNot measured yet: `refimpl bench latency --save refimpl/bench/results`.\n<!-- /bench -->"
    )


def test_the_scheduler_benchmark_measures_full_batches_without_a_model():
    result = scheduler.run(num_sequences=8, steps=20, largest=20_000)
    gc.freeze()  # it unfroze what tests/conftest.py had frozen
    assert result.results["events off"]["steps"] == result.results["20,000 waiting"]["steps"] == 20
    assert {check.name for check in result.checks} >= {"schedule_update_ms_256", "queue_length_ratio"}
    assert all(figures["median_ms"] > 0 for figures in result.results.values())


def test_the_sharing_benchmark_counts_blocks_and_computed_tokens():
    figures = sharing.run({"model": "tiny", "dtype": "float32", "max_num_seqs": 8}, repeats=1).results
    assert (figures["shared_blocks"], figures["own_blocks"], figures["copied_blocks"]) == (62, 4, 3)
    assert figures["computed_tokens"] == 62


def test_the_memory_benchmark_holds_its_bounds_on_a_short_trace():
    result = memory.run(count=300, seed=1)
    paged, contiguous = result.results["paged"], result.results["contiguous"]
    assert all(check.ok for check in result.checks), result.checks
    assert 0.004 < paged["waste"] < 0.008
    assert 0.26 < contiguous["use"] < 0.30
    assert contiguous["peak_sequences"] == 40
    assert {check.name for check in result.checks} >= {"paged_waste", "contiguous_use"}


def test_the_memory_benchmark_reads_a_trace(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:4{i}.6805900,374,4\n" for i in range(10))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    result = memory.run(trace=trace)
    assert result.results["fitting"] == 10
    assert result.results["paged"]["peak_sequences"] == 10
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,4096,4\n")
    with pytest.raises(RefimplError, match="none of the trace's 1 requests fits 4096 tokens"):
        memory.run(trace=trace)


def test_a_static_batch_lasts_as_long_as_its_longest_answer():
    lengths = [(4, 2), (4, 20)] * 4
    assert batching.ceiling(lengths) == pytest.approx(20 / 11)
    seconds = batching._serve(DEFAULTS, lengths)
    assert len(seconds["static"]) == len(seconds["static, finished rows dropped"]) == 20  # one batch of 8: 20 steps
    assert len(seconds["continuous"]) == 20


def test_the_batching_benchmark_counts_steps_below_its_ceiling(monkeypatch):
    monkeypatch.setattr(batching, "REQUESTS", 48)
    result = batching.run(DEFAULTS, scale=50, requests=48)
    assert {"continuous_over_static", "continuous_over_static_at_most"} == {check.name for check in result.checks}
    for row in result.results["by_share"]:
        assert 1 < row["ratio"] <= row["ceiling"]
    assert result.setting["tokens_produced"] == 3 * (32 * 1 + 16 * 40)


@pytest.mark.parametrize("options", [{"scale": 0}, {"scale": 51}, {"requests": 0}, {"share": 1.5}])
def test_a_mix_that_cannot_be_is_refused(options):
    with pytest.raises(ConfigError, match="they must be"):
        batching.run(DEFAULTS, **options)


@pytest.mark.parametrize("cpu", ["AVX2", "AVX512"])
def test_a_ratio_has_the_bound_of_its_dtype_and_cpu(monkeypatch, cpu):
    monkeypatch.setattr(throughput.torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    figures = {"ratios": {"transformers": 1.5, "vllm": 1.5}, "tokens_missing": 0}
    for dtype, suffix in (("bfloat16", ""), ("float32", "_float32")):
        for row in throughput.WORKLOADS:
            [bounded, *_] = throughput._checks(row, dtype, figures)
            assert bounded.name == row + suffix
            assert bounded.bound == f">= {throughput.BOUNDS[dtype, cpu][row]:g}"
    assert [check.name for check in throughput._checks("decode_b1", "float64", figures)] == [
        "decode_b1_tokens_missing_float64"
    ]


def test_throughput_beside_transformers_draws_the_same_tokens():
    result = throughput.run({"model": "tiny"}, repeats=1, dtypes=("float64",), scale=0.05)
    assert "decode_b1_largest_gap_float64" in {check.name for check in result.checks}
    for name in ("decode_b1_float64", "decode_b8_float64", "mixed_32_float64"):
        figures = result.results[name]
        assert figures["same_answers"]["transformers"] == {"decode_b1": 1, "decode_b8": 8, "mixed_32": 32}[name[:-8]]
        assert figures["largest_gap"] == figures["tokens_missing"] == 0
        settings = figures["settings"]["transformers"]
        assert len(settings["seconds_of_each_tried"]) == 3
        tried = settings["seconds_of_each_tried"]
        assert f"{settings['attn_implementation']}, {settings['cache_implementation']}" == min(tried, key=tried.get)
        one_pair = figures["tokens_per_second"]["refimpl"]["median"] / figures["tokens_per_second"]["transformers"]["median"]
        assert figures["ratios"]["transformers"] == pytest.approx(one_pair)
    assert "transformers, sorted by output length" in result.results["mixed_32_float64"]["ratios"]
    assert report.TABLES["throughput"](json.loads(json.dumps(as_kept(result)))).count("| mixed_32_float64 |") == 3


def test_rows_in_bfloat16_have_the_names_of_their_workloads():
    result = throughput.run({"model": "tiny"}, 1, ("bfloat16",), scale=0.02, workloads=["decode_b8"])
    assert list(result.results) == ["decode_b8"]
    assert {"decode_b8", "decode_b8_largest_gap", "decode_b8_tokens_missing"} == {check.name for check in result.checks}


def as_kept(result):
    return {"setting": result.setting, "results": result.results}


def test_latency_of_a_prompt_in_one_chunk():
    result = latency.run({"model": "tiny"}, repeats=1, dtypes=("float32", "bfloat16"), prompts=(5, 1000))
    assert [check.name for check in result.checks] == ["ttft_1000_float32", "ttft_1000"]
    figures = result.results["ttft_1000"]
    assert figures["settings"]["refimpl"]["max_num_batched_tokens"] >= 1000
    assert figures["ratios"]["transformers"] > 0
    assert "| ttft_5 |" in report.TABLES["latency"](as_kept(result))


def test_offline_requests_are_those_that_were_measured_of_vllm():
    requests = {name: offline.requests_of(name) for name in offline.WORKLOADS}
    assert workload_hash(requests) == "15906bf4c41ebc7a"
    assert [sum(output for _, output in listed) for listed in requests.values()] == [256, 16_384, 34_887, 137_056]


def test_a_quantised_shape_is_kept_apart_and_held_against_its_own_bounds(monkeypatch):
    assert offline.topic_of("llama-3-8b", None) == "offline"
    assert offline.topic_of("llama-3-70b", "fp8") == "offline_llama_3_70b_fp8"
    assert {offline.topic_of(shape, "fp8") for shape in offline.FP8_ON_H200} <= set(report.TABLES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    rows = {name: {"output_tokens_per_second": 52.0} for name in ("decode-1", "decode-64", "decode-7")}
    checks = offline.checks_of("llama-3-70b", "fp8", rows)
    assert [(check.name, check.ok) for check in checks] == [("decode1_70b_fp8", True), ("decode64_70b_fp8", False)]
    assert [check.name for check in offline.checks_of("llama-3-8b", None, rows)] == ["decode1_8b", "decode64_8b"]
    assert offline.checks_of("llama-3-70b", None, rows) == []
    four_bits = offline.checks_of("llama-3-70b", "awq", {"decode-1": {"median_step": 0.0121}})
    assert [(check.name, check.ok) for check in four_bits] == [("decode1_70b_awq_step", False)]


@pytest.mark.parametrize("name", ["decode", "decode-0", "decode-x", "mixed-", "burst-4"])
def test_offline_refuses_other_workloads(name):
    with pytest.raises(ConfigError, match=f"workload is '{name}'; it must be decode-N, mixed-N or saturated-N"):
        offline.requests_of(name)


def test_overhead_takes_the_forward_pass_from_the_step():
    result = overhead.run({"model": "tiny", "dtype": "float32"}, sequences=4, many=8, steps=3)
    assert [check.name for check in result.checks] == ["engine_share_4", "engine_share_4_sampled", "host_ms_8"]
    for kind in ("greedy", "sampled"):
        assert 0 < result.results[kind]["engine_share"] < 1
        assert 0 < result.results[kind]["forward_ms"] < result.results[kind]["ms_per_step"]
    assert 0 < result.results["host_ms"]["min"] <= result.results["host_ms"]["median"]
    assert "8 sequences, without model" in report.TABLES["overhead"](as_kept(result))


def test_the_swap_benchmark_draws_the_same_tokens_both_ways():
    result = swap.run({"model": "tiny", "dtype": "float64"}, lengths=(20, 70), others=2, repeats=2)
    checks = {check.name: check for check in result.checks}
    assert list(checks) == ["swap_same_tokens", "recompute_same_tokens", "cheaper_mode_predicted", "itl_during_swap"]
    assert checks["swap_same_tokens"].ok
    assert checks["recompute_same_tokens"].ok
    short, long = result.results["lengths"]
    assert (short["tokens"], long["tokens"]) == (29, 79)
    assert long["swap_predicted"] == pytest.approx(79 / 29 * short["swap_predicted"])
    assert long["recompute_predicted"] > 79 / 29 * short["recompute_predicted"]
    for mode in ("swap", "recompute"):
        assert result.results["beside"][mode]["ratio"]["min"] > 0
    assert "| 79 | " in report.TABLES["swap"](json.loads(json.dumps(as_kept(result))))


def test_preemptions_of_a_shape_are_measured_where_steps_are_planned_ahead(tmp_path):
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = {"dtype": "float32", "async_scheduling": True}
    result = swap.run(options, lengths=(20,), others=2, repeats=2, model_config=str(tmp_path))
    assert [check.name for check in result.checks] == ["swap_same_tokens", "cheaper_mode_predicted", "itl_during_swap"]
    assert result.checks[0].ok
    assert result.results["lengths"][0]["tokens"] == 20 + 3 + 5 * 3 // 2
    assert result.setting["model"] == str(tmp_path)


def test_the_timeline_of_the_swaps_is_kept_and_becomes_a_page(tmp_path):
    path = tmp_path / "swap.jsonl.gz"
    swap.run({"model": "tiny", "dtype": "float64"}, lengths=(20,), others=2, repeats=1, timeline=path)
    log = EventLog.load(path)
    assert [p.mode for record in log.records for p in record.preempted] == ["swap", "swap"]
    assert sum(len(record.swapped_in) for record in log.records) > 0
    assert "<svg" in export_html(path, tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(RefimplError, match="cannot be written"):
        swap.run({"model": "tiny"}, lengths=(8,), others=1, repeats=1, timeline=tmp_path / "none" / "swap.jsonl")


def test_a_crossover_lies_between_the_lengths_where_the_cheaper_changes():
    assert swap.crossover([(10, 2.0, 1.0), (20, 2.0, 3.0), (30, 2.0, 5.0)]) == 15
    assert swap.crossover([(10, 2.0, 3.0), (20, 2.0, 1.0), (30, 2.0, 5.0)]) == 22.5, "from there on, for good"
    assert swap.crossover([(10, 1.0, 2.0), (20, 1.0, 3.0)]) == 0
    assert swap.crossover([(10, 1.0, 2.0), (20, 3.0, 3.0)]) is None


@pytest.mark.parametrize("options", [{"lengths": ()}, {"lengths": (8, 8)}, {"others": 0}, {"repeats": 0}])
def test_preemptions_that_cannot_be_measured_are_refused(options):
    with pytest.raises(ConfigError, match="must be 1 or more, and lengths must rise"):
        swap.run(DEFAULTS, **options)


def test_the_beam_benchmark_counts_blocks_and_copies():
    result = beam.run(DEFAULTS, width=3, prompt=20, output=24, repeats=2)
    figures = result.results
    assert [check.name for check in result.checks] == ["beam_physical_share", "separate_physical_share"]
    assert figures["separate_physical_share"] == 1, "no two of separate samples use one block"
    assert 1 / 3 < min(figures["physical_share_of_each"]) <= figures["physical_share"] < 1
    assert figures["unshared_blocks"] == 9
    assert 3 < figures["most_blocks"] <= 9
    assert min(figures["copied_blocks"]) > 0
    assert figures["steps"] == [23, 23], "after the last one nothing is in use"
    assert result.setting["tokens_produced"] == 3 * (3 + 1 + 3) * 24
    assert "| 3 beams, prompts of 20 tokens, 24 output tokens |" in report.TABLES["beam"](
        json.loads(json.dumps(as_kept(result)))
    )


@pytest.mark.parametrize("options", [{"width": 0}, {"prompt": 0}, {"repeats": 0}, {"output": 1}])
def test_searches_that_cannot_be_measured_are_refused(options):
    with pytest.raises(ConfigError, match="must be 1 or more, and output 2 or more"):
        beam.run(DEFAULTS, **options)


def test_a_search_of_more_text_than_there_is_is_refused():
    with pytest.raises(ConfigError, match=r"4 prompts of 4000 tokens .* but the text has"):
        beam.run(DEFAULTS, prompt=4_000, repeats=3)


def test_rates_are_tokens_over_seconds():
    run = Run(first_tokens=1.0, total=3.0, token_ids=[[1, 2, 3], [4, 5, 6]])
    assert (run.rate, run.decode_rate) == (2.0, 2.0)
    assert ratio([2.0, 30.0, 4.0], [1.0, 1.0, 4.0]) == 2.0


def test_the_mix_is_fixed_and_spread_over_its_lengths():
    requests = mixed(32, 16, 256, vocab_size=49_152)
    assert requests == mixed(32, 16, 256, vocab_size=49_152)
    for lengths in ([len(prompt) for prompt, _ in requests], [output for _, output in requests]):
        assert (min(lengths), max(lengths)) == (16, 256)
        assert lengths != sorted(lengths)
    assert len({tuple(prompt[:4]) for prompt, _ in requests}) == 32


FAKE_VLLM = """
import importlib.util, itertools, os
assert importlib.util.find_spec("peer_vllm") is None, "modules beside the script are taken for packages"
assert not os.path.exists("kernels"), "it runs in this repository"
__version__ = "fake"
class SamplingParams:
    def __init__(self, **given): self.__dict__.update(given)
class Output:
    def __init__(self, request_id, ids):
        self.request_id, self.outputs = request_id, [type("Sample", (), {"token_ids": ids})]
class LLM:
    def __init__(self, **given):
        print("a banner of its own")
        self.llm_engine, self.running = self, {}
    def add_request(self, request_id, prompt, params):
        self.running[request_id + "-0a1b"] = (prompt["prompt_token_ids"], params.max_tokens, [])
    def has_unfinished_requests(self): return bool(self.running)
    def step(self):
        for request_id, (prompt, most, ids) in list(self.running.items()):
            ids.append(prompt[0])
            if len(ids) == most: del self.running[request_id]
            yield Output(request_id, ids)
"""


FAKE_TORCH = """
__version__, set_num_threads, get_num_threads = "fake", print, lambda: 1
"""


def test_an_engine_of_another_environment_is_asked_over_pipes(tmp_path):
    import os
    import sys

    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    from refimpl.loading.folder import FolderCheckpoint

    other = OtherEnvironment(python, FolderCheckpoint(folder), "float32", 4, 64, threads=1)
    assert other.settings["version"] == "fake"
    for _ in range(2):
        answer = other.run([([7, 8], 3), ([9], 2)])
        assert answer.token_ids == [[7, 7, 7], [9, 9]]
        assert 0 <= answer.first_tokens <= answer.total
    other.close()
    (tmp_path / "vllm.py").write_text("raise ImportError('no libomp')")
    with pytest.raises(RefimplError, match=r"ended with code 1(.|\n)*no libomp"):
        OtherEnvironment(python, FolderCheckpoint(folder), "float32", 4, 64, threads=1)
    with pytest.raises(RefimplError, match="cannot be run"):
        OtherEnvironment(tmp_path / "nothing", FolderCheckpoint(folder), "float32", 4, 64, threads=1)
    with pytest.raises(ConfigError, match="needs a model in a folder; tiny is none"):
        latency.run({"model": "tiny"}, repeats=1, dtypes=("float32",), compare_python=python, prompts=(3,))
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in peer_vllm.ENVIRONMENT
    assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") is None


def test_the_peer_runs_where_ours_runs(monkeypatch, tmp_path):
    checkpoint = open_checkpoint("tiny")
    with pytest.warns(UserWarning, match="meta parameter"):
        assert Transformers(checkpoint, "float32", torch.device("meta"))._model.device.type == "meta"
    sides = partial(open_sides, {"model": checkpoint, "device": "cpu"}, checkpoint, "float32", 1, 64, True)
    with sides(None) as opened:
        assert opened["transformers"].settings["device"] == "cpu"
        assert len(opened["transformers"].run([([7, 8], 3)]).token_ids[0]) == 3
    monkeypatch.setattr("refimpl.bench.peers.resolve_device", lambda name: torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=r"vLLM's CPU build, and device is 'cuda'; give device='cpu'"), sides(tmp_path):
        pass


@pytest.mark.parametrize("arguments", [{"repeats": 0}, {"dtypes": ("int8",)}, {"scale": 0}])
def test_a_comparison_that_cannot_be_made_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"they must be 1 or more, over 0 to 1, and of float64"):
        throughput.run({"model": "tiny"}, **arguments)
