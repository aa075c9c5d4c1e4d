"""What planning costs: ``schedule()`` and ``update()`` for 256 sequences that decode, without a model.

Each takes a new block every 16th step, all in the same step: the worst case of the median is left to the maximum.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.cache import KVCacheManager, PrefixCache
from refimpl.config import SchedulerConfig
from refimpl.executor.model_free import ModelFreeExecutor
from refimpl.recorder import Recorder
from refimpl.request import Request, Sequence
from refimpl.request_metrics import RequestMetrics
from refimpl.sampling_params import SamplingParams
from refimpl.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT = 17


WARM_UP = 20
TURN = 52


def run(num_sequences: int = 256, steps: int = 500, largest: int = 100_000) -> Result:
    """Milliseconds a step, for pools and queues of several sizes, with events off and recorded.

    ``largest`` is the number of blocks of the largest pool, and of requests in the longest queue.

    The cases take turns of some dozen steps each, so that whatever else the machine does falls on all of them alike.
    """
    gc.disable()  # the many requests that wait are no garbage; a server freezes what it starts with
    cases = {
        "events off": _Case(num_sequences, steps),
        "recorded": _Case(num_sequences, steps, record=True),
        f"pool of {largest:,} blocks": _Case(num_sequences, steps, num_blocks=largest),
        "24 sequences, pool of 1,000 blocks": _Case(24, steps, num_blocks=1_000),
        "24 sequences, pool of 10,000 blocks": _Case(24, steps),
        f"24 sequences, pool of {largest:,} blocks": _Case(24, steps, num_blocks=largest),
        "10 waiting": _Case(num_sequences, steps, num_waiting=10),
        "1,000 waiting": _Case(num_sequences, steps, num_waiting=1_000),
        f"{largest:,} waiting": _Case(num_sequences, steps, num_waiting=largest),
    }
    gc.collect()
    gc.freeze()
    gc.enable()
    for turn in range(-(-(steps + WARM_UP) // TURN)):
        for case in cases.values():
            for _ in range(turn * TURN, min((turn + 1) * TURN, steps + WARM_UP)):
                case.step()
    gc.unfreeze()
    figures = {name: case.figures() for name, case in cases.items()}
    median = {name: figure["median_ms"] for name, figure in figures.items()}
    pools = [
        [median["events off"], median[f"pool of {largest:,} blocks"]],
        [m for n, m in median.items() if n.startswith("24")],
    ]
    queues = [m for name, m in median.items() if name.endswith("waiting")]
    workload = {"sequences": num_sequences, "steps": steps, "prompt": PROMPT, "block_size": BLOCK_SIZE}
    return Result(
        topic="scheduler",
        setting=setting(
            model="no model",
            model_hash="none",
            dtype="integers",
            workload=f"{num_sequences} sequences decode for {steps} steps, no model",
            workload_hash=workload_hash(workload),
            tokens_produced=sum(case.num_sequences for case in cases.values()) * steps,
        ),
        results=figures,
        checks=[
            check("schedule_update_ms_256", median["events off"], "<=", 1.0),
            check("schedule_update_ms_256_recorded", median["recorded"], "<=", 1.5),
            check("pool_size_ratio", max(max(group) / min(group) for group in pools), "<=", 1.3),
            check("queue_length_ratio", max(queues) / min(queues), "<=", 1.3),
        ],
    )


def _request(number: int, params: SamplingParams) -> Request:
    token_ids = [1 + (number * 7919 + i) % 997 for i in range(PROMPT)]
    most = params.max_tokens or 0
    request = Request(str(number), None, token_ids, params, seed=0, max_tokens=most, metrics=RequestMetrics(0.0))
    request.sequences = [Sequence(number, request, 0, list(token_ids), PROMPT, path=number)]
    return request


class _Case:
    """A scheduler whose slots are full of sequences that decode; ``step`` times ``schedule`` and ``update``."""

    def __init__(
        self, num_sequences: int, steps: int, num_blocks: int = 10_000, num_waiting: int = 0, record: bool = False
    ) -> None:
        self.num_sequences = num_sequences
        config = SchedulerConfig(
            max_num_seqs=num_sequences,
            max_num_batched_tokens=num_sequences * PROMPT,
            max_model_len=PROMPT + steps + WARM_UP + 10,
            enable_chunked_prefill=True,
            enable_kv_cache=True,
        )
        kv = KVCacheManager(num_blocks, BLOCK_SIZE, PrefixCache())
        self._scheduler = Scheduler(config, kv, (), time.monotonic)
        self._recorder = Recorder("none", config, kv, False, 1000 if record else 0, time.monotonic, str)
        self._executor = ModelFreeExecutor(num_blocks)
        self._milliseconds: list[float] = []
        params = SamplingParams(max_tokens=steps + WARM_UP + 5, ignore_eos=True)
        for number in range(num_sequences + num_waiting):
            self._scheduler.add(_request(number, params))

    def step(self) -> None:
        """One step; only the scheduler's part of it is timed."""
        started = time.perf_counter()
        output = self._scheduler.schedule()
        planned = self._recorder.plan_time(self._scheduler)
        seconds = time.perf_counter() - started
        runner_output = self._executor.run(output)
        started = time.perf_counter()
        update = self._scheduler.update(output, runner_output)
        self._recorder.record(output, update, planned)
        self._milliseconds.append(1e3 * (seconds + time.perf_counter() - started))
        assert len(output.batch.slots) == self.num_sequences, "every step is a full batch"

    def figures(self) -> dict[str, Any]:
        """Of the steps after the warm-up, milliseconds."""
        counted = sorted(self._milliseconds[WARM_UP:])
        return {
            "median_ms": statistics.median(counted),
            "p99_ms": counted[len(counted) * 99 // 100],
            "max_ms": counted[-1],
            "steps": len(counted),
        }
