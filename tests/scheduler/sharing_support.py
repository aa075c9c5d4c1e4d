"""The real scheduler and manager under the shadow executor: every level of the audit after each call."""

import contextlib
import hashlib
import itertools

from counts import COUNTS
from scheduler_support import make_request

from refimpl.cache import audit, make_kv_cache_manager
from refimpl.cache.shadow import ShadowExecutor
from refimpl.config import EngineArgs
from refimpl.errors import RequestError
from refimpl.kernels.philox import ROOT_PATH, branch
from refimpl.outputs import NO_TOKEN
from refimpl.recorder import Recorder
from refimpl.scheduler import StepUpdate
from refimpl.scheduler.choose import make_scheduler
from refimpl.scheduler.drafting import Drafting
from refimpl.scheduler.policies import choose_policy

EOS = 0
LOG_CAPACITY = 10_000


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


def draft(path, token_ids):
    """A guess of what will be drawn, right three times out of four."""
    digest = hashlib.blake2b(repr((token_ids, path)).encode(), digest_size=1).digest()[0]
    return draw(path, token_ids) if digest % 4 else digest % 7


class RandomLength:
    """A DraftLength that is another one each time, and 0 now and then."""

    def __init__(self, most):
        self.most, self.calls = most, 0
        self.seen = []

    def choose(self, num_sequences):
        self.calls += 1
        return (self.calls * 2654435761 >> 7) % (self.most + 1), 1 + self.calls % 3 * num_sequences

    def observe(self, num_drafts, num_accepted):
        self.seen.append((num_drafts, num_accepted))


