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

    __slots__ = (
        "cumulative_logprob",
        "delta",
        "detailed",
        "logprobs",
        "readings_sent",
        "text",
        "text_sent",
        "tokens_read",
        "tokens_sent",
        "told_end",
    )

    def __init__(self, sequence: Sequence, text: TextStream | None) -> None:
        params, request = sequence.request.params, sequence.request
        self.text = text
        """None where no text is wanted."""
        self.delta = params.output_kind == "delta"
        self.detailed = (
            request.beams is not None
            or params.logprobs is not None
            or bool(params.return_logits or params.return_hidden_states)
        )
        """Whether more is told than text and tokens."""
        self.tokens_read = self.tokens_sent = sequence.num_prompt_tokens
        """Tokens whose text was made, and with deltas those that were handed out; the prompt's counted."""
        self.text_sent = ""
        """Kept where outputs are cumulative."""
        self.told_end = False
        """With deltas, a sample that ended is told once."""
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self.readings_sent: set[tuple[str, int]] = set()


class OutputProcessor:
    """Turns tokens into text, and text into a RequestOutput of the kind that the request asked for.

    Where a sample has stop strings, text is made as soon as the scheduler takes a token in (it asks here whether one is
    complete), before the next step is planned: what overlap has ordered by then is one token too many at most, as with a
    stop token. Other text is made with the output that tells it; of a request that wants its end alone, all at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[int, _Stream] = {}
        self._prompt_logprobs: dict[str, list[dict[int, Logprob] | None]] = {}

    def append(self, sequence: Sequence, token_id: int, silent: bool) -> str | None:
        """A sequence took a token (see :class:`refimpl.scheduler.stopping.TextWatch`)."""
        stream = self._stream(sequence)
        stream.tokens_read += 1
        return None if stream.text is None else stream.text.append(token_id, silent)

    def finish(self, sequence: Sequence) -> str | None:
        """A sequence ends."""
        text = self._stream(sequence).text
        return None if text is None else text.finish()

    def process(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """One output for each of the requests of which a sample took a token or ended."""
        outputs = []
        for request in requests:
            if request.params.output_kind == "final_only" and not request.finished:
                continue
            outputs.append(output := self._output(request))
            if output.finished:
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
            stream = self._streams[sequence.sequence_id] = _Stream(sequence, text)
        return stream

    def _output(self, request: Request) -> RequestOutput:
        samples, finished = [], True
        for sequence in request.sequences:
            finished = finished and sequence.finish_reason is not None
            stream = self._streams.get(sequence.sequence_id) or self._stream(sequence)
            if not stream.told_end:
                samples.append(self._completion(sequence, stream))
        if finished:  # the hypotheses of a beam search are not the sequences that it began with
            request.metrics.token_times = [sequence.token_times for sequence in request.sequences]
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            samples,
            finished,
            request.metrics,
            self._prompt_logprobs_of(request) if request.params.prompt_logprobs is not None else None,
        )

    def _completion(self, sequence: Sequence, stream: _Stream) -> CompletionOutput:
        token_ids, reason = sequence.token_ids, sequence.finish_reason
        told = token_ids[stream.tokens_sent :]
        text = ""
        if stream.text is not None:
            unread = told if stream.tokens_read == stream.tokens_sent else token_ids[stream.tokens_read :]
            text = stream.text.read(unread) if reason is None else self._last_text(sequence, stream.text, unread)
            stream.tokens_read = len(token_ids)
        details = self._details(sequence, stream) if stream.detailed else None
        if stream.delta:
            stream.tokens_sent = len(token_ids)
            stream.told_end = reason is not None
        else:
            text = stream.text_sent = stream.text_sent + text
        if details is None:  # nearly always, and quicker than with nothing to unpack
            return CompletionOutput(sequence.index, text, told, reason, sequence.stop_reason)
        return CompletionOutput(sequence.index, text, told, reason, sequence.stop_reason, *details)

    def _last_text(self, sequence: Sequence, text: TextStream, unread: list[int]) -> str:
        """What is left to say of a sample that has ended, whatever ended it, after the tokens that the scheduler did not
        ask about. As there, the text of a token that stopped by its id is left out.
        """
        if unread and sequence.finish_reason == "stop" and not sequence.request.params.include_stop_str_in_output:
            unread = unread[:-1]
        said = text.read(unread)
        text.finish()
        return said + text.take()

    def _details(self, sequence: Sequence, stream: _Stream) -> tuple[Any, ...]:
        """The fields of a CompletionOutput that few ask for: log-probabilities, a hypothesis's score, readings."""
        asked, found = sequence.request.params.logprobs is not None, sequence.hypothesis
        sent = stream.tokens_sent - sequence.num_prompt_tokens
        return (
            self._new_logprobs(sequence, stream)[sent:] if asked else None,
            stream.cumulative_logprob if asked else None if found is None else found.logprob,
            None if found is None else found.score,
            self._readings(sequence, stream, "logits"),
            self._readings(sequence, stream, "hidden_states"),
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

    def _new_logprobs(self, sequence: Sequence, stream: _Stream) -> list[dict[int, Logprob]]:
        """Those of all tokens so far."""
        for token in sequence.logprobs[len(stream.logprobs) :]:
            stream.logprobs.append(logprob_dict(token, self._token_text(sequence.request.params)))
            stream.cumulative_logprob += token.logprob
        return stream.logprobs

    def _readings(self, sequence: Sequence, stream: _Stream, kind: Literal["logits", "hidden_states"]) -> dict[int, Any]:
        """What was read at positions of prompt and output; with deltas, what was not told yet."""
        found = {**getattr(sequence.request.readings, kind), **getattr(sequence.readings, kind)}
        if sequence.request.params.output_kind == "delta":
            found = {position: array for position, array in found.items() if (kind, position) not in stream.readings_sent}
            stream.readings_sent.update((kind, position) for position in found)
        return found
