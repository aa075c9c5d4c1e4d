"""LLM: the offline host. Prompts in, finished outputs back, in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from numbers import Integral
from typing import Any, TypedDict

import msgspec

from refimpl.beam_params import BeamSearchParams
from refimpl.closing import Closing
from refimpl.comm_messages import comm_messages_between_steps
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.engine_lock import EngineLock
from refimpl.errors import AbortedError, RequestError
from refimpl.executor.executor import step_threads_of
from refimpl.interrupts import GenerationInterrupted, interrupts_between_steps
from refimpl.memory_report import MemoryReport
from refimpl.outputs import RequestOutput
from refimpl.sampling_params import SamplingParams
from refimpl.tokenizer.tokenizer import Message, Tokenizer


class PromptDict(TypedDict, total=False):
    """A prompt as a dict: one of the two keys."""

    prompt: str
    prompt_token_ids: list[int]


Prompt = str | list[int] | PromptDict


class LLM(Closing):
    """A model, ready to generate.

    Args:
        model: "smollm2" (the embedded model), a folder, a GGUF file, ORG/NAME on the Hub, "tiny", or a checkpoint object.
        options: any field of :class:`refimpl.EngineArgs`.

    Example:
        >>> from refimpl import LLM, SamplingParams
        >>> with LLM("tiny") as llm:
        ...     [output] = llm.generate("Hello", SamplingParams(max_tokens=4), use_tqdm=False)
        >>> len(output.outputs[0].token_ids)
        4

    """

    def __init__(self, model: Any = "smollm2", **options: Any) -> None:
        self.engine = Engine(EngineArgs.from_options({"model": model, **options}))
        self._numbers = itertools.count()
        self._one_call_at_a_time = EngineLock(step_threads_of(self.engine.executor))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, batched as they fit; outputs come in the order of the prompts.

        ``sampling_params`` is one for all, or one a prompt. If one prompt is refused, none is run. Ctrl-C is taken between
        steps: the requests of this call are aborted, and the engine stays usable.

        Raises:
            GenerationInterrupted: Ctrl-C or the stop button; a KeyboardInterrupt that carries the outputs of the prompts
                that had finished, as ``.outputs``.
            RequestError: a prompt or a parameter is wrong; the message says which prompt.

        """
        listed = _as_list(prompts)
        return self._run([unwrap(prompt) for prompt in listed], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages with role and content) or several.

        Raises:
            RequestError: the model has no chat template, or a conversation does not fit it.

        """
        if not isinstance(messages, list | tuple):
            raise RequestError(f"messages is a {type(messages).__name__}; a chat is a list of dicts with role and content")
        several = bool(messages) and not isinstance(messages[0], dict)
        chats: Sequence[Any] = messages if several else [messages]
        prompts: list[str | list[int]] = [
            self.engine.tokenizer.apply_chat_template(chat, add_generation_prompt) for chat in chats
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Search for the most probable outputs of one prompt or many: ``beam_width`` of each, best first, with their scores.

        The order is that of transformers' ``num_return_sequences``: the highest ``score`` has index 0.

        Raises:
            GenerationInterrupted: Ctrl-C or the stop button, as with :meth:`generate`.
            RequestError: a prompt or a parameter is wrong; the message says which prompt.

        """
        check_search(params)
        listed = [unwrap(prompt) for prompt in _as_list(prompts)]
        with self._one_call_at_a_time.alone("beam_search"):
            return self._run_alone(listed, [params] * len(listed), use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def memory_report(self) -> MemoryReport:
        """What the memory holds: weights and KV cache, used, wasted, cached and free; ``print`` shows it as a table."""
        return self.engine.memory_report()

    def close(self) -> None:
        """Give threads and memory back. May be called twice."""
        self.engine.close()

    def _run(
        self,
        prompts: list[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with self._one_call_at_a_time.alone("generate"):
            params = _one_each(sampling_params, len(prompts))
            final = [msgspec.structs.replace(one, output_kind="final_only") for one in params]
            return self._run_alone(prompts, final, use_tqdm)

    def _run_alone(
        self, prompts: list[str | list[int]], params: Sequence[SamplingParams | BeamSearchParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        request_ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                request_id = f"llm-{next(self._numbers)}"  # no name that a user would give to a request of their own
                try:
                    self.engine.add_request(request_id, prompt, one)
                except RequestError as error:
                    if len(prompts) > 1:
                        error.args = (f"prompt {number} of {len(prompts)}: {error.args[0]}", *error.args[1:])
                    raise
                request_ids.append(request_id)
            self._step_until_done(request_ids, use_tqdm, outputs)
        except BaseException as error:
            self.engine.abort(request_ids)
            if isinstance(error, KeyboardInterrupt):
                finished = [outputs.get(request_id) for request_id in request_ids]
                raise GenerationInterrupted(finished + [None] * (len(prompts) - len(finished))) from error
            raise
        return [outputs[request_id] for request_id in request_ids]

    def _step_until_done(self, request_ids: list[str], use_tqdm: bool, outputs: dict[str, RequestOutput]) -> None:
        """Step until these requests have ended, and put their ``outputs`` there, also where the call is interrupted.

        Outputs of others (``llm.engine.add_request``) are kept for their host.
        """
        wanted = set(request_ids)
        others: list[RequestOutput] = []
        num_aborted = self.engine.num_aborted
        answer_widgets = comm_messages_between_steps()
        with (
            ExitStack() as at_the_end,
            interrupts_between_steps() as check_interrupt,
            _progress_bar(len(wanted)) if use_tqdm else nullcontext() as bar,
        ):
            at_the_end.callback(self.engine.keep_for_next_step, others)
            while len(outputs) < len(wanted):
                check_interrupt()
                answer_widgets()
                for output in self.engine.step(while_held=answer_widgets):
                    if output.request_id not in wanted:
                        others.append(output)
                    elif output.finished:
                        outputs[output.request_id] = output
                        if bar is not None:
                            bar.update()
                if self.engine.num_aborted != num_aborted:
                    num_aborted = self.engine.num_aborted
                    for request_id in wanted - outputs.keys():
                        if not self.engine.is_unfinished(request_id):
                            raise AbortedError(
                                f"request {request_id!r} was aborted while this call waited for it",
                                request_id=request_id,
                            )


def _progress_bar(total: int) -> Any:
    """Made only to be shown: tqdm starts a thread with its first bar, shown or not."""
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="Processed prompts", unit="prompt")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt or many: a text, a dict and a list of ids are one."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; it must be a text, a list of token ids, or a list of these"
        )
    listed = list(prompts)
    if listed and all(isinstance(item, Integral) for item in listed):
        return [listed]
    return listed


def unwrap(prompt: Any) -> str | list[int]:
    """The text or the token ids of a prompt in any form.

    Raises:
        RequestError: a dict has neither, or one of another kind.

    """
    if not isinstance(prompt, dict):
        unwrapped: str | list[int] = prompt  # the engine checks it
        return unwrapped
    for key, kind in (("prompt_token_ids", list | tuple), ("prompt", str)):
        if (value := prompt.get(key)) is not None:
            if not isinstance(value, kind):
                raise RequestError(f"{key} is {value!r}; it must be a {'text' if kind is str else 'list of token ids'}")
            given: str | list[int] = value
            return given
    raise RequestError(f"a prompt given as a dict needs prompt or prompt_token_ids; this one has {sorted(prompt)}")


def check_search(params: object) -> None:
    """See that a search's parameters are those of a search.

    Raises:
        RequestError: they are not.

    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params is a {type(params).__name__}; it must be a BeamSearchParams")


def check_drawing(params: object) -> None:
    """See that what should draw samples is no search.

    Raises:
        RequestError: it is one.

    """
    if isinstance(params, BeamSearchParams):
        raise RequestError("sampling_params is a BeamSearchParams; call beam_search with it, or give a SamplingParams")


def _one_each(sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    check_drawing(sampling_params)
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, list | tuple) or not all(isinstance(p, SamplingParams) for p in sampling_params):
        raise RequestError(f"sampling_params is {sampling_params!r}; it must be a SamplingParams, or a list of them")
    if len(sampling_params) != count:
        raise RequestError(
            f"{len(sampling_params)} sampling_params for {count} prompts; give one for all, or one for each prompt"
        )
    return sampling_params
