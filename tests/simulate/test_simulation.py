"""Whole simulations: the real scheduler under a virtual clock, audited, the same in every process, drawn by every widget."""

import dataclasses
import inspect
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from refimpl import visualizers
from refimpl.cache import audit
from refimpl.config import EngineArgs
from refimpl.errors import ConfigError, RefimplError
from refimpl.events import EventLog
from refimpl.simulate import HARDWARE, MODELS, Deployment, Simulation, StepWork, TraceRequest, arrive, mixed
from refimpl.simulate.models import FORMATS
from refimpl.simulate.roofline import Roofline
from refimpl.visualizers import StaticAndContinuous, export_html, export_perfetto, render, replay
from refimpl.visualizers.history import History

H200 = Deployment.of("llama-3-8b", "h200")


def simulation(requests, deployment=H200, **options):
    return Simulation(EngineArgs(**{"enable_prefix_caching": False} | options), deployment, requests)


def small(**options):
    """A crowd in a pool that is too small for it."""
    requests = arrive(mixed("20-60/5-40", 40, seed=2), 400.0, seed=2)
    limits = {"num_gpu_blocks_override": 40, "max_num_seqs": 12, "max_num_batched_tokens": 64, "watermark": 0.0}
    return simulation(requests, **limits | options)


# ---------------------------------------------------------------------- time


