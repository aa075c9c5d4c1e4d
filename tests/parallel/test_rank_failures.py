"""A rank that dies, hangs or cannot load: requests end with an error, nothing stays behind, and this process lives."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from refimpl import LLM, SamplingParams
from refimpl.errors import RankFailedError
from refimpl.models.tiny import tiny
from refimpl.parallel import executor as parallel_executor
from refimpl.parallel import wire
from refimpl.parallel.setup import Model

PATIENCE = 20.0
"""Seconds after which a test gives up, on a machine that does much else: 4 is what a silent rank is given."""
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


def is_alive(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_nothing_is_left(watch):
    assert watch.process_ids
    assert not any(map(is_alive, watch.process_ids))
    assert not watch._processes.folder.exists()
    assert not watch._thread.is_alive()


def during_a_request(llm, do):
    """Call ``do`` while a long request runs; what came of the request."""
    done = []

    def generate():
        done.extend(llm.generate([[1, 2, 3]], LONG, use_tqdm=False))

    thread = threading.Thread(target=generate)
    thread.start()
    while llm.engine.scheduler.step < 5:
        time.sleep(0.01)
    do()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the request ends"
    return done[0]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_hangs_in_the_midst_of_a_step_is_noticed(name):
    overlap = name == "SIGSTOP"
    llm = LLM("tiny", tensor_parallel_size=2, dtype="float64", async_scheduling=overlap)
    watch = llm.engine._executor.watch
    [victim] = watch.process_ids
    [sample] = during_a_request(llm, lambda: os.kill(victim, getattr(signal, name))).outputs
    assert sample.finish_reason == "error"
    assert ("was killed by SIGKILL" if name == "SIGKILL" else "has said nothing for") in sample.stop_reason
    assert len(sample.token_ids) > 0, "what came before the failure is told"
    [later] = llm.generate([[4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert later.outputs[0].finish_reason == "error", "all that comes later is told as well, at once"
    assert_nothing_is_left(watch)
    llm.close()
    llm.close()


def test_close_ends_the_ranks_and_two_engines_do_not_meet():
    with LLM("tiny", tensor_parallel_size=2, dtype="float64") as first:
        with LLM("tiny", tensor_parallel_size=2, dtype="float64") as second:
            watches = [llm.engine._executor.watch for llm in (first, second)]
            assert not set(watches[0].process_ids) & set(watches[1].process_ids)
            params = SamplingParams(temperature=0, max_tokens=6)
            outputs = [llm.generate([[7, 8, 9]], params, use_tqdm=False)[0] for llm in (first, second)]
            assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
        assert_nothing_is_left(watches[1])
        assert is_alive(watches[0].process_ids[0])
        assert first.generate([[1]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].finish_reason == "length"
    assert_nothing_is_left(watches[0])


def test_a_rank_that_dies_at_its_start_fails_the_construction_with_what_it_wrote(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'REFIMPL_ENGINE' in os.environ:\n    print('no such driver', flush=True)\n    os._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    watches = kept_watches(monkeypatch)
    with pytest.raises(RankFailedError, match="rank 1 ended with exit code 7:\n    no such driver"):
        LLM("tiny", tensor_parallel_size=2)
    assert_nothing_is_left(watches[0])


def test_a_rank_that_cannot_load_fails_the_construction_with_its_error(monkeypatch):
    monkeypatch.setattr(Model, "of", classmethod(lambda cls, model: cls(name="/no/such/folder")))
    watches = kept_watches(monkeypatch)
    with pytest.raises(RankFailedError, match="rank 1 failed: no model at '/no/such/folder'"):
        LLM("tiny", tensor_parallel_size=2)
    assert_nothing_is_left(watches[0])


def test_a_failure_on_rank_0_ends_the_others(monkeypatch):
    watches = kept_watches(monkeypatch)
    with pytest.raises(Exception, match="two are the least"):
        LLM(tiny(), tensor_parallel_size=2, kv_cache_memory_bytes=10)
    assert_nothing_is_left(watches[0])


def kept_watches(monkeypatch):
    watches, make = [], parallel_executor.Watch
    monkeypatch.setattr(parallel_executor, "Watch", lambda *args: watches.append(make(*args)) or watches[-1])
    return watches


ORPHANS = """
import os, sys
from refimpl import LLM
llm = LLM("tiny", tensor_parallel_size=2)
print(*llm.engine._executor.watch.process_ids, flush=True)
sys.stdin.read()
"""


def test_ranks_end_when_the_engines_process_is_killed():
    program = subprocess.Popen([sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    [process_id] = program.stdout.readline().split()
    assert is_alive(process_id)
    program.kill()
    program.wait()
    until = time.monotonic() + PATIENCE
    while is_alive(process_id) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(process_id)
    for stream in (program.stdin, program.stdout):
        stream.close()


def test_a_stranger_is_not_let_in():
    ours, theirs = socket.socketpair()
    refused = []

    def stranger():
        try:
            wire.greet(theirs, b"a guess", 1)
        except wire.WireError as error:
            refused.append(str(error))
        theirs.close()

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(wire.WireError, match="does not know this engine's token"):
        wire.admit(ours, b"the token")
    ours.close()
    thread.join()
    assert refused == ["the other end hung up"]


def test_frames_come_out_whole_however_they_arrive():
    data = b"".join(wire.HEADER.pack(b"T", count) + bytes([count]) * count for count in (0, 1, 200))
    frames = wire.Frames()
    found = [frame for place in range(0, len(data), 7) for frame in frames.feed(data[place : place + 7])]
    assert found == [(b"T", bytes([count]) * count) for count in (0, 1, 200)]
    with pytest.raises(wire.WireError, match="are the most"):
        list(frames.feed(wire.HEADER.pack(b"T", wire.MOST_BYTES + 1)))
