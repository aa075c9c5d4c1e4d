"""Policies: who goes first, who gives way, what a wrong answer gets; queue limits and long prompts."""

import pytest
from scheduler_support import FakeExecutor, books, make_request, make_scheduler, run_all

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.cache import KVCacheManager
from refimpl.config import SchedulerConfig
from refimpl.errors import ConfigError, PolicyError, QueueFullError, RequestError
from refimpl.scheduler import Scheduler
from refimpl.scheduler.policies import FairShareByUser, FirstComeFirstServed, Policy, Priority, choose_policy


def scheduler_with(policy, num_blocks=100, **limits):
    config = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 4 * num_blocks} | limits
    config = SchedulerConfig(enable_chunked_prefill=True, enable_kv_cache=True, **config)
    return Scheduler(config, KVCacheManager(num_blocks, 4), (), lambda: 0.0, choose_policy(policy))


def order_of_ends(scheduler, requests, depth=0):
    for request in requests:
        scheduler.add(request)
    ended = []

    def note(_output):
        ended.extend(r.request_id for r in requests if r.finished and r.request_id not in ended)

    run_all(scheduler, depth, each_step=note)
    note(None)
    return [int(request_id) for request_id in ended]


def request(number, prompt=4, priority=0, user=None, **more):
    made = make_request(number, prompt, max_tokens=more.pop("max_tokens", 3), **more)
    made.priority, made.user = priority, user
    return made


@pytest.mark.parametrize("depth", [0, 1])
def test_priority_serves_the_lower_number_first_and_then_by_arrival(depth):
    requests = [request(0, priority=5), request(1, priority=1), request(2, priority=5), request(3, priority=-2)]
    assert order_of_ends(scheduler_with("priority"), requests, depth) == [3, 1, 0, 2]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_waiting_request_takes_the_place_of_a_running_one_of_lower_priority(depth):
    scheduler = scheduler_with("priority")
    late = request(1, priority=0)
    requests = [request(0, priority=1, max_tokens=20)]
    scheduler.add(requests[0])
    added = []

    def add_late(output):
        if output.step == 4:
            scheduler.add(late)
            added.append(late)

    outputs = run_all(scheduler, depth, each_step=add_late)
    preempted = [p.sequence_id for output in outputs for p in output.preempted]
    assert preempted == [0]
    assert late.metrics.finished_time is not None
    assert len(requests[0].sequences[0].output_token_ids) == 20
    assert any(
        d.kind == "preempted" and "1 goes first" in str(d.numbers["cause"]) for d in requests[0].sequences[0].decisions
    )


def test_equal_priorities_wait_for_each_other():
    scheduler = scheduler_with("priority")
    for number in range(3):
        scheduler.add(request(number, priority=7))
    assert not any(output.preempted for output in run_all(scheduler))


@pytest.mark.parametrize("depth", [0, 1])
def test_the_oldest_of_the_highest_priority_never_loses_its_blocks(depth):
    scheduler = scheduler_with("priority", num_blocks=12, max_num_seqs=4)
    requests = [request(n, prompt=8, priority=n % 2, max_tokens=30) for n in range(6)]
    for made in requests:
        scheduler.add(made)
    outputs = run_all(scheduler, depth)
    preempted = {p.sequence_id for output in outputs for p in output.preempted}
    assert preempted
    assert 0 not in preempted


def test_shortest_prompt_first():
    requests = [request(0, prompt=9), request(1, prompt=2), request(2, prompt=5)]
    assert order_of_ends(scheduler_with("shortest_prompt_first"), requests) == [1, 2, 0]


def test_fair_share_takes_users_in_turn():
    requests = [request(n, user="a") for n in range(3)] + [request(n, user="b") for n in range(3, 5)]
    ends = order_of_ends(scheduler_with("fair_share_by_user"), requests)
    users = ["a" if number < 3 else "b" for number in ends]
    assert users == ["a", "b", "a", "b", "a"]


class LastComeFirstServed(FirstComeFirstServed):
    """One answer changed."""

    name = "lcfs"

    def key(self, sequence):
        return -sequence.sequence_id


def test_a_policy_of_ones_own_runs_in_the_real_engine():
    engine = Engine(
        EngineArgs(model="tiny", max_num_seqs=1, num_gpu_blocks_override=20, scheduling_policy=LastComeFirstServed())
    )
    for name in "abc":
        engine.add_request(name, "Hello", SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), priority=3)
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
        assert engine.audit() == []
    assert ended == ["c", "b", "a"]
    engine.close()


class NamesNobody(FirstComeFirstServed):
    name = "names nobody"

    def victim(self, candidates):
        return 12345


def test_a_victim_that_is_none_is_refused_with_a_sentence():
    scheduler = scheduler_with(NamesNobody(), num_blocks=5, max_num_seqs=3)
    for number in range(3):
        scheduler.add(request(number, prompt=4, max_tokens=12))
    with pytest.raises(PolicyError, match="'names nobody' chose 12345 to give way; it must choose the sequence_id"):
        run_all(scheduler)
    assert books(scheduler) == []


