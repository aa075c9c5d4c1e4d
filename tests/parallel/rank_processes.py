"""Whether the processes of ranks live, how an engine ends with one of them, and what they leave behind."""

import os
import signal
import threading
import time

from refimpl import SamplingParams

PATIENCE = 240.0
"""Seconds after which a test gives up, on a machine that does much else."""


def is_alive(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_nothing_is_left(watch):
    watch._thread.join(PATIENCE)
    assert not watch._thread.is_alive()
    assert watch.process_ids
    assert not any(map(is_alive, watch.process_ids))
    assert not watch._processes.folder.exists()


def ended_in_the_midst(llm, name):
    """Send a signal to a rank while a long request runs; the sample that came of it. Afterwards nothing is left."""
    watch, done = llm.engine.executor.watch, []
    params = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True)

    def generate():
        while not done or done[-1].outputs[0].finish_reason == "length":
            done.extend(llm.generate([[1, 2, 3]], params, use_tqdm=False))

    thread = threading.Thread(target=generate)
    thread.start()
    until = llm.engine.scheduler.step + 60
    while llm.engine.scheduler.step < until and thread.is_alive():
        time.sleep(0.01)
    os.kill(watch.process_ids[-1], getattr(signal, name))
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the request ends"
    [later] = llm.generate([[4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert later.outputs[0].finish_reason == "error", "all that comes later is told as well"
    assert_nothing_is_left(watch)
    llm.close()
    llm.close()
    return done[-1].outputs[0]
