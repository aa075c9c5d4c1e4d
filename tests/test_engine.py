"""The engine's own promises: what it refuses, what fails alone, what it tells, and what it gives back."""

import os
import signal
import threading

import pytest
import torch

from refimpl import LLM, Engine, EngineArgs, SamplingParams
from refimpl.errors import ConfigError, OutOfMemoryError, PromptError, RefimplError, RequestError, UnknownOptionError
from refimpl.models.tiny import tiny
from refimpl.request_book import FINISHED_KEPT


def make(**options):
    return Engine(EngineArgs(**{"model": "tiny", "num_gpu_blocks_override": 64, "max_model_len": 200} | options))


def drain(engine):
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        assert engine.audit() == []
    return finished


GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([320], "token id 320 at position 0 of the prompt is outside the vocabulary: ids go from 0 to 319"),
        ([5, -1], "token id -1 at position 1"),
        ([1] * 200, "at most 199 fit max_model_len = 200"),
        ([3, 1.5], "item 1 of the prompt is 1.5"),
        ([True], "item 0 of the prompt is True"),
        (None, "must be a text or a list of token ids"),
        ("\ud800", "must be a str of valid Unicode"),
    ],
)
def test_a_bad_prompt_is_refused_alone(prompt, says):
    engine = make()
    engine.add_request("good", "Hello", GREEDY)
    with pytest.raises(PromptError, match=says) as caught:
        engine.add_request("bad", prompt, GREEDY)
    assert caught.value.request_id == "bad"
    assert drain(engine)["good"].outputs[0].finish_reason == "length"
    with pytest.raises(RequestError):
        engine.explain("bad")
    engine.close()


def test_requests_with_wrong_arguments_are_refused():
    engine = make()
    engine.add_request("a", "Hello", GREEDY)
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", "Hello", GREEDY)
    with pytest.raises(RequestError, match="priority is 3"):
        engine.add_request("b", "Hello", GREEDY, priority=3)
    with pytest.raises(RequestError, match="must be a SamplingParams"):
        engine.add_request("b", "Hello", {"temperature": 0})
    drain(engine)
    engine.add_request("a", "an id is free again once its request has ended", GREEDY)
    drain(engine)
    engine.close()


def test_the_longest_prompt_yields_one_token():
    engine = make(max_model_len=50)
    engine.add_request("a", [1] * 49, SamplingParams(max_tokens=None, ignore_eos=True))
    output = drain(engine)["a"].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    engine.close()


def test_max_tokens_none_goes_on_to_max_model_len():
    engine = make(max_model_len=50)
    engine.add_request("a", [1] * 10, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(drain(engine)["a"].outputs[0].token_ids) == 40
    engine.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "under max_num_seqs = 9"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"gpu_memory_utilization": 1.5}, "at most 1"),
        ({"cpu_kvcache_space": -1}, "above 0"),
        ({"attention_backend": "magic"}, "one of auto, torch"),
        ({"load_format": "pickle"}, "one of auto, dummy"),
        ({"device": "tpu"}, "cpu"),
        ({"device": "cuda:7"}, "GPUs here"),
        ({"max_model_len": 5000}, "the model's positions end at 2048"),
        ({"max_model_len": 100, "num_gpu_blocks_override": 5}, r"holds 80 \(5 blocks of 16\); lower max_model_len to 80"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16}, "a prompt must fit one step"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": True}, "seed is True"),
        ({"seed": 2**80}, "64 bits"),
        ({"cpu_kvcache_space": float("inf")}, "cpu_kvcache_space is inf"),
        ({"cpu_kvcache_space": "1"}, "cpu_kvcache_space is '1'"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization is 'x'"),
        ({"enable_kv_cache": "no"}, "enable_kv_cache is 'no'"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"event_log_size": -1}, "event_log_size is -1"),
    ],
)
def test_a_bad_option_fails_at_construction(options, says):
    if options.get("device") == "cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("this machine has that GPU")
    with pytest.raises(ConfigError, match=says):
        make(**options)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownOptionError, match="did you mean block_size"):
        LLM("tiny", blocksize=16)