def test_two_steps_of_one_request_by_hand():
    """A prompt of 100 tokens, 2 output tokens: the first step computes the prompt, the second one token."""
    run = simulation([TraceRequest(0.0, 100, 2)], async_scheduling=False)
    first = H200.roofline.times(StepWork(tokens=100, rows=1, context=100, pairs=100 * 101 // 2)).seconds
    second = H200.roofline.times(StepWork(tokens=1, rows=1, context=101, pairs=101)).seconds
    figures = run.run()
    assert figures["ttft_p50"] == pytest.approx(first, rel=1e-12)
    assert figures["itl_p50"] == figures["tpot_p99"] == pytest.approx(second, rel=1e-9)
    assert figures["seconds"] == figures["latency_p50"] == pytest.approx(first + second, rel=1e-12)
    assert figures["throughput"] == pytest.approx(2 / (first + second), rel=1e-12)
    assert figures["busy"] == pytest.approx(1)
    assert (figures["steps"], figures["concurrency_mean"], figures["concurrency_peak"]) == (2, pytest.approx(1), 1)
    hourly = 4.0
    assert figures["cost_per_million_tokens"] == pytest.approx(hourly / 3600 * (first + second) / 2 * 1e6, rel=1e-12)


def test_a_chunked_prompt_counts_the_context_of_each_chunk():
    run = simulation([TraceRequest(0.0, 100, 1)], max_num_batched_tokens=64, max_num_seqs=4, async_scheduling=False)
    chunks = [StepWork(64, 0, 64, 64 * 65 // 2), StepWork(36, 1, 100, 36 * 100 - 36 * 35 // 2)]
    assert run.run()["seconds"] == pytest.approx(sum(H200.roofline.times(chunk).seconds for chunk in chunks), rel=1e-12)


def test_layers_with_a_window_read_no_more_than_it():
    """Of four layers three see 40 tokens: 100 of a prompt, of which the last draws, and then one more."""
    model = dataclasses.replace(MODELS["llama-3-8b"], num_hidden_layers=4, windows=(None, 40, 40, 40))
    roofline = Roofline(model, HARDWARE["h200"], 1, FORMATS["bfloat16"])
    deployment = dataclasses.replace(H200, model=model, roofline=roofline)
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "async_scheduling": False}
    run = simulation([TraceRequest(0.0, 100, 3)], deployment, **limits)
    within = sum(min(position + 1, 40) for position in range(64)), sum(min(position + 1, 40) for position in range(64, 100))
    steps = [
        StepWork(64, 0, 64, (64 * 65 // 2 + 3 * within[0]) / 4),
        StepWork(36, 1, (100 + 3 * 75) / 4, (36 * 100 - 36 * 35 // 2 + 3 * within[1]) / 4),
        StepWork(1, 1, (101 + 3 * 40) / 4, (101 + 3 * 40) / 4),
        StepWork(1, 1, (102 + 3 * 40) / 4, (102 + 3 * 40) / 4),
    ]
    assert run.run()["seconds"] == pytest.approx(sum(roofline.times(step).seconds for step in steps), rel=1e-12)


def test_time_stands_still_for_nobody_and_never_goes_back():
    run = small()
    seen = []
    while run.pending:
        run.step()
        seen.append(run.clock.now)
    assert all(a <= b for a, b in pairwise(seen))
    times = [time for record in run.events.records for time in (record.scheduled_at, record.updated_at)]
    assert min(times) >= 0
    records = list(run.events.records)
    assert all(a.updated_at <= b.updated_at and a.scheduled_at <= b.scheduled_at for a, b in pairwise(records))
    assert all(record.scheduled_at <= record.updated_at for record in records)
    assert run.events.header.clock == "virtual"


def test_an_idle_machine_waits_for_the_next_arrival():
    figures = simulation([TraceRequest(0.0, 10, 1), TraceRequest(1_000.0, 10, 1)]).run()
    assert 1_000 < figures["seconds"] < 1_001
    assert figures["busy"] < 1e-3
    assert figures["concurrency_mean"] < 1e-3
    assert figures["ttft_p99"] < 1


def test_a_step_in_flight_delays_who_comes_meanwhile():
    """With asynchronous scheduling the next step is planned already; without, a newcomer waits for the current one alone."""
    step = H200.roofline.times(StepWork(1, 1, 120, 120)).seconds
    requests = [TraceRequest(0.0, 100, 60), TraceRequest(30.5 * step, 10, 1)]
    waits = [simulation(requests, async_scheduling=overlap).run()["ttft_p50"] for overlap in (False, True)]
    assert waits[0] < waits[1] < waits[0] + 1.5 * step


def test_more_load_means_more_waiting_and_littles_law_holds():
    quiet, busy = (simulation(arrive(mixed("chat", 60, 0), rate, 0), event_log_size=0).run() for rate in (5, 200))
    assert busy["ttft_p50"] > 2 * quiet["ttft_p50"]
    assert busy["itl_p50"] > quiet["itl_p50"]
    for figures in (quiet, busy):  # sequences = arrivals a second · seconds each holds a slot, at most its whole latency
        assert figures["concurrency_mean"] <= 60 / figures["seconds"] * figures["latency_p99"]


# ---------------------------------------------------------------------- the real scheduler


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"scheduler": "static"},
        {"scheduler": "static", "static_drop_finished": True},
        {"kv_cache_manager": "contiguous", "max_model_len": 112},
        {"scheduling_policy": "shortest_prompt_first"},
        {"enable_prefix_caching": True},
        {"enable_kv_cache": False, "max_num_batched_tokens": 256},
    ],
    ids=str,
)
def test_every_step_is_audited(options):
    run = small(**options)
    preempted = 0
    while run.pending:
        run.step()
        assert audit(run.scheduler.snapshot()) == []
    figures = run.figures()
    preempted = sum(figures["preemptions"].values())
    assert (figures["finished"], figures["refused"], figures["cut"]) == (40, 0, 0)
    assert figures["output_tokens"] == sum(r.output for r in mixed("20-60/5-40", 40, seed=2))
    assert figures["kv_use_peak"] <= 1
    assert figures["concurrency_peak"] <= 12
    assert preempted == sum(len(record.preempted) for record in run.events.records)
    assert run.scheduler.kv.num_free_blocks == 40 - run.scheduler.kv.num_stranded_blocks


def test_a_small_pool_preempts_and_the_kind_is_counted():
    figures = small().run()
    assert figures["preemptions"]["recompute"] > 0
    assert small(num_gpu_blocks_override=500).run()["preemptions"] == {}


def test_static_batches_hold_their_rows_and_continuous_ones_do_not():
    answers = mixed("64/20*2,200*1", 48, seed=0)
    static, continuous = (
        simulation(answers, max_num_seqs=8, scheduler=kind, event_log_size=0).run() for kind in ("static", "continuous")
    )
    assert static["output_tokens"] == continuous["output_tokens"]
    assert static["seconds"] > 1.7 * continuous["seconds"]
    assert static["concurrency_mean"] < continuous["concurrency_mean"] <= 8


def test_llama_3_70b_gains_at_least_two_and_a_half_from_continuous_batching():
    eight = Deployment.of("llama-3-70b", "a100-80g", 8)
    answers = mixed("64/5*2,200*1", 120, seed=0)
    static, continuous = (
        simulation(answers, eight, max_num_seqs=6, scheduler=kind, event_log_size=0).run()
        for kind in ("static", "continuous")
    )
    assert 2.5 <= static["seconds"] / continuous["seconds"] <= 2.9


def test_who_cannot_fit_is_refused_alone_and_long_answers_are_cut():
    requests = [TraceRequest(0.0, 700, 5), TraceRequest(0.0, 30, 900), TraceRequest(0.1, 30, 5), TraceRequest(0.2, 640, 1)]
    run = simulation(requests, num_gpu_blocks_override=40)
    figures = run.run()
    assert (figures["requests"], figures["finished"], figures["refused"], figures["cut"]) == (4, 2, 2, 1)
    assert figures["output_tokens"] == 640 - 30 + 5
    assert figures["refusals"][0].startswith("request 0: the prompt has 700 tokens")


def test_nothing_at_all_gives_figures_too():
    figures = simulation([]).run()
    assert (figures["throughput"], figures["finished"], figures["ttft_p50"]) == (0, 0, None)
    assert figures["cost_per_million_tokens"] is None


def test_answers_of_one_token_have_no_gaps():
    figures = simulation([TraceRequest(0.0, 5, 1)] * 3).run()
    assert figures["itl_p50"] is None
    assert figures["ttft_p50"] > 0


def test_options_that_contradict_the_deployment_are_refused():
    with pytest.raises(ConfigError, match="max_model_len is 9000, but the model's positions end at 8192"):
        simulation([], max_model_len=9_000)


def test_a_part_that_never_schedules_does_not_hang():
    run = simulation([TraceRequest(0.0, 5, 1)])
    run.scheduler._admit_waiting = lambda plan: None
    with pytest.raises(RefimplError, match=r"the simulation stands still at 0\.000 s"):
        run.run()


# ---------------------------------------------------------------------- the log

PROGRAM = """
import sys
from refimpl.config import EngineArgs
from refimpl.simulate import Deployment, Simulation, arrive, mixed
requests = arrive(mixed("20-60/5-40", 40, seed=2), 400.0, seed=2)
args = EngineArgs(num_gpu_blocks_override=40, max_num_seqs=12, max_num_batched_tokens=64, seed=3)
run = Simulation(args, Deployment.of("llama-3-8b", "h200"), requests)
run.run()
run.events.save(sys.argv[1] + "/log.jsonl")
run.events.save(sys.argv[1] + "/log.jsonl.gz")
assert "torch" not in sys.modules, "simulating needs no torch"
"""


def test_the_same_seed_writes_the_same_log_in_every_process(tmp_path):
    for hash_seed in ("0", "4711"):
        (folder := tmp_path / hash_seed).mkdir()
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], check=True, env=environment, timeout=280)
    for name in ("log.jsonl", "log.jsonl.gz"):
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "4711" / name).read_bytes()
    log = EventLog.load(tmp_path / "0" / "log.jsonl.gz")
    assert (log.header.clock, log.header.started_at) == ("virtual", 0.0)
    assert log.header.config["device"] == "1 × h200, bfloat16, simulated"


def test_another_seed_draws_other_tokens():
    tokens = []
    for seed in (0, 1):
        run = small(seed=seed)
        run.run()
        tokens.append([record.token_ids for record in run.events.records])
    assert tokens[0] != tokens[1]
    assert all(0 <= token < 128_256 for step in tokens[0] for token in step if token != -1)


PUBLIC = [getattr(visualizers, name) for name in visualizers.__all__]
EVERY_WIDGET = [one for one in PUBLIC if hasattr(one, "_repr_html_") and "source" in inspect.signature(one).parameters]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler": "static"},
        {"kv_cache_manager": "contiguous", "max_model_len": 112},
        {"swap_space": 1.0, "preemption_mode": "swap"},
    ],
    ids=str,
)
def test_its_log_folds_and_every_widget_draws_it(tmp_path, options):
    run = small(**options)
    run.run()
    state = History(run.events).last
    assert all(sequence.phase == "finished" for sequence in state.sequences.values())
    assert {finish.sequence_id for record in run.events.records for finish in record.finished} == set(range(40))
    run.events.save(path := tmp_path / "log.jsonl")
    assert len(EVERY_WIDGET) >= 6
    for widget in EVERY_WIDGET:
        assert "<svg" in widget(path)._repr_html_(), widget
    assert "<svg" in export_html(path, tmp_path / "page.html").read_text(encoding="utf-8")
    export_perfetto(path, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 1_000
    history = replay(path)
    assert render(history, len(history) - 1, width=100)


def test_static_and_continuous_are_drawn_side_by_side():
    runs = [small(scheduler=kind) for kind in ("static", "continuous")]
    for run in runs:
        run.run()
    assert "<svg" in StaticAndContinuous(*(run.events for run in runs))._repr_html_()