def test_after_a_wrong_answer_the_engine_goes_on():
    options = {"block_size": 4, "num_gpu_blocks_override": 8, "max_model_len": 32}
    engine = Engine(EngineArgs(model="tiny", scheduling_policy=NamesNobody(), **options))
    for name in "ab":
        engine.add_request(name, [1] * 8, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    outputs = {}

    def drain():
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step() if output.finished})

    with pytest.raises(PolicyError):
        drain()
    drain()
    assert engine.audit() == []
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"error"}
    engine.add_request("c", [1] * 8, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    drain()
    assert outputs["c"].outputs[0].finish_reason == "length"
    assert engine.scheduler.kv.num_free_blocks == 8
    engine.close()


class Breaks(FirstComeFirstServed):
    """Raises, or answers with what compares with nothing, at its call number ``at``."""

    name = "breaks"

    def __init__(self, dynamic=False, odd=False):
        self.dynamic, self.odd, self.at, self.calls = dynamic, odd, None, 0

    def key(self, sequence):
        self.calls += 1
        if self.calls - 1 != self.at:
            return 0
        if self.odd:
            return "odd"
        raise KeyError("what")


@pytest.mark.parametrize("options", [{}, {"swap_space": 0.001, "preemption_mode": "swap"}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize(("dynamic", "odd"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_policy_may_break_anywhere_and_the_engine_goes_on(dynamic, odd, overlap, options):
    policy = Breaks(dynamic, odd)
    args = EngineArgs(
        model="tiny", scheduling_policy=policy, block_size=4, num_gpu_blocks_override=12, max_num_seqs=3, max_model_len=40,
        max_num_batched_tokens=16, async_scheduling=overlap, **options,
    )  # fmt: skip
    engine, refused = Engine(args), 0

    def all_of_it():
        broken = 0
        for name, n in ("a", 1), ("b", 2), ("c", 1):
            try:
                engine.add_request(name, [1] * 8, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, n=n))
            except PolicyError:
                broken += 1
        steps = 0
        while engine.has_unfinished_requests():
            steps += 1
            assert steps < 500, "it stands still"
            try:
                engine.step()
                if steps == 4 and engine.is_unfinished("a"):
                    engine.fork("a", "d")
            except PolicyError:
                broken += 1
            except RequestError:
                pass  # "a" has ended
            if dynamic and odd and broken > 3:  # what was odd once is not at the next call
                break
        assert engine.audit() == []
        return broken

    assert all_of_it() == 0
    assert policy.calls > 5
    for at in range(0, policy.calls, 1 + policy.calls // 15):
        policy.calls, policy.at = 0, at
        refused += all_of_it()
        policy.at = None
        engine.abort(engine.unfinished_request_ids())
        assert engine.scheduler.kv.num_free_blocks == 12
        assert not engine.scheduler.sequences
        assert not len(engine.scheduler.waiting)
    assert refused > 0
    assert all_of_it() == 0
    engine.close()


@pytest.mark.parametrize("policy", ["fastest", 7, object()])
def test_a_policy_that_is_none_is_refused(policy):
    with pytest.raises(ConfigError, match="scheduling_policy is"):
        choose_policy(policy)


def test_the_protocol_is_what_the_examples_are():
    assert all(isinstance(policy, Policy) for policy in (FirstComeFirstServed(), Priority(), FairShareByUser()))


def test_priorities_are_for_policies_that_read_them():
    engine = Engine(EngineArgs(model="tiny", num_gpu_blocks_override=20))
    with pytest.raises(RequestError, match="use scheduling_policy='priority'"):
        engine.add_request("a", "Hello", SamplingParams(), priority=1)
    with pytest.raises(RequestError, match="priority is 'x'"):
        engine.add_request("a", "Hello", SamplingParams(), priority="x")
    engine.close()


def test_a_full_queue_refuses_and_what_waits_goes_on():
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=2)
    scheduler.add(make_request(0, 4))
    scheduler.schedule()
    scheduler.add(make_request(1, 4))
    scheduler.add(make_request(2, 4))
    with pytest.raises(QueueFullError, match="2 samples wait already, and max_num_queued_reqs is 2"):
        scheduler.add(make_request(3, 4))
    assert len(scheduler.waiting) == 2


def test_a_long_prompt_leaves_room_for_others_in_every_step():
    scheduler = make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    scheduler.add(make_request(0, 60, max_tokens=2))
    scheduler.add(make_request(1, 6, max_tokens=8))
    steps = [tuple(output.batch.num_new_tokens) for output in run_all(scheduler)]
    assert steps[0] == (8, 6)
    assert all(step == (8, 1) for step in steps[1:7])


def test_the_queue_is_told_apart_from_what_was_removed_and_came_back():
    scheduler = make_scheduler(max_num_seqs=1)
    executor = FakeExecutor()
    scheduler.add(make_request(0, 4, max_tokens=9))
    scheduler.add(make_request(1, 4, max_tokens=2))
    for step in (1, 3, 5):
        scheduler.preempt_at(step, "0")
    for _ in range(7):
        output = scheduler.schedule()
        scheduler.update(output, executor.run(output))
        assert books(scheduler) == []
    assert len(scheduler.waiting) == 1
    assert scheduler.waiting.num_before(next(iter(scheduler.running))) == 0