def test_a_default_context_is_lowered_to_the_pool():
    engine = make(max_model_len=None, num_gpu_blocks_override=2, block_size=4)
    assert engine.scheduler.config.max_model_len == 8
    engine.add_request("small", [1, 2], GREEDY)
    with pytest.raises(PromptError, match="at most 7 fit"):
        engine.add_request("large", [1] * 8, GREEDY)
    assert len(drain(engine)["small"].outputs[0].token_ids) == 4
    engine.close()


def test_a_cache_that_cannot_hold_two_blocks_is_refused_with_the_sum():
    with pytest.raises(OutOfMemoryError, match="100 bytes are left for the KV cache; a block of 16 tokens takes 8,192"):
        make(dtype="float32", num_gpu_blocks_override=None, kv_cache_memory_bytes=100)


def test_weights_that_do_not_fit_are_refused_before_loading(monkeypatch):
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match="GiB in float32; cpu has 0"):
        make(device="cpu", dtype="float32")
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: 3 * tiny().config.num_parameters)
    with pytest.raises(OutOfMemoryError, match=r"dtype=bfloat16 takes 0\.0 GiB and fits, or use another device"):
        make(device="cpu", dtype="float32")


def test_a_small_model_does_not_take_all_memory_for_its_cache():
    """The memory would hold hundreds of thousands of blocks; four times what can run at once is enough."""
    engine = Engine(EngineArgs(model="tiny", device="cpu", max_num_seqs=2, max_model_len=64))
    assert engine.scheduler.kv.num_blocks == 4 * 2 * 4
    engine.close()
    asked = Engine(EngineArgs(model="tiny", device="cpu", max_num_seqs=2, max_model_len=64, cpu_kvcache_space=0.01))
    assert asked.scheduler.kv.num_blocks > 1000
    asked.close()


def test_kv_cache_memory_bytes_sizes_the_cache():
    engine = make(dtype="float32", num_gpu_blocks_override=None, kv_cache_memory_bytes=8192 * 31, max_model_len=None)
    assert engine.scheduler.kv.num_blocks == 30, "the null block is one of the 31"
    engine.close()


