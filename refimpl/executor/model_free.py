"""ModelFreeExecutor: the engine's other half without a model. Lengths are given, tokens are seeded, nothing is computed.

The real scheduler and cache manager run over it at thousands of requests a second: for benchmarks of what they cost, for
studies of how memory is used, and for tests.
"""

from __future__ import annotations

from concurrent.futures import Future

from refimpl.memory_report import MemoryPart, SettingChange
from refimpl.outputs import NO_TOKEN, Batch, ModelRunnerOutput, SchedulerOutput
from refimpl.scheduler.drafting import Drafting
from refimpl.scheduler.preemption import PreemptionCosts

_MIX = 0x9E3779B97F4A7C15
_LOW = (1 << 52) - 1
"""A token is bits 20 to 51 of a product; carries go upwards, so no more of it needs to be kept."""


class ModelFreeExecutor:
    """Keeps only how far each slot is, and draws a token, a function of (path, position), where a sequence has caught up.

    A sequence ends by its ``max_tokens``; tokens are at least ``first_token``, so that no end-of-sequence id is drawn.
    """

    def __init__(self, num_blocks: int, vocab_size: int = 32_000, first_token: int = 1_000) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = self.weight_bytes = 0
        self.memory_parts: tuple[MemoryPart, ...] = ()
        self.setting_changes: tuple[SettingChange, ...] = ()
        self.device_name = "no model"
        self.logits_hooks = None
        self.num_host_blocks = 0
        self.preemption_costs: PreemptionCosts | None = None
        self.drafting: Drafting | None = None
        self._first_token = first_token
        self._num_drawable = vocab_size - first_token
        self._paths: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        """How many tokens of each slot's sequence are computed, ``further`` not counted."""
        self._known: dict[int, int] = {}
        self._decoding: Batch | None = None
        """The last batch, if each of its rows computed one token and drew one: then it may come again, unchanged."""
        self._mixed: list[int] = []
        """Of each row of it, the number that its last token was made of."""
        self.further = 0
        """Steps for which the last batch came again and again, each of its rows one token further."""

    def num_known(self, slot: int) -> int:
        """Tokens of a slot's sequence that are drawn or were given."""
        self._settle()
        return self._known[slot]

    def run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """A step's outcome."""
        if scheduler_output.batch is self._decoding and not (scheduler_output.admitted or scheduler_output.restarted):
            return self._decode_on()
        self._settle()
        for admission in scheduler_output.admitted:
            self._paths[admission.slot] = admission.path ^ admission.seed
            self.computed[admission.slot] = admission.num_computed_tokens
            self._known[admission.slot] = len(admission.token_ids)
        for slot in scheduler_output.restarted:
            self.computed[slot] = 0
        paths, computed, known = self._paths, self.computed, self._known
        first, drawable = self._first_token, self._num_drawable
        token_ids = []
        for slot, num_new_tokens in zip(scheduler_output.batch.slots, scheduler_output.batch.num_new_tokens, strict=True):
            position = known[slot]
            computed[slot] = reached = computed[slot] + num_new_tokens
            if reached < position:
                token_ids.append(NO_TOKEN)
                continue
            known[slot] = position + 1
            token_ids.append(first + ((paths[slot] + position) * _MIX >> 20 & 0xFFFFFFFF) % drawable)
        batch = scheduler_output.batch
        if batch.num_tokens == len(token_ids) and 0 not in batch.num_new_tokens and NO_TOKEN not in token_ids:
            self._decoding = batch
            self._mixed = [(paths[slot] + known[slot] - 1) * _MIX & _LOW for slot in batch.slots]
        return ModelRunnerOutput(tuple(token_ids))

    def _decode_on(self) -> ModelRunnerOutput:
        """The last batch again, one token further: most steps. Positions grow by 1, so products grow by ``_MIX``."""
        self.further += 1
        self._mixed = mixed = [(number + _MIX) & _LOW for number in self._mixed]
        first, drawable = self._first_token, self._num_drawable
        return ModelRunnerOutput(tuple([first + (number >> 20) % drawable for number in mixed]))

    def _settle(self) -> None:
        """Write down how far the slots came."""
        if self._decoding is not None:
            for slot in self._decoding.slots if self.further else ():
                self.computed[slot] += self.further
                self._known[slot] += self.further
            self._decoding, self.further = None, 0

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run a step at once."""
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self.run(scheduler_output))
        return future

    def close(self) -> None:
        """Nothing is held."""
