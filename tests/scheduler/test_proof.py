"""The proof: random use never breaks the books, and every planted fault is seen."""

import contextlib

import pytest
from counts import COUNTS
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from planted import ALARMS, PLANTED, never_copies, token_in_flight_drawn_again
from sharing_support import Driver

from refimpl.errors import RequestError
from refimpl.events import EventLog

EXAMPLES, STEPS = 220, 50
"""Their product is about the number of calls: over 10,000."""


@pytest.fixture(autouse=True, scope="module")
def trace_folder(tmp_path_factory):
    SchedulerMachine.trace = tmp_path_factory.mktemp("proof") / "failed-trace.jsonl"


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts that begin alike, samples, forks, aborts and preemptions in tiny pools; three levels of audit at each call.

    The event log of a failure is saved. The one written last is that of the failure as far as it could be shortened.
    """

    trace = None

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 5),
        depth=st.integers(0, 1),
        slots=st.integers(1, 5),
        budget=st.integers(5, 20),
        prefix_cache=st.booleans(),
        num_host_blocks=st.sampled_from([0, 2, 5, 20]),
    )
    def make(self, num_blocks, block_size, depth, slots, budget, prefix_cache, num_host_blocks):
        limits = {"max_num_seqs": slots, "max_num_batched_tokens": budget}
        if num_host_blocks:
            limits |= {"swap_space": 1.0, "preemption_mode": "swap"}
        self.driver = Driver(num_blocks, block_size, depth, prefix_cache, num_host_blocks, **limits)
        self.failed = False

    def call(self, name, *args, **kwargs):
        try:
            with contextlib.suppress(RequestError):  # the prompt does not fit
                getattr(self.driver, name)(*args, **kwargs)
        except Exception as error:
            self.failed = True
            self.driver.save_trace(self.trace, f"{name}: {error!r}")
            error.add_note(f"The event log of this failure: {self.trace}")
            raise

    @rule(
        stem=st.integers(0, 9),
        tail=st.lists(st.integers(1, 2), min_size=0, max_size=3),
        max_tokens=st.integers(1, 9),
        n=st.integers(1, 3),
        salt=st.sampled_from([None, "x"]),
    )
    def add(self, stem, tail, max_tokens, n, salt):
        prompt = [3] * stem + tail or [4]
        room = self.driver.scheduler.config.max_model_len - len(prompt)
        self.call("add", prompt, max_tokens=max(1, min(max_tokens, room)), n=n, salt=salt)

    def live(self):
        return list(self.driver.scheduler.sequences.values())

    @precondition(lambda self: self.live())
    @rule(data=st.data(), max_tokens=st.integers(1, 6))
    def fork(self, data, max_tokens):
        self.call("fork", data.draw(st.sampled_from(self.live())), max_tokens)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data):
        self.call("abort", data.draw(st.sampled_from(self.live())).request)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), mode=st.sampled_from(["recompute", "swap"]))
    def preempt_soon(self, data, mode):
        self.call("preempt", data.draw(st.sampled_from(self.live())).request, mode)

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.call("step")

    @rule()
    def reset(self):
        self.call("reset")

    def teardown(self):
        if hasattr(self, "driver") and not self.failed:
            self.call("run")


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)


def test_a_failure_of_the_random_use_leaves_its_event_log(monkeypatch, tmp_path):
    never_copies(monkeypatch)
    monkeypatch.setattr(SchedulerMachine, "trace", tmp_path / "failed-trace.jsonl")
    few = settings(max_examples=200, deadline=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError) as failure:
        run_state_machine_as_test(SchedulerMachine, settings=few)
    assert any(str(SchedulerMachine.trace) in note for note in failure.value.__notes__)
    log = EventLog.load(SchedulerMachine.trace)
    assert str(failure.value) in log.header.config["failure"]
    assert f"step {log.records[-1].step}: " in str(failure.value)


def workload(depth):
    """Enough of everything that each fault has its chance."""
    swap = {"num_host_blocks": 8, "swap_space": 1.0, "preemption_mode": "swap"}
    driver = Driver(num_blocks=10, block_size=4, depth=depth, max_num_seqs=4, max_num_batched_tokens=24, **swap)
    for round_number in range(6):
        stem = [3] * 6 + [round_number % 2] * 3
        driver.add(stem, n=3, max_tokens=8)
        driver.add([5, round_number + 1] * 4, max_tokens=9)
        for _ in range(3):
            driver.step()
        running = list(driver.scheduler.running)
        if running:
            driver.fork(running[0], max_tokens=6)
            if round_number % 2:
                driver.preempt(running[-1].request, "recompute" if round_number == 3 else "swap")
        for _ in range(2):
            driver.step()
        driver.abort(driver.requests[str(len(driver.requests) - 1)])
    return driver.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_workload_of_the_planted_faults_is_clean_without_them(depth):
    driver = workload(depth)
    assert driver.copies
    assert driver.cache.stats.hits
    assert driver.cache.stats.evictions
    assert any(output.preempted for output in driver.outputs)
    assert any(output.swapped_in for output in driver.outputs)
    assert any(output.forks for output in driver.outputs)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(ALARMS):
        workload(depth=0)
    COUNTS["planted"] += 1


def test_a_token_in_flight_that_is_drawn_again_is_seen(monkeypatch):
    def one_preemption():
        driver = Driver(depth=1)
        driver.add([3] * 6, max_tokens=9)
        driver.scheduler.preempt_at(2, "0")
        return driver.run()

    assert one_preemption().outputs[2].preempted
    token_in_flight_drawn_again(monkeypatch)
    with pytest.raises(AssertionError):
        one_preemption()
    COUNTS["planted"] += 1
