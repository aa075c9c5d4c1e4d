"""Scheduler: continuous batching. Before each step it decides which sequences compute how many tokens, and says why.

Orca (Yu et al. 2022) for scheduling by the iteration, Sarathi-Serve (Agrawal et al. 2024) for chunked prefills that share
a step with decodes, vLLM (Kwon et al. 2023) for preemption by recompute.
"""

from __future__ import annotations

from collections.abc import Callable

from refimpl.cache.kv_cache_manager import NOTHING_NEW, Allocation, KVCacheManager
from refimpl.config import SchedulerConfig
from refimpl.outputs import PrefixHit, SchedulerOutput
from refimpl.request import Sequence, Status
from refimpl.scheduler.drafting import Drafting
from refimpl.scheduler.plan import EMPTY_BATCH, StepPlan
from refimpl.scheduler.policies import Policy
from refimpl.scheduler.preemption import PreemptionCosts, choose_victim, view
from refimpl.scheduler.stopping import TextWatch
from refimpl.scheduler.taking_in import TakesIn


class Scheduler(TakesIn):
    """Plans steps. By default first come, first served, and the newest gives way."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float],
        policy: Policy | None = None,
        text: TextWatch | None = None,
        costs: PreemptionCosts | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        super().__init__(config, kv_cache_manager, clock, policy, text, costs, eos_token_ids=frozenset(eos_token_ids))
        self.drafting = drafting or Drafting(None)
        self._last_batch = EMPTY_BATCH
        self._forced: dict[int, list[tuple[str, str]]] = {}

    def schedule(self) -> SchedulerOutput:
        """Plan the next step.

        There is no prefill phase and no decode phase. Each sequence has ``num_computed_tokens`` catching up with
        ``num_tokens``; a step gives each some new tokens to compute under one budget: many for a fresh prompt, the rest of
        a chunk, or one for a sequence that decodes. Running sequences come first, in the policy's order, so nothing that
        waits holds up a decode; what is left of the budget admits waiting ones. When blocks run out, the running sequence
        that the policy names (by default the newest) gives its own back and waits.

        Everything decided here counts as done at once: ``num_computed_tokens`` is advanced, blocks are taken. So a
        further step can be planned before this one's tokens are known.
        """
        plan = StepPlan(self.step, self.config.max_num_batched_tokens)
        self._end_given_up(plan)
        for parent, child, shared in self._forked:
            if child.slot is not None:  # else it was aborted before it ever ran
                plan.forks.append((parent.sequence_id, child.sequence_id))
                plan.admit(child, shared)
        self._forked = []
        self._force_preemptions(plan)
        self._make_way(plan)
        self._continue_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan)
        self._break_standstill(plan)
        plan.chosen = [(s.slot, s.token_ids[-1]) for s in self._continued if s.slot is not None]
        plan.born, self._born, self._continued = self._born, [], []
        plan.preempted[:0] = self._dropped
        changes, decisions = self.kv.take_cache_changes(), self._log.take()
        output = plan.freeze(self._last_batch, self._arrived, self._aborted, changes, decisions, self._refused)
        self._arrived, self._aborted, self._dropped = [], [], []
        if not output.empty:  # else no executor sees it
            self._refused = []
        self._last_batch = output.batch
        self.step = self._log.step = self.step + 1
        return output

    def _make_way(self, plan: StepPlan) -> None:
        """Where the policy lets a waiting sequence take a running one's place: the last in order gives way, one by one."""
        head = self.waiting.head()
        while head is not None and not head.num_tokens_in_flight:
            last = next((sequence for sequence in reversed(self.running) if not sequence.ending), None)
            if last is None or not self.policy.preempts(view(head), view(last)) or self._fits(head):
                return
            self._preempt(last, plan, cause=f"{head.name} goes first")

    def _continue_running(self, plan: StepPlan) -> None:
        drafting = self.drafting.begin_step(len(self.running), plan.budget)
        for sequence in self.running:
            if sequence.num_computed_tokens + 1 < sequence.quiet_until and plan.budget and not drafting:
                plan.decode(sequence)
                continue
            if sequence.status is not Status.RUNNING:
                continue  # it gave way to an older one in this loop
            num_new_tokens = self._num_new_tokens(sequence, plan.budget)
            if not num_new_tokens:
                continue
            num_drafts, longest = 0, self.config.max_model_len
            if drafting:
                num_drafts = self.drafting.of_row(sequence, num_new_tokens, plan.budget, longest, self._log)
            allocation = self._allocate(sequence, num_new_tokens + num_drafts)
            if allocation is None and num_drafts:  # nobody gives way for drafts
                num_drafts, allocation = 0, self._allocate(sequence, num_new_tokens)
            if allocation is None:
                allocation = self._make_room(sequence, num_new_tokens, plan)
            if allocation is not None:
                if not self.config.enable_kv_cache:
                    self._restart(sequence, plan)
                self._add(sequence, num_new_tokens, allocation, plan, num_drafts)

    def _num_new_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens that a sequence would compute now, at most ``budget``; 0 if all its tokens are ordered already.

        A beam's next token is chosen by the host: it pauses until then.
        """
        if sequence.request.beams is not None and (sequence.num_tokens_in_flight or self._at_barrier(sequence)):
            return 0
        num_tokens = sequence.num_tokens
        if num_tokens >= sequence.most_tokens:  # ending
            return 0
        if not self.config.enable_kv_cache:
            return num_tokens if num_tokens <= budget else 0
        missing = num_tokens - sequence.num_computed_tokens
        if missing == 1:
            return min(missing, budget)
        if missing > budget and not self.config.enable_chunked_prefill:
            return 0
        return min(missing, budget, self.config.long_prefill_token_threshold or missing)

    def _make_room(self, sequence: Sequence, num_new_tokens: int, plan: StepPlan) -> Allocation | None:
        """The blocks for a running sequence's new tokens are not to be had: newer ones give way. None: not in this step."""
        while (allocation := self._allocate(sequence, num_new_tokens)) is None:
            if sequence.request.beams is not None and all(o.request is sequence.request for o in self.running):
                if self._drop_held(plan):
                    continue
                self._give_up(sequence.request)
                return None
            victim = choose_victim(self.running, set(plan.sequence_ids), self.policy)
            if victim is not sequence:
                self._preempt(victim, plan, cause=f"{sequence.name} needs a block and goes first")
                continue
            others = [other for other in self.running if other is not sequence]
            if not others and self._drop_held(plan):
                continue
            if any(other.ending for other in others) or (not others and sequence.num_tokens_in_flight):
                self._log.wait(sequence, "waits_update")
            elif not others:
                self._exhaust(sequence, plan)
            else:
                self._preempt(sequence, plan, cause="the pool is empty and all others go first")
            return None
        return allocation

    def _allocate(self, sequence: Sequence, num_new_tokens: int) -> Allocation | None:
        computed = sequence.num_computed_tokens if self.config.enable_kv_cache else 0
        return self.kv.allocate(sequence.sequence_id, computed, computed + num_new_tokens)

    def _admit_waiting(self, plan: StepPlan) -> None:
        while (sequence := self._next_to_admit()) is not None:
            if sequence.num_tokens_in_flight:
                return None  # preempted with a token in flight: its id must be known before it is computed again
            if self._at_barrier(sequence) and not self._forget_proposals(sequence, plan):
                return self._log.wait(sequence, "waits_beams")
            if self.running.full:
                return self._log.wait(sequence, "waits_slot", slots=self.config.max_num_seqs)
            cached_blocks = self._match_prefix(sequence)
            if sequence.sequence_id not in self.kv.swap:
                sequence.num_computed_tokens = len(cached_blocks) * self.kv.block_size
            num_new_tokens = self._num_new_tokens(sequence, plan.budget)
            if not num_new_tokens:
                return self._log.wait(sequence, "waits_budget", budget=self.config.max_num_batched_tokens)
            needed, free = self._needed_and_free(sequence, cached_blocks)
            if needed > free:
                if not len(self.running) and self._drop_held(plan, but=sequence):
                    continue
                return self._wait_for_blocks(sequence, needed, max(0, free))
            if sequence.sequence_id in self.kv.swap:
                self._swap_in(sequence, num_new_tokens, plan)
                continue
            allocation = self.kv.admit(
                sequence.sequence_id,
                sequence.num_computed_tokens + num_new_tokens,
                cached_blocks,
                sequence.request.cache_salt,
            )
            assert allocation is not None, "the blocks were counted above"
            self.waiting.remove(sequence)
            self._admit(sequence, num_new_tokens, allocation, plan, cached_blocks)
        return None

    def _swap_in(self, sequence: Sequence, num_new_tokens: int, plan: StepPlan) -> None:
        """Bring a swapped sequence back, whose blocks were counted: it goes on where it was."""
        computed = sequence.num_computed_tokens
        back = self.kv.swap_in(sequence.sequence_id, computed, computed + num_new_tokens)
        assert back is not None, "the blocks were counted above"
        allocation, transfers = back
        plan.swapped_in += transfers
        self.waiting.remove(sequence)
        self._take_slot(sequence)
        kept = self.kv.blocks_for(computed) - len(transfers)
        self._log.add(sequence, "swapped_in", slot=sequence.slot or 0, moved=len(transfers), kept=kept)
        plan.admit(sequence)
        self._add(sequence, num_new_tokens, allocation, plan)

    def _next_to_admit(self) -> Sequence | None:
        return self.waiting.head()

    def _fits(self, sequence: Sequence) -> bool:
        needed, free = self._needed_and_free(sequence, self._match_prefix(sequence))
        return not self.running.full and needed <= free

    def _admit(
        self,
        sequence: Sequence,
        num_new_tokens: int,
        allocation: Allocation,
        plan: StepPlan,
        cached_blocks: list[int],
    ) -> None:
        """Give a waiting sequence, whose blocks are taken, a slot and a row."""
        metrics = sequence.request.metrics
        if metrics.first_scheduled_time is None:
            metrics.num_cached_tokens = sequence.num_computed_tokens
        self._take_slot(sequence)
        if sequence.num_preemptions == 0 and not sequence.reads_prompt:  # what is computed again is no hit
            self.kv.count_query(len(sequence.token_ids), sequence.num_computed_tokens)
        if cached_blocks:
            plan.prefix_hits.append(PrefixHit(sequence.sequence_id, tuple(cached_blocks)))
            self._log.add(sequence, "prefix_hit", tokens=sequence.num_computed_tokens, blocks=len(cached_blocks))
        self._log.add(
            sequence,
            "resumed" if sequence.num_preemptions else "admitted",
            slot=sequence.slot or 0,
            new=num_new_tokens,
            total=sequence.num_tokens,
            blocks=len(allocation.new_blocks),
        )
        plan.admit(sequence, tuple(cached_blocks))
        self._add(sequence, num_new_tokens, allocation, plan)

    def _add(
        self, sequence: Sequence, num_new_tokens: int, allocation: Allocation, plan: StepPlan, num_drafts: int = 0
    ) -> None:
        """Give a running sequence a row. Where it completes a prompt, the samples that share the prompt join."""
        before = sequence.num_computed_tokens
        plan.add(sequence, num_new_tokens + num_drafts, allocation, num_drafts)
        if self.policy.dynamic:
            self.policy.computed(view(sequence), num_new_tokens + num_drafts)
        if allocation is not NOTHING_NEW:
            for _, source, target in allocation.copies:
                self._log.add(sequence, "copied", source=source, target=target)
        # Only ids that are known: a block that a token in flight fills is published by the next step's planning. So a
        # decode has something to publish right at a block's end, or one token later.
        if num_new_tokens + num_drafts > 1 or sequence.num_computed_tokens % self.kv.block_size <= 1:
            self.kv.publish(sequence.sequence_id, sequence.token_ids, sequence.num_computed_tokens)
        sequence.quiet_until = self._quiet_until(sequence)
        if num_new_tokens == 1 and before >= sequence.num_prompt_tokens:
            return  # a decode
        if left := sequence.num_tokens - sequence.num_computed_tokens - sequence.num_tokens_in_flight:
            self._log.add(sequence, "chunked", new=num_new_tokens, left=left)
        elif before < sequence.num_prompt_tokens and self.config.enable_kv_cache:
            self._log.add(sequence, "decoding")
            if self.can_share:
                self._admit_siblings(sequence, plan)

    def _quiet_until(self, sequence: Sequence) -> int:
        """How long decodes of a sequence need no look: within its block, but for first and last, which publish blocks."""
        within = (computed := sequence.num_computed_tokens) % self.kv.block_size
        decodes = computed >= sequence.num_prompt_tokens and sequence.num_tokens == computed + 1
        counts = self.policy.dynamic or sequence.request.beams is not None or not self.config.enable_kv_cache
        full = computed - within + self.kv.block_size + (self.kv.prefix_cache is None)  # else the last token publishes it
        return min(sequence.most_tokens, full) if decodes and within and not counts else 0

    def _admit_siblings(self, leader: Sequence, plan: StepPlan) -> None:
        """The other samples of a request join as soon as their prompt is computed, each with all of its blocks shared.

        They compute nothing in this step and draw their first tokens from the leader's row of logits. Where no slot is
        free, a sample waits in the queue like any other, and finds the prompt in the prefix cache.
        """
        for sibling in leader.request.sequences:
            if sibling.leader is not leader or sibling.status is not Status.WAITING or self.waiting.waits(sibling):
                continue
            if self.running.full:
                self.waiting.push(sibling)
                continue
            shared = self._share_blocks(leader, sibling)
            self._take_slot(sibling)
            sibling.num_computed_tokens = sibling.num_prompt_tokens
            self._log.add(sibling, "forked", parent=leader.name, slot=sibling.slot or 0, blocks=len(shared))
            plan.forks.append((leader.sequence_id, sibling.sequence_id))
            plan.admit(sibling, shared)
            plan.add(sibling, 0, Allocation())

    def _restart(self, sequence: Sequence, plan: StepPlan) -> None:
        """Forget that anything is cached: the naive way computes the whole context again in each step."""
        assert sequence.slot is not None
        sequence.num_computed_tokens = 0
        plan.restarted.append(sequence.slot)

    def _force_preemptions(self, plan: StepPlan) -> None:
        for request_id, mode in self._forced.pop(plan.step, ()):
            for sequence in self.running:
                if sequence.request.request_id == request_id and not sequence.finished and not sequence.ending:
                    self._preempt(sequence, plan, cause=f"asked for by preempt_at({plan.step})", mode=mode)

    def preempt_at(self, step: int, request_id: str, mode: str = "recompute") -> None:
        """For tests: force a preemption of a request's running samples when ``step`` is planned. ``mode`` "swap" swaps
        where the swap space has room.
        """
        self._forced.setdefault(step, []).append((request_id, mode))
