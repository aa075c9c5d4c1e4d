"""Speculation: the drafts of a step, from the proposer's hand to the verdict about them.

::

    prepare ─► propose: drafts are written behind each row's tokens ─► model over K + 1 tokens a row ─► laws behind each
                                                                                                          │
    tokens, lengths on the device ◄─ verdict: how many are accepted, and the token behind them ◄──────────┘

The target's laws are those of the sampler: adjusted, tempered and filtered by the tokens before each place, drafts included.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from refimpl.executor.drafted_rows import DraftedRows
from refimpl.executor.input_batch import InputBatch, StepInputs
from refimpl.kernels.philox import Purpose
from refimpl.kernels.transfer import array_to_device
from refimpl.outputs import NO_TOKEN, NOTHING_LEFT
from refimpl.ranks import ALONE, Ranks
from refimpl.sampling.probabilities import probabilities
from refimpl.sampling.ranking import argmax
from refimpl.sampling.sampler import Sampler, SamplingRows
from refimpl.speculative.check import check_drafts, draw_drafts
from refimpl.speculative.proposer import DraftRows, Drafts, DrawDraft, Proposer
from refimpl.speculative.rejection_sampler import Verdict, round_uniforms, verify, verify_coupled

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposed:
    """What the proposer came to in a step."""

    drafts: Drafts
    num_on_host: np.ndarray | None
    """How many there are of each row, where the host can know it without waiting."""
    failure: str | None = None
    """Why there are none, in a sentence."""


class Speculation:
    """Drafts and checks for one runner.

    Args:
        proposer: who drafts.
        input_batch: the running sequences by slot.
        coupled: accept what the target would draw by the same numbers, and nothing else.
        synthetic_acceptance: accept each draft with this probability, whatever the laws say.
        ranks: those that hold the model together. Rank 0 draws and judges drafts, and tells the others.

    """

    def __init__(
        self,
        proposer: Proposer,
        input_batch: InputBatch,
        coupled: bool = False,
        synthetic_acceptance: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.proposer = proposer
        self._ranks = ranks
        self._batch = input_batch
        self._coupled = coupled
        self.synthetic_acceptance = synthetic_acceptance
        """Set only for measurements, which may change it between requests."""
        if synthetic_acceptance is not None:
            log.warning(
                "synthetic_acceptance is %g: drafts are accepted by chance, whatever the models say; what comes out means "
                "nothing, and times alone are to be looked at", synthetic_acceptance,
            )  # fmt: skip
        self.seconds = 0.0
        """How long the last drafting took, the device's work included where the host waited for it."""
        self.measuring = False
        """Whether costs are measured: then the drafting is waited for, and as many drafts are checked as were planned, even
        where the proposer found none."""

    def propose(self, inputs: StepInputs, drafted: DraftedRows) -> Proposed:
        """Have drafts made for the rows that draw, and write them behind their tokens.

        A proposer that fails drafts nothing: the step goes on without.
        """
        first = drafted.spread_to[:, 0]
        slots, positions = drafted.slots, inputs.sampling.position[first]
        lengths = inputs.num_tokens[drafted.first]
        rows = DraftRows(
            slots_on_host=drafted.slots_on_host,
            slots=slots,
            planned=drafted.planned,
            lengths=lengths,
            bounds=inputs.bounds[drafted.batch_rows] - drafted.planned,
            positions=positions,
            token_ids=self._batch.token_ids,
            block_table=self._batch.block_table,
            block_size=self._batch.block_size,
            draw=self._drawing(drafted, lengths, positions),
        )
        begin = time.perf_counter()
        drafts, failure = self._asked(rows, drafted)
        if not self.proposer.on_every_rank:
            drafts = self._shared(drafts)
        if failure is not None:
            return Proposed(drafts, np.zeros_like(drafted.planned), failure)
        self._write(drafted, positions, drafts)
        if self.measuring:
            drafts = replace(drafts, num=drafted.num_planned)
            if slots.is_cuda:
                torch.cuda.synchronize(slots.device)
        self.seconds = time.perf_counter() - begin
        from_rank_0 = self._ranks.size > 1 and not self.proposer.on_every_rank  # which may have failed
        known = self.proposer.needs_token_ids or from_rank_0 or not slots.is_cuda
        return Proposed(drafts, drafts.num.cpu().numpy() if known else None)

    def _asked(self, rows: DraftRows, drafted: DraftedRows) -> tuple[Drafts, str | None]:
        """What the proposer answers, and why it answered nothing where it failed: the step then goes on without drafts."""
        if self._ranks.rank and not self.proposer.on_every_rank:
            return _no_drafts(rows, drafted), None
        try:
            return self._sound(self.proposer.propose(rows), drafted), None
        except Exception as error:
            if self._ranks.size > 1 and self.proposer.on_every_rank:
                raise  # the others are in the midst of it, and cannot go on
            log.warning("the proposer %s failed; these requests go on without drafts", self.proposer.name, exc_info=error)
            return _no_drafts(rows, drafted), f"the proposer {self.proposer.name} failed: {error!r}"

    def _shared(self, drafts: Drafts) -> Drafts:
        """Rank 0's drafts, on every rank."""
        if self._ranks.size == 1:
            return drafts
        columns = self._ranks.broadcast(torch.cat((drafts.token_ids, drafts.num.unsqueeze(-1)), -1))
        return replace(drafts, token_ids=columns[:, :-1].contiguous(), num=columns[:, -1].contiguous())

    def _drawing(self, drafted: DraftedRows, lengths: np.ndarray, positions: Int64[Tensor, "S"]) -> DrawDraft:
        """How drafts are drawn: by the rows' own parameters, and written at once, so that the next one's law sees them."""
        parameters = self._batch.sampling.rows(drafted.slots_on_host, drafted.slots)
        greedy = not parameters.whole and not parameters.ranked
        purpose = Purpose.TARGET if self._coupled else Purpose.DRAFT

        def draw_draft(logits: Float[Tensor, "S V"], place: int) -> tuple[Int64[Tensor, "S"], Float[Tensor, "S V"] | None]:
            rows = self._batch.sampling.at(parameters, drafted.slots_on_host, lengths + place, self._batch.token_ids)
            rows = replace(rows, position=positions + place)
            token_ids, law = torch.empty_like(positions), None
            if self._ranks.rank == 0:
                token_ids, law = _draw(logits, rows, purpose, greedy)
            token_ids = self._ranks.broadcast(token_ids)
            self._write_place(drafted, positions, token_ids, place)
            return token_ids, law

        return draw_draft

    def _sound(self, drafts: Drafts, drafted: DraftedRows) -> Drafts:
        """No more drafts than planned, and none from the first on that is no token."""
        device = drafted.slots.device  # one's own proposer may well answer from the host
        drafts = replace(drafts, token_ids=drafts.token_ids.to(device), num=drafts.num.to(device))
        if drafts.probs is not None:
            drafts = replace(drafts, probs=drafts.probs.to(device))
        if drafts.laws is not None:
            drafts = replace(drafts, laws=drafts.laws.to(device))
        drafts = drafts.padded(drafted.most)
        are_tokens = (drafts.token_ids >= 0) & (drafts.token_ids < self._batch.sampling.vocab_size)
        num = torch.minimum(torch.minimum(drafts.num, drafted.num_planned), are_tokens.long().cumprod(-1).sum(-1))
        return replace(drafts, token_ids=drafts.token_ids.masked_fill(~are_tokens, 0), num=num)

    def _write(self, drafted: DraftedRows, positions: Int64[Tensor, "S"], drafts: Drafts) -> None:
        """Write what was not drawn here: n-grams, and those of one's own proposer."""
        for place in range(drafted.most):
            self._write_place(drafted, positions, drafts.token_ids[:, place], place)

    def _write_place(
        self, drafted: DraftedRows, positions: Int64[Tensor, "S"], token_ids: Int64[Tensor, "S"], place: int
    ) -> None:
        """The drafts at one place, of the rows that have so many planned: others may have no room there."""
        rows = np.flatnonzero(drafted.planned > place)
        if len(rows) == len(token_ids):
            self._batch.token_ids[drafted.slots, positions + place] = token_ids
            return
        chosen = array_to_device(rows, token_ids.device)
        self._batch.token_ids[drafted.slots[chosen], positions[chosen] + place] = token_ids[chosen]

    def check(
        self,
        logits: Float[Tensor, "R V"],
        inputs: StepInputs,
        drafted: DraftedRows,
        drafts: Drafts,
        sampler: Sampler,
    ) -> tuple[Verdict, dict[int, str]]:
        """The verdict about a step's drafts, the same on every rank, and the failures of logits hooks, by law."""
        if self._ranks.size == 1:
            return self._judged(logits, inputs, drafted, drafts, sampler)
        laws = drafted.spread_to
        failures: dict[int, str] = {}
        columns = laws.new_empty(len(laws), drafted.most + 2)
        if self._ranks.rank == 0:
            verdict, failures = self._judged(logits, inputs, drafted, drafts, sampler)
            columns = torch.cat((verdict.token_ids, verdict.num_accepted.unsqueeze(-1)), -1)
        columns = self._ranks.broadcast(columns)
        return Verdict(columns[:, :-1].contiguous(), columns[:, -1].contiguous()), failures

    def _judged(
        self,
        logits: Float[Tensor, "R V"],
        inputs: StepInputs,
        drafted: DraftedRows,
        drafts: Drafts,
        sampler: Sampler,
    ) -> tuple[Verdict, dict[int, str]]:
        laws, rows = drafted.spread_to, inputs.sampling
        numbers = (rows.seed[laws[:, 0]], rows.path[laws[:, 0]], rows.position[laws[:, 0]])
        if not self._coupled and drafts.laws is not None:
            verdict, failures = check_drafts(logits, rows, laws, drafts.token_ids, drafts.laws, drafts.num)
        elif not self._coupled and drafts.probs is not None:
            p, failures = probabilities(logits, rows)
            p[list(failures)] = 0
            uniforms = round_uniforms(*numbers, drafted.most)
            verdict = verify(p[laws], drafts.token_ids, drafts.probs, drafts.num, uniforms.accept, uniforms.draw)
        else:
            # One-hot drafts are accepted with p(draft), and else redrawn from the others: so is a token drawn from p, which
            # is the draft with that probability. The comparison is the rejection sampler's own law.
            sampled = sampler.sample(logits, rows)
            token_ids, failures = sampled.token_ids, sampled.failures
            if failures:
                token_ids[list(failures)] = NOTHING_LEFT
            verdict = verify_coupled(token_ids[laws], drafts.token_ids, drafts.num)
        if self.synthetic_acceptance is not None:
            accepted = round_uniforms(*numbers, drafted.most).accept < self.synthetic_acceptance
            verdict = _replaced(verdict, drafts, accepted)
        return verdict, failures


