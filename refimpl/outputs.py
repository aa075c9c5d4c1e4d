"""The records that cross module borders: a step's plan, its outcome, and what a user gets. All but the metrics are frozen.

::

    Scheduler.schedule() ─ SchedulerOutput ─► Executor ─ ModelRunnerOutput ─► Scheduler.update() ─► RequestOutput
"""

from __future__ import annotations

from typing import Any

import msgspec

from refimpl.logprobs import Logprob
from refimpl.request_metrics import RequestMetrics
from refimpl.row_extras import RowExtras
from refimpl.sampling_numbers import SamplingNumbers

NO_TOKEN = -1
"""A row that drew nothing: its prompt is not computed to the end yet."""
BAD_LOGITS = -2
"""A row whose logits hold NaN, +inf, or no finite number at all: its request fails, alone."""
NOTHING_LEFT = -3
"""A row of which allowed_token_ids, bad_words, min_tokens or a hook left no token: its request fails, alone."""


class Batch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The rows of a step. The same object is used again, step after step, while no row changes."""

    version: int
    """Changes whenever a row does; whoever has the batch of this version needs nothing else to know the rows."""
    sequence_ids: tuple[int, ...]
    slots: tuple[int, ...]
    num_new_tokens: tuple[int, ...]
    """Tokens to compute in each row: a prefill chunk, a decode (1), or a check of drafts (K + 1)."""
    num_drafts: tuple[int, ...] = ()
    """How many tokens of each row are drafted in this step, behind its last token; empty where no row has any."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step, ``T``."""
        return sum(self.num_new_tokens)


