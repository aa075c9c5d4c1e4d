"""The gate between steps: held, stepped, let go, interrupted; and steps by hand past it."""

import os
import signal
import threading
import time

import pytest

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.errors import RefimplError
from refimpl.gate import Gate


def never():
    pass


def until(true):
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.002)


@pytest.fixture
def started():
    """Runs functions in threads that must end with the test."""
    threads = []

    def start(function):
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        threads.append(thread)
        return thread

    yield start
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()


@pytest.fixture(params=[False, True], ids=["alone", "overlap"])
def engine(request):
    engine = Engine(EngineArgs(model="tiny", num_gpu_blocks_override=40, async_scheduling=request.param))
    yield engine
    engine.close()


def add(engine, max_tokens=8, **options):
    engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options))


def drive(engine):
    while engine.has_unfinished_requests():
        engine.step()


def test_an_open_gate_holds_nobody():
    gate = Gate()
    gate.wait(never)
    assert (gate.closed, gate.num_waiting) == (False, 0)


def test_a_closed_gate_holds_until_it_opens(started):
    gate = Gate()
    gate.close()
    thread = started(lambda: gate.wait(never))
    until(lambda: gate.num_waiting == 1)
    assert gate.closed
    assert thread.is_alive()
    gate.open()
    thread.join(240)
    assert (gate.closed, gate.num_waiting) == (False, 0)


def test_allow_lets_so_many_through_and_holds_the_one_after(started):
    gate, passed = Gate(), []

    def run():
        for number in range(5):
            gate.wait(never)
            passed.append(number)

    gate.allow(2)
    started(run)
    until(lambda: gate.num_waiting == 1 and len(passed) == 2)
    gate.allow()
    until(lambda: gate.num_waiting == 1 and len(passed) == 3)
    gate.open()


def test_closing_takes_back_what_was_allowed(started):
    gate = Gate()
    gate.allow(3)
    gate.close()
    started(lambda: gate.wait(never))
    until(lambda: gate.num_waiting == 1)
    gate.open()


def test_who_is_held_can_be_interrupted():
    gate = Gate()
    gate.close()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gate.wait(interrupt)
    assert gate.num_waiting == 0


def test_ctrl_c_ends_a_step_that_is_held_and_the_engine_goes_on(engine, started):
    add(engine)
    engine.gate.close()

    def interrupt():
        until(lambda: engine.gate.num_waiting == 1)
        os.kill(os.getpid(), signal.SIGINT)

    started(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.gate.open()
    drive(engine)
    assert len(engine.events.records) == 8


def test_closing_the_engine_frees_who_is_held(engine, started):
    add(engine)
    engine.gate.close()
    raised = []

    def run():
        with pytest.raises(RefimplError, match="this engine is closed") as caught:
            engine.step()
        raised.append(caught)

    thread = started(run)
    until(lambda: engine.gate.num_waiting == 1)
    engine.close()
    thread.join(240)
    assert raised


def test_a_step_by_hand_goes_to_the_thread_that_is_held(engine, started):
    add(engine)
    engine.gate.close()
    started(lambda: drive(engine))
    for count in (1, 2, 3):
        until(lambda: engine.gate.num_waiting == 1)
        engine.step_by_hand()
        until(lambda count=count: len(engine.events.records) == count)
    until(lambda: engine.gate.num_waiting == 1)
    assert len(engine.events.records) == 3
    engine.gate.open()


def test_a_step_by_hand_while_another_thread_is_in_a_step_is_never_caught_at_the_gate(engine, started):
    add(engine)
    in_step, go_on = threading.Event(), threading.Event()

    def wait_in_the_first_step(record):
        if record.step == 0:
            in_step.set()
            go_on.wait(240)

    engine.events.subscribe(wait_in_the_first_step)
    started(lambda: drive(engine))
    assert in_step.wait(240)
    engine.gate.close()
    by_hand = started(engine.step_by_hand)
    go_on.set()
    by_hand.join(240)
    assert not by_hand.is_alive()
    until(lambda: engine.gate.num_waiting == 1)
    # With overlap the thread's second step was under way, which is how it took in its first.
    assert len(engine.events.records) == 2 + engine.args.async_scheduling
    engine.gate.open()


def test_a_gate_that_closes_between_two_steps_leaves_nothing_in_flight(engine, started):
    add(engine)
    engine.step()
    engine.gate.close()
    started(lambda: drive(engine))
    until(lambda: engine.gate.num_waiting == 1)
    assert len(engine.events.records) == 1
    engine.gate.open()


def test_a_step_that_is_allowed_alone_returns_its_token(engine):
    add(engine, output_kind="delta")
    engine.gate.allow(2)
    outputs = engine.step() + engine.step()
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 2


def test_what_steps_by_hand_bring_is_returned_by_the_next_step(engine):
    add(engine, max_tokens=3, output_kind="delta")
    for _ in range(3):
        engine.step_by_hand()
    assert not engine.gate.closed
    with pytest.raises(RefimplError, match="no request waits or runs"):
        engine.step_by_hand()
    outputs = engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1]
    assert outputs[-1].finished
    assert not engine.has_unfinished_requests()


def test_a_closed_engine_takes_no_step_by_hand(engine):
    engine.close()
    with pytest.raises(RefimplError, match="this engine is closed"):
        engine.step_by_hand()
