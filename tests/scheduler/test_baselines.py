"""The baselines run through the same schedule() and the same auditor: contiguous reservations, static batches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_support import make_request, run_all
from scheduler_support import make_scheduler as make_plain_scheduler
from sharing_support import Driver

from refimpl import LLM, Engine, EngineArgs, SamplingParams
from refimpl.cache import ContiguousKVCacheManager, audit, make_kv_cache_manager
from refimpl.errors import ConfigError
from refimpl.explain import explain
from refimpl.request import Status
from refimpl.scheduler.choose import make_scheduler
from refimpl.scheduler.policies import choose_policy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
DROPPED = pytest.mark.parametrize("drop_finished", [False, True])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["one prompt of some length", "one prompt of some other length", "x"] * 2
SMALL = {"dtype": "float64", "num_gpu_blocks_override": 24, "block_size": 4, "max_num_batched_tokens": 16}


def tokens(outputs):
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.fixture(scope="module")
def expected():
    with LLM("tiny", **SMALL) as llm:
        return tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_manager": "contiguous", "max_model_len": 48},
        {"scheduler": "static", "max_num_seqs": 4},
        {"scheduler": "static", "max_num_seqs": 4, "static_drop_finished": True},
        {"scheduler": "static", "max_num_seqs": 3, "kv_cache_manager": "contiguous", "max_model_len": 48},
        {"scheduler": "static", "enable_kv_cache": False, "max_num_batched_tokens": 64},
    ],
)
def test_a_baseline_draws_the_same_tokens(options, async_scheduling, expected):
    with LLM("tiny", **SMALL | options, async_scheduling=async_scheduling) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        assert llm.engine.audit() == []


@pytest.mark.parametrize("options", [{"kv_cache_manager": "contiguous", "max_model_len": 48}, {"scheduler": "static"}])
def test_samples_of_one_prompt_are_the_same_where_nothing_is_shared(options):
    params = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True)
    with LLM("tiny", **SMALL) as llm:
        wanted = tokens(llm.generate(PROMPTS[:2], params, use_tqdm=False))
    with LLM("tiny", **SMALL | options) as llm:
        assert tokens(llm.generate(PROMPTS[:2], params, use_tqdm=False)) == wanted


# ---------------------------------------------------------------------- contiguous


def test_a_contiguous_cache_reserves_the_longest_context_and_admits_no_more():
    driver = Driver(
        num_blocks=25,
        block_size=4,
        kv_cache_manager="contiguous",
        max_model_len=24,
        max_num_seqs=9,
        max_num_batched_tokens=64,
    )
    for _ in range(6):
        driver.add([1, 2, 3], max_tokens=4)
    driver.step()
    assert len(driver.scheduler.running) == 4  # 4 × 6 blocks, and one that is of no use
    usage = driver.scheduler.usage()
    assert (usage.used_blocks, usage.filled_slots, usage.wasted_slots) == (24, 12, 84)
    assert usage.stranded_blocks == 1
    assert story(driver.requests["4"]).count("waits: needs 6 blocks, 0 free") == 1
    driver.run()


def test_a_contiguous_cache_takes_a_reservation_back_at_once():
    kv = ContiguousKVCacheManager(12, 4, max_model_len=16)
    first = kv.admit(0, 3).new_blocks
    assert first == [1, 2, 3, 4]
    assert kv.admit(1, 1).new_blocks == [5, 6, 7, 8]
    assert kv.allocate(0, 3, 16).new_blocks == []
    kv.free(0)
    assert kv.admit(2, 9).new_blocks == first
    assert kv.admit(3, 1).new_blocks == [9, 10, 11, 12]
    assert kv.admit(4, 1) is None
    assert audit(kv.snapshot({1: 1, 2: 9, 3: 1})) == []


def test_the_auditor_sees_a_reservation_that_is_not_one_run():
    kv = ContiguousKVCacheManager(8, 4, max_model_len=16)
    kv.admit(0, 1)
    kv._tables[0].block_ids[1:3] = kv._tables[0].block_ids[2:0:-1]
    assert ["not 4 in one run" in violation.text for violation in audit(kv.snapshot({0: 1}))] == [True]


def test_a_fork_of_a_contiguous_sequence_computes_its_prompt_anew():
    engine = Engine(EngineArgs(model="tiny", **SMALL, kv_cache_manager="contiguous", max_model_len=48))
    engine.add_request("a", "some prompt", GREEDY)
    for _ in range(4):
        engine.step()
    engine.fork("a", "b")
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.audit() == []
    assert "is admitted to slot 1" in engine.explain("b")
    engine.close()


def test_a_reservation_longer_than_the_cache_is_refused():
    with pytest.raises(ConfigError, match="the KV cache holds 96"):
        LLM("tiny", **SMALL, kv_cache_manager="contiguous", max_model_len=100)


# ---------------------------------------------------------------------- static


def run_batches(answers, depth=0, drop_finished=False, num_blocks=60, block_size=4, max_num_seqs=2):
    """Requests of 2 prompt tokens and the given answers through a static scheduler: the requests, and every step."""
    args = EngineArgs(
        scheduler="static",
        static_drop_finished=drop_finished,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=num_blocks * block_size,
    )
    config = args.scheduler_config(args.max_model_len, args.max_model_len)
    kv = make_kv_cache_manager(args, num_blocks, args.max_model_len)
    scheduler = make_scheduler(args, config, kv, (), lambda: 0.0, choose_policy("fcfs"))
    requests = [make_request(number, 2, answer) for number, answer in enumerate(answers)]
    for request in requests:
        scheduler.add(request)
    outputs = run_all(scheduler, depth)
    assert kv.num_free_blocks == num_blocks
    assert [len(request.sequences[0].output_token_ids) for request in requests] == answers
    return requests, outputs


def steps_of(request, outputs):
    """The steps in which a request has a row."""
    return [output.step for output in outputs if request.sequences[0].sequence_id in output.batch.sequence_ids]


def story(request):
    return explain(request, {})


def test_a_static_batch_runs_to_its_end_before_anybody_comes_in():
    (first, second, third), outputs = run_batches([2, 7, 3])
    assert steps_of(first, outputs) == steps_of(second, outputs) == list(range(7)), "a finished row is computed to the end"
    assert steps_of(third, outputs) == [7, 8, 9]
    assert "waits: a static batch runs to its end, 2 sequences still" in story(third)
    assert "leaves the static batch: 5 tokens were computed after its end, for nobody" in story(first)


def test_finished_rows_can_be_dropped_and_their_place_stays_empty():
    (first, second, third), outputs = run_batches([2, 7, 3], drop_finished=True)
    assert steps_of(first, outputs) == [0, 1]
    assert steps_of(second, outputs) == list(range(7))
    assert steps_of(third, outputs) == [7, 8, 9]


@DEPTHS
def test_who_finds_no_room_when_a_batch_is_filled_is_for_the_next(depth):
    requests, outputs = run_batches([3, 3, 3], depth, num_blocks=2, block_size=4, max_num_seqs=3)
    ends = [steps_of(request, outputs)[-1] for request in requests[:2]]
    assert steps_of(requests[2], outputs)[0] > max(ends)


@DEPTHS
def test_a_static_batch_that_outgrows_the_pool_gives_up_its_padding_first(depth):
    (first, _), outputs = run_batches([1, 8], depth, num_blocks=6, block_size=2)
    left_early = [finish.sequence_id for output in outputs for finish in output.exhausted]
    assert left_early == [first.sequences[0].sequence_id]
    assert not any(output.preempted for output in outputs)


@pytest.mark.parametrize(
    "options", [{}, {"enable_kv_cache": False, "max_num_batched_tokens": 64}, {"kv_cache_manager": "contiguous"}]
)
def test_padding_stops_at_the_end_of_the_longest_context(options):
    options = SMALL | {"max_model_len": 12, "scheduler": "static"} | options
    with LLM("tiny", **options) as llm:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 11)]
        full, short = llm.generate([[5] * 8, [6]], params, use_tqdm=False)
        assert (len(full.outputs[0].token_ids), len(short.outputs[0].token_ids)) == (4, 11)
        assert short.outputs[0].finish_reason == "length"


@DEPTHS
def test_the_padding_leaves_with_the_last_of_its_batch_whatever_ends_it(depth):
    driver = Driver(depth=depth, scheduler="static", num_blocks=30, prefix_cache=False)
    driver.add([1, 2], max_tokens=1)
    last = driver.add([1, 3], max_tokens=9)
    for _ in range(2):
        driver.step()
    assert [s.status for s in driver.scheduler.running] == [Status.FINISHED, Status.RUNNING]
    driver.abort(last)
    assert driver.kv.num_free_blocks == 30
    driver.run()


@DEPTHS
@DROPPED
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_static_batches_pass_every_audit_and_draw_the_same_tokens(depth, drop_finished, data):
    num_blocks, block_size = data.draw(st.integers(4, 14)), data.draw(st.integers(1, 4))
    driver = Driver(
        num_blocks,
        block_size,
        depth,
        data.draw(st.booleans()),
        scheduler="static",
        static_drop_finished=drop_finished,
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_num_batched_tokens=data.draw(st.integers(4, 16)),
    )
    most = num_blocks * block_size
    for _ in range(data.draw(st.integers(1, 7))):
        prompt = [3] * data.draw(st.integers(1, max(1, most // 2)))
        driver.add(prompt, max_tokens=data.draw(st.integers(1, most - len(prompt))) if most > len(prompt) else 1)
        for _ in range(data.draw(st.integers(0, 3))):
            driver.step()
        if data.draw(st.booleans()) and driver.scheduler.has_unfinished:
            running = [s for s in driver.scheduler.running if not s.finished]
            if running:
                chosen = data.draw(st.sampled_from(running))
                if data.draw(st.booleans()):
                    driver.abort(chosen.request)
                else:
                    driver.scheduler.preempt_at(driver.scheduler.step, chosen.request.request_id)
    driver.run()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_contiguous_reservations_pass_every_audit_and_draw_the_same_tokens(data):
    num_blocks, block_size = data.draw(st.integers(4, 14)), data.draw(st.integers(1, 4))
    longest = data.draw(st.integers(4, num_blocks * block_size))
    driver = Driver(
        num_blocks, block_size, data.draw(st.integers(0, 1)), kv_cache_manager="contiguous", max_model_len=longest
    )
    for _ in range(data.draw(st.integers(1, 7))):
        prompt = [3] * data.draw(st.integers(1, longest - 1))
        driver.add(prompt, max_tokens=data.draw(st.integers(1, longest - len(prompt))), n=data.draw(st.integers(1, 2)))
        for _ in range(data.draw(st.integers(0, 3))):
            driver.step()
    driver.run()


# ---------------------------------------------------------------------- watermark


def preemptions(watermark):
    """Eight sequences that grow in a pool for about five of them."""
    scheduler = make_plain_scheduler(num_blocks=100, block_size=4, max_num_batched_tokens=512, watermark=watermark)
    for number in range(8):
        scheduler.add(make_request(number, 45, max_tokens=40))
    return sum(len(output.preempted) for output in run_all(scheduler))


def test_a_watermark_keeps_room_for_those_that_run_to_grow():
    assert preemptions(0.2) < preemptions(0.0)


def test_a_watermark_never_keeps_a_request_from_running_alone():
    driver = Driver(num_blocks=10, block_size=4, watermark=0.9)
    driver.add([1] * 36, max_tokens=3)
    driver.run()
