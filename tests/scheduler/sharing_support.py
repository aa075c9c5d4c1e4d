"""The real scheduler and manager under the shadow executor: every level of the audit after each call."""

import hashlib

from scheduler_support import books, make_request

from refimpl.cache import KVCacheManager, PrefixCache
from refimpl.cache.shadow import ShadowExecutor
from refimpl.config import SchedulerConfig
from refimpl.kernels.philox import ROOT_PATH, branch
from refimpl.scheduler import Scheduler

EOS = 0


def draw(path, token_ids):
    """What a model would draw: a function of the branch and of every token so far."""
    digest = hashlib.blake2b(repr((path, tuple(token_ids))).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 7  # a small vocabulary: EOS comes, and prefixes meet again


def expected_output(path, prompt, max_tokens):
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(draw(path, tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class Driver:
    """Adds, forks, aborts, preempts and steps; asserts after each that all three levels are clean."""

    def __init__(self, num_blocks=20, block_size=4, depth=0, prefix_cache=True, **limits):
        config = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": num_blocks * block_size} | limits
        config = SchedulerConfig(enable_chunked_prefill=True, enable_kv_cache=True, **config)
        self.cache = PrefixCache() if prefix_cache else None
        self.kv = KVCacheManager(num_blocks, block_size, self.cache)
        self.scheduler = Scheduler(config, self.kv, (EOS,), lambda: 0.0)
        self.executor = ShadowExecutor(block_size, draw)
        self.depth = depth
        self.in_flight = []
        self.requests = {}
        self.outputs = []
        self.next_sequence = 0

    def add(self, prompt, max_tokens=6, n=1, salt=None):
        request = make_request(str(len(self.requests)), list(prompt), max_tokens, n, self.next_sequence)
        request.cache_salt = salt
        for sequence in request.sequences:
            sequence.path = branch(ROOT_PATH, sequence.index)
        self.scheduler.add(request)
        return self._accept(request)

    def fork(self, parent, max_tokens=6):
        while self.in_flight:
            self.take_in()
        if parent.finished:
            return None
        max_tokens = min(max_tokens, self.scheduler.config.max_model_len - len(parent.token_ids))
        request = make_request(str(len(self.requests)), list(parent.token_ids), max_tokens, 1, self.next_sequence)
        request.cache_salt = parent.request.cache_salt
        request.sequences[0].path = branch(parent.path, parent.num_forks)
        parent.num_forks += 1
        self.scheduler.fork(parent, request)
        return self._accept(request)

    def _accept(self, request):
        self.next_sequence += len(request.sequences)
        self.requests[request.request_id] = request
        self.check()
        return request

    def abort(self, request):
        self.scheduler.abort(request)
        self.check()

    def step(self):
        output = self.scheduler.schedule()
        self.outputs.append(output)
        self.check()
        if not output.empty:
            self.in_flight.append((output, self.executor.run(output)))
        if self.in_flight and (len(self.in_flight) > self.depth or output.empty):
            self.take_in()
        self.check()
        return output

    def take_in(self):
        self.scheduler.update(*self.in_flight.pop(0))

    def check(self):
        assert books(self.scheduler) == []
        assert self.executor.violations == []
        if self.cache is not None:
            assert len(self.cache) <= self.kv.num_blocks

    def run(self, max_steps=3000):
        for _ in range(max_steps):
            self.step()
            if not self.scheduler.has_unfinished and not self.in_flight:
                break
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        assert self.kv.num_free_blocks == self.kv.num_blocks
        for request in self.requests.values():
            for sequence in request.sequences:
                wanted = expected_output(sequence.path, request.prompt_token_ids, request.max_tokens)
                if sequence.finish_reason == "abort":
                    assert sequence.output_token_ids == wanted[: len(sequence.output_token_ids)]
                else:
                    assert sequence.output_token_ids == wanted, (request.request_id, sequence.index)
        return self

    @property
    def copies(self):
        return [copy for output in self.outputs for copy in output.copies]

    @property
    def computed(self):
        return sum(output.batch.num_tokens for output in self.outputs)
