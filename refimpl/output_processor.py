"""OutputProcessor: from the tokens of a step to what a user sees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from refimpl.logprob_output import TokenText, logprob_dict, prompt_logprob_dicts
from refimpl.logprobs import Logprob
from refimpl.outputs import CompletionOutput, RequestOutput
from refimpl.request import Request, Sequence
from refimpl.sampling_params import SamplingParams
from refimpl.tokenizer.text_stream import TextStream
from refimpl.tokenizer.tokenizer import Tokenizer


class _Stream:
    """One sample's text, and how much of its tokens and text has been handed out."""

    def __init__(self, text: TextStream | None) -> None:
        self.text = text
        """None where no text is wanted."""
        self.tokens_sent = 0
        self.text_sent = ""
        """Kept where outputs are cumulative."""
        self.told_end = False
        """With deltas, a sample that ended is told once."""
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self.readings_sent: set[tuple[str, int]] = set()


class OutputProcessor:
    """Turns tokens into text, and text into a RequestOutput of the kind that the request asked for.

    Text is made where the scheduler takes a token in (it asks here whether a stop string is complete), before the next
    step is planned: what overlap has ordered by then is one token too many at most, as with a stop token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[int, _Stream] = {}
        self._prompt_logprobs: dict[str, list[dict[int, Logprob] | None]] = {}

    def append(self, sequence: Sequence, token_id: int, silent: bool) -> str | None:
        """A sequence took a token (see :class:`refimpl.scheduler.stopping.TextWatch`)."""
        text = self._stream(sequence).text
        return None if text is None else text.append(token_id, silent)

    def finish(self, sequence: Sequence) -> str | None:
        """A sequence ends."""
        text = self._stream(sequence).text
        return None if text is None else text.finish()

    def process(self, advanced: Iterable[Sequence]) -> list[RequestOutput]:
        """One output for each request of which a sample took a token or ended."""
        requests = {sequence.request.request_id: sequence.request for sequence in advanced}
        outputs = []
        for request in requests.values():
            finished = request.finished
            if finished or request.params.output_kind != "final_only":
                outputs.append(self._output(request, finished))
            if finished:
                self.forget(request)
        return outputs

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request for its user."""
        request.drop_readings()
        self._prompt_logprobs.pop(request.request_id, None)
        for sequence in request.sequences:
            self._streams.pop(sequence.sequence_id, None)

    def _stream(self, sequence: Sequence) -> _Stream:
        stream = self._streams.get(sequence.sequence_id)
        if stream is None:
            request = sequence.request
            wanted = request.params.detokenize
            text = TextStream(self._tokenizer, request.params, request.prompt_token_ids) if wanted else None
            stream = self._streams[sequence.sequence_id] = _Stream(text)
        return stream

    def _output(self, request: Request, finished: bool) -> RequestOutput:
        request.metrics.token_times = [sequence.token_times for sequence in request.sequences]
        delta, samples = request.params.output_kind == "delta", []
        for sequence in request.sequences:
            stream = self._stream(sequence)
            if delta and stream.told_end:
                continue
            stream.told_end = sequence.finished
            samples.append(self._completion(sequence, stream, delta))
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=samples,
            finished=finished,
            metrics=request.metrics,
            prompt_logprobs=self._prompt_logprobs_of(request),
        )

    def _token_text(self, params: SamplingParams) -> TokenText | None:
        return self._tokenizer.token_text if params.detokenize else None

    def _prompt_logprobs_of(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """Made once; with deltas also told once."""
        if (known := self._prompt_logprobs.get(request.request_id)) is not None:
            return None if request.params.output_kind == "delta" else known
        found = prompt_logprob_dicts(request, self._token_text(request.params))
        if found is not None:
            self._prompt_logprobs[request.request_id] = found
        return found

    def _completion(self, sequence: Sequence, stream: _Stream, delta: bool) -> CompletionOutput:
        if sequence.finished:
            self.finish(sequence)  # also where an error ended it
        text = stream.text.take() if stream.text is not None else ""
        sent, asked = stream.tokens_sent if delta else 0, sequence.request.params.logprobs is not None
        token_ids = sequence.token_ids[sequence.num_prompt_tokens + sent :]
        logprobs = self._new_logprobs(sequence, stream)[sent:] if asked else None
        if delta:
            stream.tokens_sent += len(token_ids)
        else:
            text = stream.text_sent = stream.text_sent + text
        found = sequence.hypothesis
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=stream.cumulative_logprob if asked else None if found is None else found.logprob,
            score=None if found is None else found.score,
            logits=self._readings(sequence, stream, "logits"),
            hidden_states=self._readings(sequence, stream, "hidden_states"),
        )

    def _new_logprobs(self, sequence: Sequence, stream: _Stream) -> list[dict[int, Logprob]]:
        """Those of all tokens so far."""
        for token in sequence.logprobs[len(stream.logprobs) :]:
            stream.logprobs.append(logprob_dict(token, self._token_text(sequence.request.params)))
            stream.cumulative_logprob += token.logprob
        return stream.logprobs

    def _readings(self, sequence: Sequence, stream: _Stream, kind: Literal["logits", "hidden_states"]) -> dict[int, Any]:
        """What was read at positions of prompt and output; with deltas, what was not told yet."""
        if not getattr(sequence.request.params, f"return_{kind}"):
            return {}  # nearly all, at every step
        found = {**getattr(sequence.request.readings, kind), **getattr(sequence.readings, kind)}
        if sequence.request.params.output_kind == "delta":
            found = {position: array for position, array in found.items() if (kind, position) not in stream.readings_sent}
            stream.readings_sent.update((kind, position) for position in found)
        return found