def _no_drafts(rows: DraftRows, drafted: DraftedRows) -> Drafts:
    """Of every sequence none."""
    shape = len(rows.slots), drafted.most
    return Drafts(torch.zeros(shape, dtype=torch.int64, device=rows.slots.device), torch.zeros_like(rows.slots))


def _draw(
    logits: Float[Tensor, "S V"], rows: SamplingRows, purpose: Purpose, greedy: bool
) -> tuple[Int64[Tensor, "S"], Float[Tensor, "S V"] | None]:
    if greedy and rows.adjustments is None:
        return argmax(logits), None
    token_ids, law = draw_drafts(logits, rows, purpose)
    return token_ids, None if greedy else law


def _replaced(verdict: Verdict, drafts: Drafts, accepted: Bool[Tensor, "S K"]) -> Verdict:
    """The verdict replaced, after all the work of a real one: each draft is accepted by a number alone.

    The token behind them is the real one where the two rounds end at the same place, else one that was drafted, or token 0.
    """
    K = drafts.token_ids.shape[1]
    exist = torch.arange(K, device=accepted.device) < drafts.num.unsqueeze(-1)
    num_accepted = (accepted & exist).long().cumprod(-1).sum(-1)
    drafted = F.pad(drafts.token_ids.clamp(min=0), (0, 1), value=0)
    end = num_accepted.unsqueeze(-1)
    last = torch.where(end == verdict.num_accepted.unsqueeze(-1), verdict.token_ids.gather(-1, end), drafted.gather(-1, end))
    token_ids = drafted.masked_fill(torch.arange(K + 1, device=end.device) > end, NO_TOKEN)
    return Verdict(token_ids.scatter(-1, end, last), num_accepted)
