"""Intake: from what a user typed to a Request, or to a clear refusal. Tokenising is done here, never within a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import msgspec

from refimpl.beam_intake import BeamIntake
from refimpl.beam_params import BeamSearchParams
from refimpl.config import EngineArgs, ModelConfig
from refimpl.errors import PromptError, RequestError, SamplingParamsError
from refimpl.kernels.philox import ROOT_PATH, branch, mix_seed
from refimpl.request import Request, Sequence
from refimpl.request_metrics import RequestMetrics
from refimpl.sampling_intake import SamplingIntake
from refimpl.sampling_numbers import SamplingNumbers
from refimpl.sampling_params import LogitsHooks, SamplingParams
from refimpl.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreparedRequest:
    """What a user asked for, checked and tokenised: all that can be done without the engine's state."""

    request_id: str
    prompt: str | None
    """The text, where one was given."""
    token_ids: list[int]
    params: SamplingParams
    sampling: SamplingNumbers
    """``params`` made ready for the executor."""
    priority: int = 0
    cache_salt: str | None = None
    user: str | None = None
    beams: BeamSearchParams | None = None
    """Of a beam search."""


class Intake:
    """Checks prompts against the model, and numbers requests and sequences in order of arrival."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ModelConfig,
        max_model_len: int,
        args: EngineArgs,
        clock: Callable[[], float],
        logits_hooks: LogitsHooks | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = SamplingIntake(tokenizer, model, args.max_logprobs)
        self._beams = BeamIntake(tokenizer, model, args)
        self._logits_hooks = logits_hooks
        self._vocab_size = model.vocab_size
        self._max_model_len = max_model_len
        self._seed = args.seed
        self._clock = clock
        self._num_requests = 0
        self._num_sequences = 0

    def token_ids(self, request_id: str, prompt: str | list[int]) -> list[int]:
        """The token ids of a prompt: a text, or ids.

        Raises:
            PromptError: it is empty, of the wrong kind, or has ids outside the vocabulary.

        """
        if isinstance(prompt, str):
            try:
                token_ids = self._tokenizer.encode(prompt)
            except PromptError as error:
                error.request_id = request_id
                raise
        elif isinstance(prompt, list | tuple):
            token_ids = [_token_id(item, position, request_id) for position, item in enumerate(prompt)]
        else:
            raise PromptError(
                f"the prompt is a {type(prompt).__name__}; it must be a text or a list of token ids",
                request_id=request_id,
            )
        if not token_ids:
            raise PromptError("the prompt is empty; give at least one token", request_id=request_id)
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                raise PromptError(
                    f"token id {token_id} at position {position} of the prompt is outside the vocabulary: ids go from "
                    f"0 to {self._vocab_size - 1}",
                    request_id=request_id,
                    token_id=token_id,
                    vocab_size=self._vocab_size,
                )
        return token_ids

    def prepare(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> PreparedRequest:
        """Check the arguments of a request, and tokenise its prompt. Touches nothing, so any thread may call it.

        Raises:
            RequestError: an argument is wrong, or the parameters do not fit the model, the engine or the prompt.

        """
        check_kinds(request_id, params, priority)
        token_ids = self.token_ids(request_id, prompt)
        text = prompt if isinstance(prompt, str) else None
        beams = params if isinstance(params, BeamSearchParams) else None
        drawing = params if isinstance(params, SamplingParams) else self._beams.drawing(request_id, params)
        sampling = self._sampling_numbers(request_id, drawing, len(token_ids))
        if beams is not None:
            sampling = msgspec.structs.replace(sampling, logprobs=self._beams.num_proposals(beams))
        return PreparedRequest(request_id, text, token_ids, drawing, sampling, priority, cache_salt, user, beams)

    def make_request(self, prepared: PreparedRequest) -> Request:
        """The request and its samples. Nothing is numbered until :meth:`accept`, so a refused one leaves no gap."""
        params, token_ids = prepared.params, prepared.token_ids
        room = self._max_model_len - len(token_ids)
        request = Request(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=token_ids,
            params=params,
            seed=mix_seed(self._seed, self._num_requests) if params.seed is None else params.seed,
            priority=prepared.priority,
            cache_salt=prepared.cache_salt,
            user=prepared.user,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            metrics=RequestMetrics(arrival_time=self._clock(), num_prompt_tokens=len(token_ids)),
        )
        request.sampling = prepared.sampling
        if prepared.beams is not None:
            request.beams = self._beams.group(prepared.beams, params, token_ids, request.max_tokens, self._num_sequences)
        request.sequences = [
            Sequence(
                sequence_id=self._num_sequences + index,
                request=request,
                index=index,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                path=branch(ROOT_PATH, index),
            )
            for index in range(params.n)
        ]
        request.metrics.token_times = [sequence.token_times for sequence in request.sequences]
        for sequence in request.sequences[1:]:
            sequence.leader = request.sequences[0]
        return request

    def _sampling_numbers(self, request_id: str, params: SamplingParams, num_prompt_tokens: int) -> SamplingNumbers:
        room = self._max_model_len - num_prompt_tokens
        try:
            if 1 <= room < params.min_tokens:  # where nothing fits, the scheduler says so
                raise SamplingParamsError(
                    f"min_tokens is {params.min_tokens}, but at most {room} fit behind a prompt of {num_prompt_tokens} "
                    f"tokens (max_model_len is {self._max_model_len}); lower it",
                    min_tokens=params.min_tokens,
                    fits=room,
                )
            if params.logits_hook is not None and self._logits_hooks is None:
                raise SamplingParamsError(
                    "logits_hook is given, but this engine computes in other processes, which it cannot reach"
                )
            return self._sampling.numbers(params)
        except SamplingParamsError as error:
            error.request_id = request_id
            raise

    def make_branch(self, parent: Sequence, new_id: str, params: SamplingParams | None) -> Request:
        """A request that goes on from all that a sample holds so far, on a path of randomness of its own.

        Raises:
            RequestError: more than one sample is asked for.

        """
        origin = parent.request
        if origin.beams is not None:
            raise RequestError(f"request {origin.request_id!r} is a beam search, which forks by itself", request_id=new_id)
        params = params or msgspec.structs.replace(origin.params, n=1)
        check_kinds(new_id, params, origin.priority)
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a fork is one sample, fork again for more", request_id=new_id)
        token_ids = list(parent.token_ids)
        sampling = self._sampling_numbers(new_id, params, len(token_ids))
        request = self.make_request(
            PreparedRequest(new_id, None, token_ids, params, sampling, origin.priority, origin.cache_salt, origin.user)
        )
        if params.seed is None:
            request.seed = origin.seed
        request.sequences[0].path = branch(parent.path, parent.num_forks)
        return request

    def accept(self, request: Request) -> None:
        """Count a request that the scheduler took, and let the executor find its hook."""
        self._num_requests += 1
        self._num_sequences += len(request.sequences) if request.beams is None else request.beams.num_ids
        if (hook := request.params.logits_hook) is not None and self._logits_hooks is not None:
            self._logits_hooks.update({sequence.sequence_id: hook for sequence in request.sequences})

    def forget(self, request: Request) -> None:
        """A request has ended: the executor needs its hook no more."""
        if request.params.logits_hook is not None and self._logits_hooks is not None:
            for sequence in request.sequences:
                self._logits_hooks.pop(sequence.sequence_id, None)


def check_kinds(request_id: object, sampling_params: object, priority: object) -> None:
    """See that the arguments of a request are of the right kind.

    Raises:
        RequestError: one is not.

    """
    if not isinstance(request_id, str):
        raise RequestError(f"request_id is {request_id!r}; it must be a string")
    if not _is_text(request_id):
        raise RequestError(f"request_id is {request_id!r}; it has half a surrogate pair, which is no text")
    if not isinstance(sampling_params, SamplingParams | BeamSearchParams):
        raise RequestError(
            f"sampling_params is a {type(sampling_params).__name__}; it must be a SamplingParams (or BeamSearchParams)",
            request_id=request_id,
        )
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority is {priority!r}; it must be a whole number", request_id=request_id)


def _is_text(string: str) -> bool:
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_id(item: object, position: int, request_id: str) -> int:
    """An item of a prompt as an int; numpy's whole numbers are fine, True is not 1."""
    if not isinstance(item, bool) and isinstance(item, Integral):
        return int(item)
    raise PromptError(
        f"item {position} of the prompt is {item!r}; a prompt is a text or a list of token ids, whole numbers",
        request_id=request_id,
    )