class Driver:
    """Adds, forks, aborts, preempts and steps; asserts after each that all three levels are clean. Keeps an event log."""

    def __init__(self, num_blocks=20, block_size=4, depth=0, prefix_cache=True, num_host_blocks=0, drafts=0, **options):
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": num_blocks * block_size, "watermark": 0}
        args = EngineArgs(block_size=block_size, enable_prefix_caching=prefix_cache, **limits | options)
        config = args.scheduler_config(args.max_model_len, num_blocks * block_size)
        ticks = itertools.count()

        def clock():
            return float(next(ticks))

        self.kv = make_kv_cache_manager(args, num_blocks, config.max_model_len, num_host_blocks)
        self.cache = self.kv.prefix_cache
        self.scheduler = make_scheduler(args, config, self.kv, (EOS,), clock, choose_policy(args.scheduling_policy))
        self.drafts = RandomLength(drafts)
        self.scheduler.drafting = Drafting(self.drafts if drafts else None)
        self.executor = ShadowExecutor(block_size, draw, draft)
        self.recorder = Recorder("shadow", config, self.kv, depth > 0, LOG_CAPACITY, clock, str, None, drafts)
        self.depth = depth
        self.in_flight = []
        self.not_recorded = {}
        """By step: what was planned, and when, of steps whose tokens were not taken in."""
        self.requests = {}
        self.outputs = []
        self.next_sequence = 0
        self.num_calls = self.num_audits = 0

    @contextlib.contextmanager
    def called(self):
        """A call from outside. Followed or refused, it leaves clean books."""
        self.num_calls += 1
        COUNTS["calls"] += 1
        try:
            yield
        except RequestError:
            self.check()
            raise
        self.check()

    def add(self, prompt, max_tokens=6, n=1, salt=None, priority=0, user=None):
        request = make_request(str(len(self.requests)), list(prompt), max_tokens, n, self.next_sequence)
        request.cache_salt, request.priority, request.user = salt, priority, user
        for sequence in request.sequences:
            sequence.path = branch(ROOT_PATH, sequence.index)
        with self.called():
            self.scheduler.add(request)
            return self._accept(request)

    def fork(self, parent, max_tokens=6):
        """As the engine does: all tokens of the parent must be known. None if it ends with one of them."""
        with self.called():
            while self.in_flight:
                self.take_in()
            if parent.finished:
                return None
            max_tokens = min(max_tokens, self.scheduler.config.max_model_len - len(parent.token_ids))
            request = make_request(str(len(self.requests)), list(parent.token_ids), max_tokens, 1, self.next_sequence)
            request.cache_salt, request.priority = parent.request.cache_salt, parent.request.priority
            request.user = parent.request.user
            request.sequences[0].path = branch(parent.path, parent.num_forks)
            self.scheduler.fork(parent, request)
            parent.num_forks += 1
            return self._accept(request)

    def _accept(self, request):
        self.next_sequence += len(request.sequences)
        self.requests[request.request_id] = request
        return request

    def abort(self, request):
        with self.called():
            self.scheduler.abort(request)

    def preempt(self, request, mode="recompute"):
        """When the next step is planned."""
        with self.called():
            self.scheduler.preempt_at(self.scheduler.step, request.request_id, mode)

    def reset(self):
        with self.called():
            self.kv.reset_prefix_cache()

    def step(self):
        with self.called():
            output = self.scheduler.schedule()
            self.not_recorded[output.step] = output, self.recorder.plan_time(self.scheduler)
            self.outputs.append(output)
            self.check()
            if not output.empty:
                self.in_flight.append((output, self.executor.run(output)))
                self.same_tables()
            if self.in_flight and (len(self.in_flight) > self.depth or output.empty):
                self.take_in()
            if output.empty:
                self.record(output, StepUpdate([]))
            return output

    def same_tables(self):
        """What the executor was told adds up to the scheduler's own tables."""
        for sequence in self.scheduler.running:
            told, meant = self.executor.table(sequence.slot), self.kv.table(sequence.sequence_id)
            assert told == meant, f"the executor has {told} as the table of {sequence.name}, and it is {meant}"

    def take_in(self):
        output, drawn = self.in_flight.pop(0)
        self.record(output, self.scheduler.update(output, drawn))

    def record(self, output, update):
        _, planned = self.not_recorded.pop(output.step)
        self.recorder.record(output, update, planned)

    def check(self):
        """All three levels, and the count of free blocks, which the scheduler goes by."""
        snapshot = self.scheduler.snapshot()
        wrong = audit(snapshot) + self.executor.violations
        assert not wrong, "; ".join(str(getattr(violation, "text", violation)) for violation in wrong)
        counted = self.kv.num_free_blocks + self.kv.num_stranded_blocks
        free = len(snapshot.free_ids) + len(snapshot.cached_ids)
        assert counted == free, f"{counted} blocks count as free, and {free} are"
        assert self.kv.swap.num_free == len(snapshot.host_free_ids)
        assert self.cache is None or len(self.cache) <= self.kv.num_blocks
        self.num_audits += 1
        COUNTS["audits"] += 1

    def run(self, max_steps=3000):
        """Step until nothing is left; then every sequence has the tokens that it would have had alone."""
        for _ in range(max_steps):
            self.step()
            if not self.scheduler.has_unfinished and not self.in_flight:
                break
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        assert self.kv.num_free_blocks + self.kv.num_stranded_blocks == self.kv.num_blocks
        assert self.kv.swap.num_free == self.kv.swap.num_blocks
        for request in self.requests.values():
            for sequence in request.sequences:
                got = sequence.output_token_ids
                wanted = expected_output(sequence.path, request.prompt_token_ids, request.max_tokens)
                if sequence.finish_reason == "abort":
                    wanted = wanted[: len(got)]
                assert got == wanted, f"sequence {sequence.sequence_id} drew {got}, not {wanted}"
        return self

    def save_trace(self, path, failure):
        """Save the event log of a failure, with the step at which it stood still; ``failure`` is told in the header."""
        if self.scheduler.has_news:  # what no step has told yet, in a last one
            with contextlib.suppress(Exception):
                output = self.scheduler.schedule()
                self.not_recorded[output.step] = output, self.recorder.plan_time(self.scheduler)
        for output, _ in list(self.not_recorded.values()):
            self.record(output, StepUpdate([NO_TOKEN] * len(output.batch.slots)))
        self.recorder.events.header.config["failure"] = failure
        self.recorder.events.save(path)

    @property
    def copies(self):
        return [copy for output in self.outputs for copy in output.copies]

    @property
    def computed(self):
        return sum(output.batch.num_tokens for output in self.outputs)
