"""SimulatedExecutor: steps take the time that the roofline says, on a clock that only they move."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import msgspec

from refimpl.executor.model_free import ModelFreeExecutor
from refimpl.outputs import NO_TOKEN, Batch, ModelRunnerOutput, SchedulerOutput
from refimpl.scheduler.drafting import Drafting
from refimpl.simulate.deployment import Deployment
from refimpl.simulate.roofline import StepWork


class VirtualClock:
    """Seconds since the start of a simulation. Called, it tells the time; it never goes back."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance_to(self, time: float) -> None:
        """Let the time pass until then; nothing happens if it has passed."""
        if time > self.now:
            self.now = time


class _Timed(Future[ModelRunnerOutput]):
    """A step's outcome, known here and now, but not before its time: who waits for it lets the clock run until then.

    It is made without the locks of its parent, which nobody else could ever wait for.
    """

    def __init__(self, outcome: ModelRunnerOutput, clock: VirtualClock, time: float) -> None:
        self._outcome, self._clock, self._time = outcome, clock, time

    def done(self) -> bool:
        """Always."""
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """The outcome, once it is time."""
        self._clock.advance_to(self._time)
        return self._outcome


class SimulatedExecutor(ModelFreeExecutor):
    """An :class:`~refimpl.executor.executor.Executor` without a device: tokens are seeded, time is arithmetic.

    Steps run one after the other, each from the moment when it is submitted or the one before it ends.

    Args:
        deployment: what is simulated.
        num_blocks: usable blocks of its KV cache.
        block_size: tokens in one.
        clock: moved on by whoever waits for a step.
        num_host_blocks: blocks of its swap space.

    """

    def __init__(
        self, deployment: Deployment, num_blocks: int, block_size: int, clock: VirtualClock, num_host_blocks: int = 0
    ) -> None:
        vocab_size = deployment.model.vocab_size
        super().__init__(num_blocks, vocab_size, first_token=min(1_000, vocab_size // 2))
        self.num_host_blocks = num_host_blocks
        self.drafting: Drafting | None = None
        self.preemption_costs = deployment.roofline.preemption_costs() if num_host_blocks else None
        self.block_bytes = deployment.block_bytes(block_size)
        self.weight_bytes = deployment.roofline.weight_bytes
        self.device_name = deployment.name
        self.busy_seconds = 0.0
        """Of all steps so far, together."""
        self.memory_bound_seconds = 0.0
        """Of those whose bytes take longer than their operations, transfers left out."""
        self.transfer_seconds = 0.0
        """Of those in which blocks are swapped out or in."""
        self.blocks_out = self.blocks_in = 0
        """Blocks that went to the host, and came back."""
        self._block_size = block_size
        self._roofline = deployment.roofline
        self._clock = clock
        self._free_at = 0.0
        self._layers_of = Counter(deployment.model.windows if deployment.model.windowed else ())
        """By window: how many layers have it. Empty where there are no windows."""
        self._context = 0
        """Tokens of all contexts of the last step's rows."""

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Order a step; its future moves the clock to the step's end when it is waited for."""
        outcome = self.run(scheduler_output)
        work = self._work(scheduler_output, outcome)
        if scheduler_output.swapped_out or scheduler_output.swapped_in:
            out, back = len(scheduler_output.swapped_out), len(scheduler_output.swapped_in)
            self.blocks_out, self.blocks_in = self.blocks_out + out, self.blocks_in + back
            work = msgspec.structs.replace(work, swapped=(out + back) * self._block_size)
        times = self._roofline.times(work)
        seconds, transfer = times.seconds, times.transfer
        self.busy_seconds += seconds
        self.transfer_seconds += transfer
        if times.memory >= times.compute:
            self.memory_bound_seconds += seconds - transfer
        now = self._clock.now
        self._free_at = (now if now > self._free_at else self._free_at) + seconds
        return _Timed(outcome, self._clock, self._free_at)

    def _work(self, output: SchedulerOutput, outcome: ModelRunnerOutput) -> StepWork:
        """Counts of a step that was just run. A row of no new tokens shares the logits, and so the reads, of another."""
        batch = output.batch
        if self._layers_of:
            return self._work_within_windows(batch, outcome)
        if self.further:
            rows = len(batch.slots)
            total = self._context = self._context + rows
            return StepWork(rows, rows, total, total)
        contexts = [self.computed[slot] for slot in batch.slots]
        tokens = batch.num_tokens
        rows = len(contexts) - outcome.token_ids.count(NO_TOKEN)
        if tokens == len(contexts) and 0 not in batch.num_new_tokens:
            total = self._context = sum(contexts)
            return StepWork(tokens, rows, total, total)  # all decode: one query sees its whole context
        chunks = [(n, context) for n, context in zip(batch.num_new_tokens, contexts, strict=True) if n]
        pairs = sum(n * context - n * (n - 1) // 2 for n, context in chunks)
        return StepWork(tokens, rows, sum(context for _, context in chunks), pairs)

    def _work_within_windows(self, batch: Batch, outcome: ModelRunnerOutput) -> StepWork:
        counts = zip(batch.slots, batch.num_new_tokens, strict=True)
        seen = [self._seen(n, self.computed[slot] + self.further) for slot, n in counts if n]
        rows = len(batch.slots) - outcome.token_ids.count(NO_TOKEN)
        return StepWork(batch.num_tokens, rows, sum(keys for keys, _ in seen), sum(pairs for _, pairs in seen))

    def _seen(self, n: int, context: int) -> tuple[float, float]:
        """Keys that the last ``n`` tokens of a context read, and (query, key) pairs: means over the layers."""
        keys = pairs = 0
        for window, layers in self._layers_of.items():
            reach = context if window is None else window
            before = min(n, max(0, reach - (context - n)))  # queries whose window reaches to the text's beginning
            keys += layers * min(context, reach + n - 1)
            pairs += layers * (before * (context - n) + before * (before + 1) // 2 + (n - before) * reach)
        total = self._layers_of.total()
        return keys / total, pairs / total
