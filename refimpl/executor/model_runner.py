"""ModelRunner: one step on one device: inputs → model → sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.attention.backend import AttentionBackend, RecordsPrompts
from refimpl.cache.kv_cache import KVCache
from refimpl.executor.check_graphs import CHECK_SIZES, CheckGraphs
from refimpl.executor.cuda_graphs import DecodeGraphs, DecodeStep
from refimpl.executor.drafted_rows import DraftedRows
from refimpl.executor.input_batch import InputBatch, StepInputs
from refimpl.executor.mixed_graphs import MixedGraphs, MixedStep, recorded_sets
from refimpl.executor.pending import PendingOutput
from refimpl.executor.pending_checks import PendingChecks
from refimpl.executor.readout import read_row
from refimpl.executor.speculation import Speculation
from refimpl.kernels.transfer import to_device
from refimpl.logprobs import TokenLogprobs
from refimpl.models.llama import LlamaForCausalLM
from refimpl.outputs import Batch, ModelRunnerOutput, SchedulerOutput
from refimpl.ranks import ALONE, Ranks
from refimpl.row_extras import RowExtras
from refimpl.sampling.logprobs import token_logprobs
from refimpl.sampling.sampler import Sampled, Sampler
from refimpl.speculative.rejection_sampler import Verdict


class ModelRunner:
    """Owns the model's and the cache's tensors, and the running batch.

    Where ``ranks`` hold the model together, all of them run the same steps. Rank 0 draws, and tells the others.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: KVCache,
        input_batch: InputBatch,
        backend: AttentionBackend,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.kv_cache = kv_cache
        self.input_batch = input_batch
        self.backend = backend
        self.sampler = Sampler()
        self.graphs: DecodeGraphs | None = None
        """Recorded steps of decodes alone; on a GPU, once they are captured."""
        self.mixed_graphs: list[MixedGraphs] = []
        """Recorded steps of decodes and prompts, likewise: the first that serves a step has the fewest empty rows."""
        self.check_graphs: CheckGraphs | None = None
        """Recorded checks of drafts, likewise."""
        self.speculation: Speculation | None = None
        """Who drafts tokens for steps with drafts, and checks them."""

    @torch.inference_mode()
    def capture(self, sizes: list[int], token_sizes: list[int], checks: Sequence[int] = ()) -> None:
        """Record CUDA graphs: for decode steps of up to so many sequences each, for mixed ones of so many tokens each, and
        for ``checks`` of so many drafts.
        """
        pool = None
        for rows, tokens in reversed(recorded_sets(token_sizes, sizes[-1]) if token_sizes else []):  # the larger ones first
            self.mixed_graphs.insert(0, MixedGraphs(self.mixed_step(rows, tokens[-1]), tokens, pool))
            pool = self.mixed_graphs[0].pool
        step = self.decode_step(sizes[-1])
        self.graphs = DecodeGraphs(step, sizes, pool)
        if checks:
            check_sizes = [size for size in CHECK_SIZES if size <= sizes[-1]]
            self.check_graphs = CheckGraphs(step, check_sizes, [drafts + 1 for drafts in checks], self.graphs.pool)

    def decode_step(self, most_rows: int) -> DecodeStep:
        """A decode of up to so many sequences, to be recorded."""
        return DecodeStep(self.model, self.kv_cache, self.input_batch, self.backend, most_rows)

    def mixed_step(self, most_rows: int, most_tokens: int) -> MixedStep:
        """A step of prompts and decodes, to be recorded."""
        assert isinstance(self.backend, RecordsPrompts)
        return MixedStep(self.model, self.kv_cache, self.input_batch, self.backend, most_rows, most_tokens)

    def release_graphs(self) -> None:
        """Give the recordings' memory back."""
        for graphs in (self.graphs, *self.mixed_graphs, self.check_graphs):
            if graphs is not None:
                graphs.release()

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, draw its tokens, and wait for them."""
        return self.launch(scheduler_output).result()

    @torch.inference_mode()
    def launch(self, scheduler_output: SchedulerOutput) -> PendingOutput | PendingChecks:
        """Order one step: on a GPU it is computed after those before it, and nothing here waits for it."""
        self.kv_cache.swap_out(scheduler_output.swapped_out)
        self.kv_cache.swap_in(scheduler_output.swapped_in)
        self.input_batch.apply(scheduler_output)
        self.kv_cache.copy_blocks([(copy.source, copy.target) for copy in scheduler_output.copies])
        if self.speculation is not None:
            self.speculation.proposer.apply(scheduler_output)
        if not scheduler_output.batch.slots:
            return PendingOutput(0, [], None, {})
        inputs = self.input_batch.prepare(scheduler_output.batch)
        if inputs.drafted is not None:
            return self._launch_with_drafts(scheduler_output.batch, inputs, inputs.drafted)
        return self._launch(inputs)

    def _launch(self, inputs: StepInputs, draft_failure: str | None = None) -> PendingOutput:
        """A step without drafts."""
        hidden = self._hidden(inputs)
        extras = self._read(hidden, inputs)
        states = self._states(hidden, inputs)
        token_ids = self._draw(states, inputs, extras)
        if self.speculation is not None and inputs.drawing:
            self.speculation.proposer.observe(inputs.slots_on_host, inputs.slots, states)
        return self.input_batch.commit(inputs, token_ids, extras, draft_failure)

    def _launch_with_drafts(self, batch: Batch, inputs: StepInputs, drafted: DraftedRows) -> PendingOutput | PendingChecks:
        """A step in which some rows have drafts: made first, computed with the rest, and checked."""
        speculation = self.speculation
        assert speculation is not None
        proposed = speculation.propose(inputs, drafted)
        if proposed.num_on_host is not None and (proposed.num_on_host < drafted.planned).any():
            num = np.asarray(batch.num_drafts)
            num[drafted.batch_rows] = proposed.num_on_host
            inputs = self.input_batch.prepare(self.input_batch.take_back(batch, num))
            if inputs.drafted is None:
                return self._launch(inputs, proposed.failure)
            drafted = inputs.drafted
            proposed = replace(proposed, drafts=proposed.drafts.padded(drafted.most))
        inputs = self.input_batch.with_drafts(inputs)
        states, extras = self._checked_states(inputs, drafted)
        logits = self.model.compute_logits(states)
        verdict, failures = speculation.check(logits, inputs, drafted, proposed.drafts, self.sampler)
        self.input_batch.commit_checked(inputs, drafted, verdict)
        ends = drafted.spread_to.gather(-1, verdict.num_accepted.unsqueeze(-1)).squeeze(-1)
        speculation.proposer.observe(drafted.slots_on_host, drafted.slots, states[ends])
        self._tell_of_checks(logits, inputs, drafted, verdict, failures, extras)
        return PendingChecks(len(inputs.row_slots), drafted, proposed.drafts, verdict, extras, proposed.failure)

    def _checked_states(self, inputs: StepInputs, drafted: DraftedRows) -> tuple[Float[Tensor, "R H"], dict[int, RowExtras]]:
        """The hidden states behind each draft, by a recorded graph where all rows are decodes; and what else is read."""
        graphs, counts = self.check_graphs, inputs.query_lens
        if graphs is not None and len(drafted.batch_rows) == len(counts) and graphs.serves(counts):
            hidden = graphs.replay(inputs.row_slots, inputs.bounds, int(counts[0]))
            return hidden[drafted.row, drafted.place], {}
        hidden = self._hidden(inputs)
        return self._states(hidden, inputs), self._read(hidden, inputs)

    def _read(self, hidden: Float[Tensor, "T H"], inputs: StepInputs) -> dict[int, RowExtras]:
        """What is read at positions that draw nothing."""
        batch, model = self.input_batch, self.model
        return {
            read.row: read_row(read, hidden, batch.token_ids, model.compute_logits, model.config.vocab_size)
            for read in batch.reads(inputs)
        }

    def _states(self, hidden: Float[Tensor, "T H"], inputs: StepInputs) -> Float[Tensor, "R H"]:
        """The hidden states that are drawn from: a prompt's other tokens need no logits."""
        states = hidden[inputs.last_tokens]
        return states if inputs.logits_row is None else states[inputs.logits_row]

    def _hidden(self, inputs: StepInputs) -> Float[Tensor, "T H"]:
        """The model's hidden states, by a recorded graph where there is one for the step."""
        if self.graphs is not None and self.graphs.serves(inputs):
            return self.graphs.replay(inputs.row_slots, inputs.bounds)
        if self.speculation is None:
            for graphs in self.mixed_graphs:
                if graphs.serves(inputs):
                    return graphs.replay(inputs)
        tokens = self.input_batch.model_inputs(inputs)
        attention = self.backend.begin_step(tokens.attention)
        hidden: Tensor = self.model(tokens.input_ids, tokens.positions, self.kv_cache.layers, attention)
        return hidden

    def _draw(self, states: Float[Tensor, "R H"], inputs: StepInputs, extras: dict[int, RowExtras]) -> Int64[Tensor, "R"]:
        """One token a row that draws. What is told of these rows joins ``extras``."""
        if not inputs.drawing:
            return inputs.slots
        logits = self.model.compute_logits(states)
        first = self.ranks.rank == 0
        sampled = self.sampler.sample(logits, inputs.sampling) if first else Sampled(torch.empty_like(inputs.slots))
        token_ids = self.ranks.broadcast(sampled.token_ids)
        for row, failure in sampled.failures.items():
            _join(extras, inputs.drawing[row], failure=failure)
        found = self._logprobs(logits, token_ids, inputs.logprobs)
        for row, logprobs in found.items():
            _join(extras, inputs.drawing[row], logprobs=(logprobs,))
        return token_ids

    def _logprobs(
        self, logits: Float[Tensor, "R V"], token_ids: Int64[Tensor, "R"], asked: dict[int, int]
    ) -> dict[int, TokenLogprobs]:
        """Those of the tokens of the rows that ask. A row that failed has no token; it is told of the first one's."""
        if not asked:
            return {}
        rows = to_device(torch.tensor(list(asked)), logits.device)
        found = token_logprobs(logits[rows], token_ids[rows].clamp(min=0), list(asked.values()))
        return dict(zip(asked, found, strict=True))

    def _tell_of_checks(
        self,
        logits: Float[Tensor, "R V"],
        inputs: StepInputs,
        drafted: DraftedRows,
        verdict: Verdict,
        failures: dict[int, str],
        extras: dict[int, RowExtras],
    ) -> None:
        """What else is told of rows with drafts, of all tokens up to the one drawn. Only where asked, and then it waits."""
        if not failures and not inputs.logprobs:
            return
        found = self._logprobs(logits, verdict.token_ids[drafted.row, drafted.place], inputs.logprobs)
        for row, first, num_accepted in zip(
            drafted.batch_rows.tolist(), drafted.first.tolist(), verdict.num_accepted.tolist(), strict=True
        ):
            if (failure := failures.get(first + num_accepted)) is not None:
                _join(extras, row, failure=failure)
            if first in found:
                _join(extras, row, logprobs=tuple(found[first + place] for place in range(num_accepted + 1)))


def _join(extras: dict[int, RowExtras], row: int, **found: Any) -> None:
    """Add something to what a row sends back."""
    extras[row] = msgspec.structs.replace(extras.get(row, RowExtras()), **found)
