"""Engines as guests of a process: several at once, dropped, forked, left open at its end; and what they tell of requests."""

import gc
import itertools
import subprocess
import sys
import threading
import weakref

import pytest

from refimpl import LLM, Engine, EngineArgs, SamplingParams
from refimpl.cache.chained_hash import ChainedHash
from refimpl.errors import ConfigError
from refimpl.outputs import CompletionOutput, RequestOutput
from refimpl.request_metrics import RequestMetrics
from refimpl.scheduler.policies import FairShareByUser

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# ---------------------------------------------------------------------- several engines


def test_two_engines_step_in_turn_and_end_apart():
    prompts = [[n] * (n + 1) for n in range(1, 6)]
    with LLM("tiny", dtype="float64") as llm:
        expected = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    engines = [Engine(EngineArgs(model="tiny", dtype="float64", block_size=size)) for size in (4, 16)]
    for engine, (number, prompt) in itertools.product(engines, enumerate(prompts)):
        engine.add_request(str(number), prompt, GREEDY)
    finished = [{}, {}]
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, results in zip(engines, finished, strict=True):
            results |= {output.request_id: output for output in engine.step() if output.finished}
    for engine, results in zip(engines, finished, strict=True):
        assert tokens(results[str(number)] for number in range(len(prompts))) == expected
        assert engine.audit() == []
        engine.close()


def test_two_engines_in_two_threads():
    prompts = [[n] * (n + 1) for n in range(1, 6)]
    with LLM("tiny", dtype="float64") as llm:
        expected = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    got = {}

    def run(number):
        with LLM("tiny", dtype="float64", async_scheduling=bool(number)) as llm:
            got[number] = [tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: [expected] * 3 for number in range(2)}


@pytest.mark.parametrize(("option", "part"), [("prefix_index", ChainedHash), ("scheduling_policy", FairShareByUser)])
def test_a_part_serves_one_engine_at_a_time(option, part):
    given = part()
    prompt = [7] * 40
    with LLM("tiny", **{option: given}) as first:
        [before] = first.generate([prompt], GREEDY, use_tqdm=False)
        with pytest.raises(ConfigError, match=f"{option} is an object that serves another engine"):
            LLM("tiny", **{option: given})
        [after] = first.generate([prompt], GREEDY, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert after.num_cached_tokens == 32  # nothing was reset
    with LLM("tiny", **{option: given}) as second:
        assert second.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    with LLM("tiny", **{option: part}) if option == "prefix_index" else LLM("tiny") as third, LLM("tiny") as fourth:
        assert third.engine.is_open
        assert fourth.engine.is_open


# ---------------------------------------------------------------------- dropped, left open, forked


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_is_dropped_gives_back_its_thread_and_its_tensors(overlap):
    before = set(threading.enumerate())
    llm = LLM("tiny", async_scheduling=overlap)
    outputs = llm.generate("Hello", GREEDY, use_tqdm=False)
    engine, storage = weakref.ref(llm.engine), llm.engine.executor.runner.model.embed_tokens.untyped_storage()
    del llm
    gc.collect()
    assert engine() is None
    assert storage.size() == 0
    assert set(threading.enumerate()) <= before
    assert outputs[0].finished


IN_A_CHILD = """
import asyncio, os, signal, sys
import torch
torch.set_num_threads(1)
from refimpl import LLM, AsyncLLM, SamplingParams
from refimpl.errors import RefimplError

params = SamplingParams(max_tokens=4)
llm, allm = LLM("tiny", async_scheduling=True), AsyncLLM("tiny")
llm.generate("Hello", params, use_tqdm=False)
closed = LLM("tiny")
closed.close()

async def begin():
    stream = allm.generate("Hello", SamplingParams(max_tokens=1500, ignore_eos=True))
    await anext(stream)
    return stream

stream = asyncio.run(begin())
child = os.fork()
if child == 0:
    signal.alarm(240)  # a hang ends it
    calls = [
        lambda: llm.generate("Hello", params, use_tqdm=False),
        lambda: llm.engine.step(),
        lambda: llm.memory_report(),
        lambda: llm.engine.audit(),
        lambda: allm.generate("Hello", params),
        lambda: asyncio.run(allm.explain("async-0")),
        lambda: asyncio.run(allm.reset_prefix_cache()),
    ]
    for call in calls:
        try:
            call()
        except RefimplError as error:
            assert "was forked off it" in str(error), error
        else:
            raise AssertionError("the child was served")
    llm.close(), allm.close(), asyncio.run(allm.aclose())
    del stream
    sys.exit(7)
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 7, status
assert len(llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].token_ids) == 4
print("the parent goes on")
"""
"""It leaves two engines open, one of them in the middle of a request."""


def test_a_forked_child_is_refused_and_a_process_may_end_with_open_engines():
    # From 3.12 on Python itself warns of forks beside threads, which is what this test is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", IN_A_CHILD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the parent goes on\n", "")


# ---------------------------------------------------------------------- what is told of a request


def test_metrics_are_worked_out_from_the_times():
    metrics = RequestMetrics(
        arrival_time=10.0,
        first_scheduled_time=10.5,
        first_token_time=11.0,
        finished_time=13.0,
        token_times=[[11.0, 11.5, 12.5], [11.0, 13.0]],
        num_prompt_tokens=100,
        num_cached_tokens=64,
    )
    assert metrics.queued_time == 0.5
    assert metrics.time_to_first_token == 1.0
    assert metrics.inter_token_latencies == [[0.5, 1.0], [2.0]]
    assert metrics.mean_time_per_output_token == pytest.approx(3.5 / 3)
    assert metrics.e2e_latency == 3.0
    assert metrics.num_generation_tokens == 5
    assert "100 tokens, 64 of them cached" in str(metrics)
    assert "3,000.0 ms" in str(metrics)


def test_what_has_not_happened_yet_is_none():
    metrics = RequestMetrics(arrival_time=1.0)
    times = (metrics.queued_time, metrics.time_to_first_token, metrics.mean_time_per_output_token, metrics.e2e_latency)
    assert times == (None,) * 4
    assert str(metrics).count("not yet") == 4


def test_outputs_say_how_many_tokens_the_prefix_cache_gave():
    with LLM("tiny", max_num_seqs=1, scheduling_policy="priority") as llm:
        first, second = llm.generate([[5] * 50, [5] * 50], GREEDY, use_tqdm=False)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
        assert second.metrics.num_prompt_tokens == 50
        assert second.metrics.num_generation_tokens == 12
        assert 0 < second.metrics.queued_time < second.metrics.time_to_first_token < second.metrics.e2e_latency


def test_what_is_computed_again_after_a_preemption_is_no_hit():
    engine = Engine(EngineArgs(model="tiny", block_size=8))
    engine.scheduler.preempt_at(3, "r")
    engine.add_request("r", [3] * 30, GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    engine.close()
    assert outputs[-1].metrics.num_preemptions == 1
    assert outputs[-1].num_cached_tokens == 0


def test_joined_deltas_are_the_whole():
    def delta(index, text, token_ids, reason=None):
        return CompletionOutput(index=index, text=text, token_ids=token_ids, finish_reason=reason)

    def output(*samples, finished=False):
        return RequestOutput("r", "p", [1], list(samples), finished, RequestMetrics(arrival_time=0))

    joined = output(delta(1, "x", [1]), delta(0, "a", [2])).joined(output(delta(0, "bc", [3, 4], "stop"), finished=True))
    assert joined.finished
    assert joined.outputs == [delta(0, "abc", [2, 3, 4], "stop"), delta(1, "x", [1])]
