"""OutputProcessor: from the tokens of a step to what a user sees."""

from __future__ import annotations

from collections.abc import Iterable

from refimpl.outputs import CompletionOutput, RequestOutput
from refimpl.request import Request, Sequence
from refimpl.tokenizer.detokenizer import Detokenizer
from refimpl.tokenizer.tokenizer import Tokenizer


class _Stream:
    """One sample's text, and how much of its tokens and text has been handed out."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.tokens_seen = 0
        self.tokens_sent = 0
        self.text_sent = 0
        self.told_end = False


class OutputProcessor:
    """Turns tokens into text, and text into a RequestOutput of the kind that the request asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[int, _Stream] = {}

    def process(self, advanced: Iterable[Sequence]) -> list[RequestOutput]:
        """One output for each request of which a sample took a token or ended."""
        requests: dict[str, Request] = {}
        for sequence in advanced:
            self._detokenize(sequence)
            requests[sequence.request.request_id] = sequence.request
        outputs = [
            self._output(request)
            for request in requests.values()
            if request.finished or request.params.output_kind != "final_only"
        ]
        for request in requests.values():
            if request.finished:
                self.forget(request)
        return outputs

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request."""
        for sequence in request.sequences:
            self._streams.pop(sequence.sequence_id, None)

    def _stream(self, sequence: Sequence) -> _Stream:
        stream = self._streams.get(sequence.sequence_id)
        if stream is None:
            detokenizer = Detokenizer(self._tokenizer, sequence.request.params.skip_special_tokens)
            stream = self._streams[sequence.sequence_id] = _Stream(detokenizer)
        return stream

    def _detokenize(self, sequence: Sequence) -> None:
        stream = self._stream(sequence)
        for token_id in sequence.token_ids[sequence.num_prompt_tokens + stream.tokens_seen :]:
            stream.detokenizer.append(token_id)
            stream.tokens_seen += 1
        if sequence.finished:
            stream.detokenizer.finish()

    def _output(self, request: Request) -> RequestOutput:
        request.metrics.token_times = [sequence.token_times for sequence in request.sequences]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(sequence) for sequence in request.sequences if self._has_news(sequence)],
            finished=request.finished,
            metrics=request.metrics,
        )

    def _has_news(self, sequence: Sequence) -> bool:
        """With deltas, a sample that ended is told once."""
        if sequence.request.params.output_kind != "delta":
            return True
        stream = self._stream(sequence)
        ended_before, stream.told_end = stream.told_end, sequence.finished
        return not ended_before

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        stream = self._stream(sequence)
        delta = sequence.request.params.output_kind == "delta"
        token_ids = sequence.token_ids[sequence.num_prompt_tokens + (stream.tokens_sent if delta else 0) :]
        text = stream.detokenizer.text[stream.text_sent if delta else 0 :]
        stream.tokens_sent, stream.text_sent = stream.tokens_seen, len(stream.detokenizer.text)
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
