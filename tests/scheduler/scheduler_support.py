"""A scheduler with no model behind it: lengths are given, tokens are made up."""

import itertools

from refimpl.cache import KVCacheManager, audit
from refimpl.config import SchedulerConfig
from refimpl.outputs import NO_TOKEN, ModelRunnerOutput
from refimpl.request import Request, Sequence
from refimpl.request_metrics import RequestMetrics
from refimpl.sampling_params import SamplingParams
from refimpl.scheduler import Scheduler


def make_scheduler(num_blocks=100, block_size=4, eos=(), **limits):
    config = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": num_blocks * block_size,
        "enable_chunked_prefill": True,
        "enable_kv_cache": True,
    } | limits
    ticks = itertools.count()
    return Scheduler(SchedulerConfig(**config), KVCacheManager(num_blocks, block_size), eos, lambda: float(next(ticks)))


def make_request(request_id, prompt, max_tokens=4, n=1, first_sequence_id=None, **params):
    sampling = SamplingParams(max_tokens=max_tokens, n=n, **params)
    token_ids = [1] * prompt if isinstance(prompt, int) else prompt
    request = Request(str(request_id), None, token_ids, sampling, seed=0, max_tokens=max_tokens, metrics=RequestMetrics(0.0))
    first = int(request_id) * 100 if first_sequence_id is None else first_sequence_id
    request.sequences = [Sequence(first + i, request, i, list(token_ids), len(token_ids), path=i) for i in range(n)]
    for sequence in request.sequences[1:]:
        sequence.leader = request.sequences[0]
    return request


class FakeExecutor:
    """Keeps what an executor keeps of each slot, and draws token ``position % 50`` where a sequence has caught up."""

    def __init__(self):
        self.computed, self.known = {}, {}

    def run(self, output, stop_at=None):
        for admission in output.admitted:
            self.computed[admission.slot] = admission.num_computed_tokens
            self.known[admission.slot] = len(admission.token_ids)
        for slot in output.restarted:
            self.computed[slot] = 0
        tokens = []
        for slot, count in zip(output.batch.slots, output.batch.num_new_tokens, strict=True):
            self.computed[slot] += count
            assert self.computed[slot] <= self.known[slot]
            if self.computed[slot] < self.known[slot]:
                tokens.append(NO_TOKEN)
            else:
                tokens.append(2 if self.known[slot] == stop_at else 10 + self.known[slot] % 50)
                self.known[slot] += 1
        return ModelRunnerOutput(tuple(tokens))


def books(scheduler):
    return audit(scheduler.kv.snapshot({s.sequence_id: s.num_computed_tokens for s in scheduler.running}))


def run_all(scheduler, depth=0, max_steps=2000, stop_at=None, each_step=lambda output: None):
    """Step until nothing is left; returns the outputs of every step. Audits after each."""
    executor, in_flight, outputs = FakeExecutor(), [], []
    for _ in range(max_steps):
        output = scheduler.schedule()
        outputs.append(output)
        each_step(output)
        assert books(scheduler) == []
        if not output.empty:
            in_flight.append((output, executor.run(output, stop_at)))
        if in_flight and (len(in_flight) > depth or output.empty):
            scheduler.update(*in_flight.pop(0))
            assert books(scheduler) == []
        if not scheduler.has_unfinished and not in_flight:
            return outputs
    raise AssertionError(f"not done after {max_steps} steps")