def test_without_a_cache_a_context_over_the_budget_is_refused():
    engine = make(enable_kv_cache=False, max_num_batched_tokens=16)
    with pytest.raises(PromptError, match="exceed max_num_batched_tokens = 16"):
        engine.add_request("a", [1] * 14, GREEDY)
    engine.add_request("b", [1] * 13, GREEDY)
    assert len(drain(engine)["b"].outputs[0].token_ids) == 4
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_request_alone(bad, overlap):
    engine = make(async_scheduling=overlap)
    model = engine.executor.runner.model
    model.embed_tokens[7] = bad  # whoever reads token 7 gets nothing but NaN
    engine.add_request("bad", [1, 7, 3], GREEDY)
    engine.add_request("good", [1, 2, 3], GREEDY)
    finished = drain(engine)
    assert finished["bad"].outputs[0].finish_reason == "error"
    assert "position 3 are not numbers" in finished["bad"].outputs[0].stop_reason
    assert finished["good"].outputs[0].finish_reason == "length"
    assert engine.scheduler.kv.num_free_blocks == 64
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(overlap, monkeypatch, caplog):
    engine = make(async_scheduling=overlap)
    runner = engine.executor.runner
    engine.add_request("a", "Hello", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", raising(RuntimeError("the device fell over")))
        failed = drain(engine)["a"].outputs[0]
    assert failed.finish_reason == "error"
    assert "the device fell over" in failed.stop_reason
    assert "step 0 failed and ends a" in caplog.text
    assert engine.scheduler.kv.num_free_blocks == 64
    assert "the device fell over" in engine.explain("a")
    assert len(engine.scheduler.kv.prefix_cache) == 0, "blocks of a step that was not computed are not found"
    assert [arrival.request_id for record in engine.events.records for arrival in record.arrived] == ["a"]
    engine.add_request("b", "Hello", GREEDY)
    assert drain(engine)["b"].outputs[0].finish_reason == "length"
    engine.close()


def raising(error):
    def broken(*_args, **_kwargs):
        raise error

    return broken


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_is_interrupted_is_told_without_a_traceback(overlap, monkeypatch, caplog):
    engine = make(async_scheduling=overlap)
    engine.add_request("a", "Hello", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.runner.model, "forward", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
    assert drain(engine)["a"].outputs[0].finish_reason == "error"
    [said] = [record for record in caplog.records if "was interrupted in its midst, which ends a" in record.message]
    assert (said.levelname, said.exc_info) == ("WARNING", None)
    assert engine.audit() == []
    engine.close()


def test_a_failure_after_the_end_costs_no_result(monkeypatch):
    """With overlap, a step is in flight when its only request turns out to have stopped; it may fail, nothing is lost."""
    alone = make()
    alone.add_request("a", "Hello", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    tokens = drain(alone)["a"].outputs[0].token_ids
    engine = make(async_scheduling=True)
    launch, calls = engine.executor.runner.launch, []

    def fails_at_the_fifth(scheduler_output):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("too late to matter")
        return launch(scheduler_output)

    monkeypatch.setattr(engine.executor.runner, "launch", fails_at_the_fifth)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[tokens[3]])
    engine.add_request("a", "Hello", params)
    [sample] = drain(engine)["a"].outputs
    assert (sample.finish_reason, sample.token_ids, sample.stop_reason) == ("stop", tokens[:4], tokens[3])
    assert len(calls) == 5
    assert "too late" not in engine.explain("a")
    engine.close()
    alone.close()


def test_close_after_a_failed_step_still_gives_everything_back(monkeypatch):
    engine = make(async_scheduling=True)
    engine.add_request("a", "Hello", GREEDY)
    monkeypatch.setattr(engine.executor.runner.model, "forward", raising(RuntimeError("gone")))
    engine.step()
    engine.close()
    assert engine.executor._closed


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_is_taken_after_the_step_and_costs_no_token(overlap, monkeypatch):
    engine = make(async_scheduling=overlap)
    launch, pressed = engine.executor.runner.launch, []  # not the model's forward: a CUDA graph does without

    def launch_with_ctrl_c(scheduler_output):
        pressed.append(1)
        if len(pressed) == 2:  # once: a second one within a step is meant to go through
            os.kill(os.getpid(), signal.SIGINT)
        return launch(scheduler_output)

    monkeypatch.setattr(engine.executor.runner, "launch", launch_with_ctrl_c)
    engine.add_request("a", "Hello", GREEDY)
    finished, interrupts = {}, 0
    while engine.has_unfinished_requests():
        try:
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        except KeyboardInterrupt:
            interrupts += 1
        assert engine.audit() == []
    assert interrupts == 1
    assert len(finished["a"].outputs[0].token_ids) == 4
    assert finished["a"].outputs[0].finish_reason == "length"
    engine.close()


def test_a_second_ctrl_c_goes_through_and_ends_what_it_tore(monkeypatch):
    engine = make(async_scheduling=False)  # the main thread, which alone takes signals, computes the step
    engine.add_request("a", "Hello", GREEDY)
    forward = engine.executor.runner.model.forward

    def forward_with_two(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.runner.model, "forward", forward_with_two)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.audit() == []
    assert drain(engine)["a"].outputs[0].finish_reason == "error"
    engine.add_request("b", "Hello", GREEDY)
    assert drain(engine)["b"].outputs[0].finish_reason == "length"
    engine.close()


def test_request_ids_are_strings():
    engine = make()
    for request_id in (5, None, ["q"]):
        with pytest.raises(RequestError, match="must be a string"):
            engine.add_request(request_id, "Hello", GREEDY)
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_at_any_step_and_of_any_id(overlap):
    for steps in range(7):
        engine = make(max_num_batched_tokens=8, async_scheduling=overlap)
        engine.add_request("a", [1] * 60, GREEDY)
        engine.add_request("b", [2] * 5, GREEDY)
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        engine.abort(["a", "unknown"])
        assert engine.audit() == []
        assert set(drain(engine)) <= {"b"}
        engine.abort("b")
        assert engine.scheduler.kv.num_free_blocks == 64
        assert "abort" in engine.explain("a")
        assert "reason length: 4 output tokens" in engine.explain("b")
        engine.close()


def test_metrics_stamp_arrival_first_token_each_token_and_end():
    engine = make()
    engine.add_request("a", "Hello", SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    metrics = drain(engine)["a"].metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert [len(times) for times in metrics.token_times] == [5, 5]
    assert [len(gaps) for gaps in metrics.inter_token_latencies] == [4, 4]
    assert all(gap >= 0 for gaps in metrics.inter_token_latencies for gap in gaps)
    assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time
    engine.close()


def test_explain_reads_like_a_story():
    engine = make(num_gpu_blocks_override=10, block_size=4, max_num_batched_tokens=16, max_model_len=40)
    engine.add_request("old", [1] * 20, SamplingParams(max_tokens=14, ignore_eos=True))
    engine.add_request("new", [2] * 14, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    assert "waits at the head of the queue" in engine.explain("new")
    drain(engine)
    old, new = engine.explain("old"), engine.explain("new")
    assert "is split by the budget: 16 tokens in this step, 4 left" in old
    for words in (
        "arrives with 14 prompt tokens",
        "is preempted (recompute)",
        "is admitted again",
        "finished with reason length",
    ):
        assert words in new, new
    steps = [int(line.split("step")[1].split()[0]) for line in new.splitlines() if " step " in line and " s  step" in line]
    assert steps == sorted(steps)
    with pytest.raises(RequestError, match="no request 'nobody' is known"):
        engine.explain("nobody")
    engine.close()


def test_a_sample_that_shares_a_prompt_says_what_it_waits_for():
    engine = make(max_num_batched_tokens=8)
    engine.add_request("a", [1] * 20, SamplingParams(n=2, max_tokens=2, ignore_eos=True))
    engine.step()
    assert "now: joins when sample 0 has computed the prompt" in engine.explain("a")
    drain(engine)
    assert "joins when" not in engine.explain("a")
    engine.close()


def test_the_last_thousand_finished_requests_are_kept():
    engine = make(max_num_seqs=256, model=tiny(num_hidden_layers=1))
    for number in range(FINISHED_KEPT + 5):
        engine.add_request(str(number), [1], SamplingParams(temperature=0, max_tokens=1, output_kind="final_only"))
    drain(engine)
    assert sum(len(engine.known_requests(str(number))) for number in range(FINISHED_KEPT + 5)) == FINISHED_KEPT
    with pytest.raises(RequestError):
        engine.explain("4")
    assert "finished" in engine.explain("5")
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_from_other_threads_are_served_between_steps(overlap):
    engine = make(async_scheduling=overlap)

    def add(first):
        for number in range(first, first + 10):
            engine.add_request(str(number), [number], GREEDY)
            engine.audit()
            engine.explain(str(number))

    threads = [threading.Thread(target=add, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    finished = {}
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert len(finished) == 40
    assert engine.audit() == []
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_close_leaves_no_thread_and_no_memory_and_the_engine_says_that_it_is_closed(overlap):
    before = set(threading.enumerate())
    engine = make(async_scheduling=overlap)
    engine.add_request("a", "Hello", GREEDY)
    engine.step()
    kept = [engine.executor.runner.kv_cache.layers[0].k, engine.executor.runner.model.embed_tokens]
    engine.close()
    engine.close()
    assert set(threading.enumerate()) <= before
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in kept)
    assert not engine.has_unfinished_requests()
    for call in (engine.step, lambda: engine.add_request("b", "x", GREEDY)):
        with pytest.raises(RefimplError, match="closed"):
            call()


def test_the_default_event_log_holds_every_step_and_none_when_off():
    engine = make()
    engine.add_request("a", "Hello", GREEDY)
    drain(engine)
    assert [record.step for record in engine.events.records] == [0, 1, 2, 3]
    engine.close()
    quiet = make(event_log_size=0)
    quiet.add_request("a", "Hello", GREEDY)
    drain(quiet)
    assert not quiet.events.records
    quiet.close()


def test_forks_of_a_sampled_request_go_their_own_ways_and_say_so():
    engine = make(max_num_seqs=8)
    params = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)
    engine.add_request("tree", "Hello", params, cache_salt="s", user="u")
    for _ in range(4):
        engine.step()
    engine.fork("tree", "left")
    engine.fork("tree", "right")
    finished = drain(engine)
    left, right = finished["left"].outputs[0].token_ids, finished["right"].outputs[0].token_ids
    continued = finished["tree"].outputs[0].token_ids[len(finished["left"].prompt_token_ids) - 5 :]
    assert len({tuple(left[:10]), tuple(right[:10]), tuple(continued[:10])}) == 3
    assert "shares 1 block with tree" in engine.explain("left")
    assert engine._book._finished["left"].cache_salt == "s"
    assert [record.forks for record in engine.events.records if record.forks] == [((0, 1), (0, 2))]
    engine.close()


def test_a_fork_that_cannot_be_is_refused():
    engine = make(max_model_len=20)
    engine.add_request("a", [1] * 5, SamplingParams(max_tokens=14, ignore_eos=True))
    engine.step()
    for call, says in [
        (lambda: engine.fork("nobody", "b"), "no unfinished request 'nobody'"),
        (lambda: engine.fork("a", "b", index=1), "no unfinished sample 1"),
        (lambda: engine.fork("a", "a"), "in use"),
        (lambda: engine.fork("a", "b", SamplingParams(n=2)), "a fork is one sample"),
    ]:
        with pytest.raises(RequestError, match=says):
            call()
    assert len(drain(engine)) == 1
    with pytest.raises(RequestError, match="no unfinished request 'a'"):
        engine.fork("a", "b")
    engine.close()


def test_the_prefix_cache_is_counted_reset_and_off_without_a_cache():
    engine = make()
    for number in range(2):
        engine.add_request(str(number), [1] * 40, GREEDY)
        drain(engine)
    assert (engine.prefix_cache_stats.queries, engine.prefix_cache_stats.hits) == (80, 32)
    assert "finds 32 of its tokens in the prefix cache" in engine.explain("1")
    engine.reset_prefix_cache()
    engine.add_request("2", [1] * 40, GREEDY)
    drain(engine)
    assert engine.prefix_cache_stats.hits == 32
    engine.close()
    for options in ({"enable_prefix_caching": False}, {"enable_kv_cache": False, "max_num_batched_tokens": 64}):
        engine = make(**options)
        for number in range(2):
            engine.add_request(str(number), [1] * 40, GREEDY)
            drain(engine)
        assert engine.prefix_cache_stats.hits == 0
        engine.close()


def test_what_blocks_hold_can_be_read_and_is_a_copy():
    engine = make(block_size=4)
    engine.add_request("a", list(range(5, 15)), SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    table = engine.scheduler.kv.table(next(iter(engine.scheduler.running)).sequence_id)
    read = engine.read_blocks(1, table)
    inside = engine.executor.runner.kv_cache.layers[1]
    assert read.k.shape == read.v.shape == (3, 4, 2, 16)
    assert torch.equal(read.k[:2], inside.k[list(table[:2])])
    assert torch.equal(read.v[:2], inside.v[list(table[:2])])
    assert not torch.equal(read.k[0], read.k[1])
    whole = engine.read_blocks(1, range(65)).k.flatten(0, 1)
    assert torch.equal(whole[4 * table[1] + 3], read.k[1, 3])
    read.k.zero_()
    assert inside.k[table[0]].abs().sum() > 0
    for layer, block_ids, says in [
        (2, [1], "layer 2 does not exist; the model has layers 0 to 1"),
        (-1, [1], "layer -1 does not exist"),
        (0, [1, 65], "block 65 does not exist; the cache has blocks 1 to 64"),
        (0, [-1], "block -1 does not exist"),
    ]:
        with pytest.raises(RefimplError, match=says):
            engine.read_blocks(layer, block_ids)
    drain(engine)
    engine.close()
    assert read.v[:2].abs().sum() > 0
    with pytest.raises(RefimplError, match="closed"):
        engine.read_blocks(0, [1])


def test_with_overlap_blocks_are_read_after_the_steps_in_flight():
    engine, plain = make(async_scheduling=True, dtype="float64"), make(async_scheduling=False, dtype="float64")
    for one in (engine, plain):
        one.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        for _ in range(5):
            one.step()
    assert torch.allclose(engine.read_blocks(0, [1]).k[0, :7], plain.read_blocks(0, [1]).k[0, :7])
    assert drain(engine)["a"].outputs[0].token_ids == drain(plain)["a"].outputs[0].token_ids
    engine.close()
    plain.close()


def test_an_engine_without_a_model_has_no_keys_to_read():
    from refimpl.executor.executor import kv_cache_of
    from refimpl.executor.model_free import ModelFreeExecutor

    with pytest.raises(RefimplError, match="ModelFreeExecutor computes no keys and values"):
        kv_cache_of(ModelFreeExecutor(8))
