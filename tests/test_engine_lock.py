"""The engine's lock: reentrant, in the order of asking, and given back by who is interrupted while waiting."""

import os
import signal
import threading
import time

import pytest

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.engine_lock import EngineLock


def until(true):
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.001)


def test_it_is_given_in_the_order_of_asking():
    lock, order, threads = EngineLock(), [], []

    def ask(number):
        with lock, lock:
            order.append(number)

    with lock:
        for number in range(8):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            until(lambda: len(lock._turns) == len(threads))
    for thread in threads:
        thread.join(240)
    assert order == list(range(8))


def test_a_thread_that_takes_it_again_and_again_lets_others_in_each_time():
    lock, over, taken = EngineLock(), threading.Event(), []

    def ask():
        for _ in range(20):
            with lock:
                taken.append(steps[0])
        over.set()

    steps = [0]
    thread = threading.Thread(target=ask)
    thread.start()
    while not over.is_set():
        with lock:
            steps[0] += 1
            time.sleep(0.001)  # a step: long enough for the other to ask
    thread.join()
    assert len(taken) == 20


def test_whoever_is_interrupted_while_waiting_leaves_it_to_the_others():
    lock, held, release = EngineLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            release.wait(240)

    def interrupt():
        until(lambda: len(lock._turns) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    threads = [threading.Thread(target=hold), threading.Thread(target=interrupt)]
    threads[0].start()
    assert held.wait(240)
    threads[1].start()
    with pytest.raises(KeyboardInterrupt), lock:
        raise AssertionError("it was free")
    assert not lock._turns
    release.set()
    for thread in threads:
        thread.join(240)
    with lock:
        pass


def test_calls_from_other_threads_wait_for_one_step_and_no_more():
    engine = Engine(EngineArgs(model="tiny"))
    engine.add_request("r", [1], SamplingParams(max_tokens=300, ignore_eos=True))
    asked_at, served_at = [], []

    def look():
        for _ in range(10):
            asked_at.append(engine.scheduler.step)
            engine.memory_report()
            served_at.append(engine.scheduler.step)

    thread = threading.Thread(target=look)
    engine.step()
    thread.start()
    while thread.is_alive() and engine.has_unfinished_requests():
        engine.step()
    thread.join(240)
    engine.close()
    # A step may begin between the number being read and the lock being asked for, and end before it is given.
    assert max(served - asked for asked, served in zip(asked_at, served_at, strict=True)) <= 2
