"""Request and Sequence: what a user asked for, and the samples that grow from it.

A request has one prompt and ``n`` samples. Each sample is a :class:`Sequence`, the unit that the cache and the scheduler
handle. There is no prefill phase and no decode phase: a sequence has ``num_computed_tokens`` catching up with
``num_tokens``, and a token is drawn whenever it has caught up.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from refimpl.beam_group import BeamGroup, Hypothesis
from refimpl.logprobs import TokenLogprobs
from refimpl.outputs import Decision
from refimpl.request_metrics import RequestMetrics
from refimpl.row_extras import RowExtras
from refimpl.sampling_numbers import SamplingNumbers, plain_numbers
from refimpl.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error", "pruned"]
"""Why a sequence ended; "pruned" is a beam that nothing went on from."""

DECISIONS_KEPT = 256
"""Decisions remembered a sample; beyond that the oldest are forgotten."""


class Status(enum.Enum):
    """Where a sequence is. Preempted sequences are waiting again, with their tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Readings:
    """Raw logits and last hidden states by position, as ``return_logits`` and ``return_hidden_states`` ask."""

    logits: dict[int, Any] = field(default_factory=dict)
    hidden_states: dict[int, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request.

    ``token_ids`` are prompt and output, as far as their ids are known here. ``num_tokens_in_flight`` more have been
    ordered from the executor; their ids arrive with ``Scheduler.update``. Two sequences are never equal (identity).
    """

    sequence_id: int
    """Unique in the engine's life, in order of arrival: the lower is the older."""
    request: Request
    index: int
    """Which of the request's n samples this is."""
    token_ids: list[int]
    num_prompt_tokens: int
    path: int
    """The branch of randomness, 64 bits: sample i of n has its own (:func:`refimpl.kernels.philox.branch`)."""
    leader: Sequence | None = None
    """The sample of the same request whose prompt this one shares; None for the first, and for one that was forked."""
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache, or ordered to be: advanced by ``Scheduler.schedule``."""
    num_tokens_in_flight: int = 0
    quiet_until: int = 0
    """As long as fewer tokens are computed, one more is a decode that changes nothing but counts: there is room for it in a
    block of its own, it fills none and begins none, and nothing ends. ``Scheduler`` knows when that is so."""
    order: Any = None
    """Its place among the running ones, from the policy: the lowest goes first, the last gives way."""
    slot: int | None = None
    """The row of the running batch that it holds."""
    drafts: bool = field(init=False)
    """Whether tokens may be drafted for it, where the engine does."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id, the stop string, or the sentence that explains an error or an early end."""
    num_preemptions: int = 0
    num_forks: int = 0
    """How many branches left it: each takes a path of its own."""
    token_times: list[float] = field(default_factory=list)
    """When each output token became known, in seconds of the engine's clock."""
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=DECISIONS_KEPT))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Those of each output token, where they were asked for."""
    readings: Readings = field(default_factory=Readings)
    """What was asked for at positions of the output."""
    hypothesis: Hypothesis | None = None
    """Of a beam search, when it is done."""
    most_tokens: int = field(init=False)
    """Tokens, prompt and output, with which it ends at the latest."""

    def __post_init__(self) -> None:
        self.most_tokens = self.num_prompt_tokens + self.request.max_tokens
        params = self.request.params
        # What is read of a position is read when it is computed, which must be once.
        self.drafts = self.request.beams is None and not (params.return_logits or params.return_hidden_states)

    @property
    def reads_prompt(self) -> bool:
        """Whether it must compute every token of its prompt, for what the request reads there: the first sample does."""
        return self.index == 0 and self.request.params.reads_prompt_logits

    def take(self, extras: RowExtras) -> None:
        """Keep what a row sent back; by position, so that what is computed again is only written again."""
        self.request.prompt_logprobs.update(extras.prompt_logprobs)
        for position, array in extras.logits.items():
            self._readings_at(position).logits[position] = array
        for position, array in extras.hidden_states.items():
            self._readings_at(position).hidden_states[position] = array

    def _readings_at(self, position: int) -> Readings:
        """The prompt is the same for all samples."""
        return self.request.readings if position < self.num_prompt_tokens else self.readings

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those in flight counted."""
        return len(self.token_ids) + self.num_tokens_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those in flight counted."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def ending(self) -> bool:
        """Whether its last token is ordered: it only waits for the update that ends it."""
        return self.num_tokens >= self.most_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output ids that are known."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status is Status.FINISHED

    @property
    def name(self) -> str:
        """How people refer to it: the request's id, and ``/index`` where there are several samples."""
        alone = self.request.params.n == 1 and self.request.beams is None
        return self.request.request_id if alone else f"{self.request.request_id}/{self.index}"


@dataclass(eq=False, slots=True)
class Request:
    """What a user asked for, and its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """The Philox key of its random numbers, 64 bits."""
    max_tokens: int
    """The most output tokens a sample: the request's own limit, or what is left of ``max_model_len``."""
    metrics: RequestMetrics
    priority: int = 0
    """For the policy "priority": the lower goes first."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    user: str | None = None
    """Whom it is for: policies may share the machine out by it."""
    sequences: list[Sequence] = field(default_factory=list)
    sampling: SamplingNumbers = field(init=False)
    """What the executor is told of ``params``; the intake fills in what only model and tokenizer can tell."""
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position, as far as they are computed."""
    readings: Readings = field(default_factory=Readings)
    """What was asked for at positions of the prompt."""
    beams: BeamGroup | None = None
    """The search, if it is one: its sequences are the running beams, and at the end the hypotheses."""

    def __post_init__(self) -> None:
        self.sampling = plain_numbers(self.params)

    def drop_readings(self) -> None:
        """Its user has been told all: log-probabilities, logits and hidden states need not be kept with its story."""
        self.prompt_logprobs, self.readings = {}, Readings()
        for sequence in self.sequences:
            sequence.logprobs, sequence.readings = [], Readings()

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)
