"""OutputProcessor: from the tokens of a step to what a user sees."""

from __future__ import annotations

from collections.abc import Iterable

from refimpl.outputs import CompletionOutput, RequestOutput
from refimpl.request import Request, Sequence
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


class OutputProcessor:
    """Turns tokens into text, and text into a RequestOutput of the kind that the request asked for.

    Text is made where the scheduler takes a token in (it asks here whether a stop string is complete), before the next
    step is planned: what overlap has ordered by then is one token too many at most, as with a stop token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[int, _Stream] = {}

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
        """Drop what is kept of a request."""
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
        )

    def _completion(self, sequence: Sequence, stream: _Stream, delta: bool) -> CompletionOutput:
        if sequence.finished:
            self.finish(sequence)  # also where an error ended it
        text = stream.text.take() if stream.text is not None else ""
        token_ids = sequence.token_ids[sequence.num_prompt_tokens + (stream.tokens_sent if delta else 0) :]
        if delta:
            stream.tokens_sent += len(token_ids)
        else:
            text = stream.text_sent = stream.text_sent + text
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
