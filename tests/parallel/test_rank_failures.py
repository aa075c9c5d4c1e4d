"""Ranks that cannot start, cannot load or lose their engine; and who may speak to them."""

import os
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest
from rank_processes import PATIENCE, assert_nothing_is_left, ended_in_the_midst, is_alive

from refimpl import LLM
from refimpl.errors import OutOfMemoryError, RankFailedError
from refimpl.model_shares import share_of
from refimpl.models.tiny import tiny
from refimpl.parallel import executor as parallel_executor
from refimpl.parallel import torchrun, wire
from refimpl.parallel.setup import Model
from refimpl.parallel.watch import Watch


def test_a_rank_that_dies_at_its_start_fails_the_construction_with_what_it_wrote(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'REFIMPL_ENGINE' in os.environ:\n    print('no such driver', flush=True)\n    os._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    watches = kept_watches(monkeypatch)
    with pytest.raises(RankFailedError, match="rank 1 ended with exit code 7:\n    no such driver"):
        LLM("tiny", tensor_parallel_size=2)
    assert_nothing_is_left(watches[0])


def test_a_rank_whose_work_is_stuck_is_noticed_although_it_says_that_it_lives(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, time\n"
        "if 'REFIMPL_ENGINE' in os.environ:\n"
        "    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))  # in the main thread alone\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    llm = LLM("tiny", tensor_parallel_size=2, distributed_timeout_seconds=8)
    sample = ended_in_the_midst(llm, "SIGUSR1")
    assert sample.finish_reason == "error"
    assert "rank 1 lives but is stuck: others have waited" in sample.stop_reason


def test_a_rank_that_cannot_load_fails_the_construction_with_its_error(monkeypatch):
    monkeypatch.setattr(Model, "of", classmethod(lambda cls, model: cls(name="/no/such/folder")))
    watches = kept_watches(monkeypatch)
    with pytest.raises(RankFailedError, match="rank 1 failed: no model at '/no/such/folder'"):
        LLM("tiny", tensor_parallel_size=2)
    assert_nothing_is_left(watches[0])


def test_the_ranks_of_a_machine_need_room_for_all_of_their_shares(monkeypatch):
    """Each share alone would fit, and more: nothing is loaded."""
    watches = kept_watches(monkeypatch)
    share = 8 * share_of(tiny().config, 2).num_parameters
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: 2 * share - 2)
    with pytest.raises(OutOfMemoryError, match="on each of 2 ranks here, together") as caught:
        LLM("tiny", tensor_parallel_size=2, dtype="float64")
    assert caught.value.numbers == {"needed": 2 * share, "free": 2 * share - 2}
    assert_nothing_is_left(watches[0])


def test_ranks_on_other_machines_take_nothing_of_this_ones_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert torchrun.ranks_here(16) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert torchrun.ranks_here(16) == 8


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
import socket, sys
from refimpl.parallel.processes import Processes
from refimpl.parallel.watch import Watch
watch = Watch(2, {1: b"{}"}, Processes(2), socket.create_server(("127.0.0.1", 0)), b"token", 300)
watch.wait_connected()
print(*watch.process_ids, flush=True)
sys.stdin.read()
"""


def test_ranks_end_when_the_engines_process_is_killed():
    """Whatever they do at that moment: this one has heard nothing to load yet."""
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


class Killed:
    """Processes of which one ends: found out only by who waits for it."""

    ended = False

    def wait(self, seconds):
        self.ended = True

    def dead(self):
        return "rank 1 was killed by SIGKILL" if self.ended else None


@pytest.mark.parametrize("lost", [ConnectionResetError(104, "Connection reset by peer"), b""])
def test_a_lost_connection_is_told_by_what_ended_the_rank(lost):
    watch = object.__new__(Watch)
    watch.failure, watch._closing, watch._changed = None, False, threading.Condition()
    watch._processes, watch._selector, watch._connections = Killed(), Mock(), {1: Mock()}
    watch._connections[1].recv = Mock(side_effect=[lost])
    watch._frames, watch._heard = {1: wire.Frames()}, {}
    watch._hear(1)
    watch._selector.unregister.assert_called_once_with(watch._connections[1])
    assert watch.failure == "rank 1 was killed by SIGKILL"
