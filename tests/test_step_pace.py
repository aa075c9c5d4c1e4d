"""When the next step is planned: late, but before the device has nothing to do."""

import threading

import pytest

from refimpl import EngineArgs, SamplingParams
from refimpl.engine import Engine
from refimpl.outputs import Batch
from refimpl.step_pace import LEAD, REMEMBERED, StepPace
from refimpl.step_thread import StepThread


class Device:
    """A clock that is set, and a pace that is told of steps."""

    def __init__(self):
        self.now = 100.0
        self.pace = StepPace(lambda: self.now)

    def order(self, further=0, planning=0.0):
        began = self.now
        self.now += planning
        self.pace.ordered(began, Batch(0, (0, 1), (0, 1), (1, 1 + further)))

    def come_back(self, seconds):
        self.now += seconds
        self.pace.came_back()

    def decode(self, *lasted):
        """Steps, each planned while the one before it runs, as an engine that overlaps does it."""
        self.order()
        for seconds in lasted:
            self.order()
            self.come_back(seconds)


def test_without_experience_nothing_waits():
    device = Device()
    assert device.pace.due_in() == 0, "the device has nothing to do"
    device.decode(*[0.010] * (REMEMBERED - 1))
    assert device.pace.due_in() == 0, "too few steps were seen"


def test_a_step_is_due_before_the_shortest_of_the_last_ones_would_end():
    device = Device()
    device.decode(*[0.010, 0.012] * (REMEMBERED // 2))
    assert device.pace.due_in() == pytest.approx(0.010 - LEAD)
    device.now += 0.004
    assert device.pace.due_in() == pytest.approx(0.006 - LEAD)
    device.now += 0.1
    assert device.pace.due_in() == 0


def test_what_planning_takes_comes_on_top():
    device = Device()
    device.decode(*[0.010] * REMEMBERED)
    device.order(planning=0.003)
    device.come_back(0.007)
    assert device.pace.due_in() == pytest.approx(0.010 - LEAD - 0.003)


def test_with_two_steps_in_flight_nothing_waits():
    device = Device()
    device.decode(*[0.010] * REMEMBERED)
    device.order()
    assert device.pace.due_in() == 0


def test_prompts_make_a_step_longer_by_what_they_did_before():
    device = Device()
    device.decode(*[0.010] * REMEMBERED)
    device.order(further=1000)
    device.come_back(0.010)
    assert device.pace.due_in() == pytest.approx(0.010 - LEAD), "no step with a prompt was seen: it takes a decode's time"
    device.order(further=500)
    device.come_back(0.030)  # 20 µs a token of the thousand
    assert device.pace.due_in() == pytest.approx(0.010 + 500 * 20e-6 - LEAD)


def test_a_step_that_was_ordered_late_begins_when_it_was_ordered():
    device = Device()
    device.decode(*[0.010] * REMEMBERED)
    device.come_back(0.010)  # and nothing more was ordered
    assert device.pace.due_in() == 0
    device.now += 5.0
    device.order()
    assert device.pace.due_in() == pytest.approx(0.010 - LEAD)


def test_who_comes_while_a_step_can_wait_is_served_before_it():
    engine = Engine(EngineArgs.from_options({"model": "tiny"}))
    happened, waits, step = [], [10.0], engine.step
    engine.due_in = lambda: waits[-1]
    engine.step = lambda **options: happened.append("step") or step(**options)
    thread = StepThread(engine)
    try:
        ended = threading.Event()
        thread.call(lambda: engine.add_request("one", [1, 2], SamplingParams(max_tokens=2, ignore_eos=True))).result(240)

        def come():
            happened.append("came")
            waits.append(0.0)

        thread.call(come).result(240)
        while thread.call(engine.has_unfinished_requests).result(240):
            ended.wait(0.001)
    finally:
        thread.close()
    assert happened[:2] == ["came", "step"]
    assert happened.count("came") == 1
