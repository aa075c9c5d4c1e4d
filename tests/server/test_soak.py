"""Some seconds of everything at once: answers, refusals, disconnects, aborts. In the end the books are right.

``REFIMPL_SOAK_SECONDS`` makes it longer; the seed is printed, and ``REFIMPL_SOAK_SEED`` repeats it. A long one holds the
memory of the process too.
"""

import json
import os
import random
import resource
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from counts import SAID
from server_support import LiveServer, Raw, events, request_bytes, until

from refimpl.server.limits import Limits

SECONDS = float(os.environ.get("REFIMPL_SOAK_SECONDS", "3"))
WORKERS = 6
BLOCKS = 18
"""Of 16 tokens: what the longest request takes, so that some give way."""
GIVES_WAY = 60.0
"""Seconds within which some must have given way, also on a slow machine."""
SETTLES = 1800.0
"""Seconds of a run of which the last two thirds take no more than 2% of memory; before, logs and caches fill."""


def good(chosen):
    body = {"prompt": "x" * chosen.randint(1, 60), "max_tokens": chosen.randint(1, 60), "n": chosen.choice([1, 1, 2])}
    if chosen.random() < 0.3:
        body["stop"] = ["a", "\n"]
    if chosen.random() < 0.2:
        body["logprobs"] = 2
    if chosen.random() < 0.1:
        body["structured_outputs"] = {"choice": ["yes", "no"]}
    return body


BAD = [b"{", b'{"prompt": 5}', b'{"prompt": "x", "n": 0}', b'{"prompt": "\xff"}', b'{"prompt": [[99999]]}', b"[" * 9999]


class Worker(threading.Thread):
    """Asks by a client of its own: of one that is shared, a thread may close a connection that another was just given."""

    def __init__(self, server, seed, end):
        super().__init__()
        self.server, self.chosen, self.end_time = server, random.Random(seed), end
        self.counts = Counter()

    def run(self):
        with httpx.Client(base_url=self.server.url, timeout=60, trust_env=False) as self.http:
            while time.monotonic() < self.end_time:
                self.counts["sent"] += 1
                does = self.chosen.choice([self.whole, self.stream, self.stream, self.bad, self.leave, self.abort])
                self.counts[does()] += 1

    def complete(self, **body):
        return self.http.post("/v1/completions", json={"model": "tiny", **body})

    def whole(self):
        return self.told(self.complete(**good(self.chosen)))

    def stream(self):
        reply = self.complete(**good(self.chosen), stream=True)
        if reply.status_code == 200:
            last = events(reply.text)
            assert last[-1] == "[DONE]"
            if "error" in json.loads(last[-2]):
                return "aborted"
        return self.told(reply)

    def told(self, reply):
        if reply.status_code == 200:
            return "answered"
        error = reply.json()["error"]
        return "aborted" if error["code"] == "aborted" or "aborted" in error["message"] else "refused"

    def bad(self):
        headers = {"Content-Type": "application/json"}
        reply = self.http.post("/v1/completions", content=self.chosen.choice(BAD), headers=headers)
        assert reply.status_code == 400, reply.text
        return "refused"

    def leave(self):
        body = json.dumps(good(self.chosen) | {"stream": self.chosen.random() < 0.5, "max_tokens": 200}).encode()
        data = request_bytes("/v1/completions", body)
        client = Raw(self.server.address, data[: len(data) - self.chosen.choice([0, 0, 0, 5])])
        time.sleep(self.chosen.random() * 0.05)
        self.chosen.choice([client.vanish, client.socket.close])()
        return "left"

    def abort(self):
        ids = self.server.llm.engine.unfinished_request_ids()
        if ids:
            self.server.llm.engine.abort(self.chosen.choice(ids))
        return self.whole()


def memory_while(workers):
    """Bytes of memory that this process has, again and again until all have ended."""
    found = []
    while any(worker.is_alive() for worker in workers):
        found.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
        time.sleep(SECONDS / 300)
    return found


@pytest.mark.timeout(SECONDS + 600)
def test_everything_at_once():
    seed = int(os.environ.get("REFIMPL_SOAK_SEED", random.SystemRandom().randint(0, 10**6)))
    pool = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 16 * (BLOCKS - 1)}
    server = LiveServer(max_num_queued_reqs=64, limits=Limits(body_timeout=2), **pool)
    preempted = Counter()
    server.llm.engine.events.subscribe(lambda record: preempted.update(one.mode for one in record.preempted))
    end = time.monotonic() + SECONDS
    workers = [Worker(server, seed + number, end) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    memory = memory_while(workers)
    settled, last = memory[len(memory) // 3], memory[-1]
    counts = sum((worker.counts for worker in workers), Counter())
    told = f"{dict(counts)}, {preempted.total()} preemptions in {BLOCKS} blocks"
    SAID.append(f"soak: seed {seed}, {SECONDS:g} s, {told}, {settled / 2**20:.1f} to {last / 2**20:.1f} MiB")
    assert SECONDS < GIVES_WAY or preempted.total() > 0
    assert SECONDS < SETTLES or last <= 1.02 * settled
    assert counts["sent"] == counts["answered"] + counts["refused"] + counts["aborted"] + counts["left"]
    assert min(counts["answered"], counts["refused"], counts["left"]) > 0
    until(server.idle)
    usage = server.llm.engine.memory_report().usage
    assert usage.used_blocks == 0
    assert server.llm.engine.audit() == []
    assert server.complete(prompt="x", max_tokens=1).status_code == 200
    server.close()