class Admission(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A sequence takes a slot: all that the executor must know of it until it leaves."""

    slot: int
    sequence_id: int
    token_ids: tuple[int, ...]
    """Prompt, and the output so far of one that was preempted."""
    num_prompt_tokens: int
    num_computed_tokens: int
    seed: int
    path: int
    reads_from: int = 0
    """The first position whose logits, hidden state or prompt log-probability is sent back if the request asks for it.
    Samples that share a prompt leave the prompt to the first of them."""
    sampling: SamplingNumbers = SamplingNumbers()


class NewBlocks(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Blocks appended to the table of the sequence in a slot."""

    slot: int
    block_ids: tuple[int, ...]


class BlockCopy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Copy-on-write: a sequence is about to write into a block that others use too, and gets a copy of its own."""

    slot: int
    index: int
    """Which of the table's blocks it is."""
    source: int
    target: int


class Refusal(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Drafted tokens of the sequence in a slot that counted as computed until their check was known: it refused them."""

    slot: int
    num_tokens: int
    num_blocks: int
    """Blocks at the end of its table that held nothing else, and were given back."""


class Check(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What came of the drafts of one row: its first ``num_accepted`` stand, and the row's token comes after them."""

    drafts: tuple[int, ...]
    """As many as there were: fewer than planned where the proposer had no more."""
    num_accepted: int

    @property
    def accepted(self) -> tuple[int, ...]:
        """The drafts that stand."""
        return self.drafts[: self.num_accepted]


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A request joined the queue."""

    request_id: str
    sequence_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class PrefixHit(msgspec.Struct, frozen=True, gc=False):
    """A sequence began with cached blocks: their tokens are not computed again."""

    sequence_id: int
    block_ids: tuple[int, ...]


class Preemption(msgspec.Struct, frozen=True, gc=False):
    """A running sequence gave its slot and blocks back and waits again."""

    sequence_id: int
    mode: str
    block_ids: tuple[int, ...]


class Finish(msgspec.Struct, frozen=True, gc=False):
    """A sequence ended, with the blocks that it gave back.

    One of a static batch ends twice: for its user, when its row ``stays``, and again when it leaves the batch.
    """

    sequence_id: int
    reason: str
    block_ids: tuple[int, ...]
    """Those that no other sequence uses; the others of its table it shared."""
    stays: bool = False
    """Its row is computed on and its blocks stay taken: padding of a static batch."""


class CacheChanges(msgspec.Struct, frozen=True, gc=False):
    """What the prefix cache took in and forgot since the last step."""

    published: tuple[int, ...] = ()
    """Blocks whose content can be found from here on: when no sequence uses them any more, they stay cached."""
    evicted: tuple[int, ...] = ()
    """Cached blocks that were forgotten, for new blocks of this step."""
    reset: bool = False
    """Everything was forgotten, before this step was planned."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Why the scheduler did what it did to one sequence: a kind and its numbers (told by ``decision_texts.describe``)."""

    step: int
    time: float
    """Seconds on the engine's clock."""
    sequence_id: int
    kind: str
    numbers: dict[str, int | str] = {}


_WireBatch = Batch | int
_Pairs = tuple[tuple[int, int], ...]
_Tables = tuple[tuple[NewBlocks, ...], tuple[BlockCopy, ...], tuple[int, ...], tuple[Refusal, ...]]
_Changes = tuple[tuple[Admission, ...], _Tables, _Pairs, _Pairs, _Pairs]
_Wire = tuple[int, _WireBatch, _Changes]


class SchedulerOutput(msgspec.Struct, frozen=True, gc=False):
    """One step as the scheduler planned it.

    ``batch`` is whole, for whoever reads steps; it has no rows where all sequences gave way at once. An executor applies the
    changes in this order: ``refused``, ``chosen``, ``swapped_out``, ``swapped_in``, ``admitted``, ``restarted``,
    ``new_blocks``, ``copies``; then it computes ``batch.num_new_tokens`` tokens in each of ``batch.slots``, from where that
    slot stands. A row that reaches its sequence's last known token draws the next one. A row with drafts computes that last
    token and so many drafts, keeps those that the model accepts, and draws the token after them. A row of 0 tokens is a
    sample that shares its prompt with the row before it: it draws from that row's logits.
    """

    step: int
    batch: Batch
    refused: tuple[Refusal, ...] = ()
    """Of checks that became known since the last step. At depth 1, steps planned meanwhile counted these tokens too."""
    admitted: tuple[Admission, ...] = ()
    restarted: tuple[int, ...] = ()
    """Slots that compute again from position 0 (``enable_kv_cache=False``)."""
    chosen: tuple[tuple[int, int], ...] = ()
    """(slot, token): the last token of a beam, which the host chose in place of the one that its row drew."""
    swapped_out: tuple[tuple[int, int], ...] = ()
    """(device block, host block): copied before anything else of the step, since the device blocks may be written in it."""
    swapped_in: tuple[tuple[int, int], ...] = ()
    """(host block, device block): copied next."""
    new_blocks: tuple[NewBlocks, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    """All of a step's copies, to be made at once before anything is written."""
    # What follows is for readers of steps; an executor needs none of it.
    arrived: tuple[Arrival, ...] = ()
    aborted: tuple[Finish, ...] = ()
    """Ended between the last step and this one, before this one took any blocks."""
    preempted: tuple[Preemption, ...] = ()
    exhausted: tuple[Finish, ...] = ()
    """Ended in planning this step: alone, and the pool has no block left for it; or padding that left a static batch."""
    prefix_hits: tuple[PrefixHit, ...] = ()
    forks: tuple[tuple[int, int], ...] = ()
    """(parent sequence, child sequence): from here on they share all blocks until one writes."""
    cache_changes: CacheChanges = CacheChanges()
    decisions: tuple[Decision, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether an executor has nothing to do: no rows, nothing to move to the host, and no token that a search chose."""
        return not self.batch.slots and not self.swapped_out and not self.chosen

    def to_wire(self, known_version: int) -> bytes:
        """What an executor that holds the batch of ``known_version`` must be sent: msgpack, O(changes) bytes.

        Raises:
            TypeError: a request that is admitted has a logits hook, which is an object of this process.

        """
        for admission in self.admitted:
            if admission.sampling.hooked:
                raise TypeError(
                    f"sequence {admission.sequence_id} has a logits hook, which cannot be sent to another process"
                )
        batch: _WireBatch = self.batch.version if self.batch.version == known_version else self.batch
        tables = (self.new_blocks, self.copies, self.restarted, self.refused)
        changes = (self.admitted, tables, self.chosen, self.swapped_out, self.swapped_in)
        return msgspec.msgpack.encode((self.step, batch, changes))

    @classmethod
    def from_wire(cls, data: bytes, known: Batch) -> SchedulerOutput:
        """The executor's half of a SchedulerOutput, read against the batch that it holds.

        Raises:
            ValueError: the sender counts on a batch of another version than ``known``.

        """
        step, batch, (admitted, tables, chosen, out, back) = msgspec.msgpack.decode(data, type=_Wire)
        new_blocks, copies, restarted, refused = tables
        if isinstance(batch, int):
            if batch != known.version:
                raise ValueError(f"this executor holds batch {known.version}; the step counts on batch {batch}")
            batch = known
        return cls(
            step,
            batch,
            refused=refused,
            admitted=admitted,
            restarted=restarted,
            chosen=chosen,
            swapped_out=out,
            swapped_in=back,
            new_blocks=new_blocks,
            copies=copies,
        )


class ModelRunnerOutput(msgspec.Struct, frozen=True, gc=False):
    """What a step computed: one entry a row of its batch."""

    token_ids: tuple[int, ...]
    """The token drawn, ``NO_TOKEN``, ``BAD_LOGITS`` or ``NOTHING_LEFT``."""
    extras: dict[int, RowExtras] = {}
    """By row, for the few that have any."""
    checks: dict[int, Check] = {}
    """By row, for those with drafts."""
    draft_failure: str | None = None
    """Why no drafts were made for this step, in a sentence, where the proposer failed."""


class CompletionOutput(msgspec.Struct, frozen=True, gc=False):
    """One sample of a request: all of it so far, or what is new, by ``SamplingParams.output_kind``."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """None while it runs; then stop, length, abort or error."""
    stop_reason: int | str | None = None
    """The id in ``stop_token_ids`` or the string in ``stop`` that ended it, or a sentence about an error or an early end."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict a token of ``token_ids``: its own, and the most probable ones, by id. None where none were asked for."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of all output tokens so far, with deltas too."""
    score: float | None = None
    """Of a hypothesis of a beam search: its log-probability over its length to the power of ``length_penalty``."""
    logits: dict[int, Any] = {}
    """Raw logits after the token at each position asked for, numpy float32 ``[V]``, as far as it was computed."""
    hidden_states: dict[int, Any] = {}
    """The same for last hidden states, ``[H]``."""

    @property
    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None

    def joined(self, later: CompletionOutput) -> CompletionOutput:
        """Two deltas of one sample as one: text, lists and dicts put together, the rest later's."""
        changes: dict[str, Any] = {"text": self.text + later.text}
        for name in self.__struct_fields__:
            old, new = getattr(self, name), getattr(later, name)
            if isinstance(old, list | tuple) and isinstance(new, list | tuple):
                changes[name] = [*old, *new]
            elif isinstance(old, dict) and isinstance(new, dict):
                changes[name] = {**old, **new}
        return msgspec.structs.replace(later, **changes)


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What a user gets of a request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token, the first of them None; None where none were asked for, and until the prompt is computed."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache and not computed."""
        return self.metrics.num_cached_tokens

    def joined(self, later: RequestOutput) -> RequestOutput:
        """Two deltas of one request as one, for a reader who missed the first."""
        samples = {sample.index: sample for sample in self.outputs}
        for sample in later.outputs:
            earlier = samples.get(sample.index)
            samples[sample.index] = sample if earlier is None else earlier.joined(sample)
        return msgspec.structs.replace(
            later,
            outputs=[samples[index] for index in sorted(samples)],
            prompt_logprobs=later.prompt_logprobs or self.prompt_logprobs,
        )
