"""A conversation with a model: its messages, kept in a file if one likes, and answers that come as they are drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from refimpl.engine import Engine
from refimpl.errors import RefimplError, RequestError
from refimpl.interrupts import interrupts_between_steps
from refimpl.request_metrics import RequestMetrics
from refimpl.sampling_params import SamplingParams


@dataclass
class Turn:
    """What an answer took: counts in tokens, times in seconds."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache: the conversation so far need not be computed again."""
    num_output_tokens: int = 0
    finish_reason: str | None = None
    """stop, length, error; None if the answer was interrupted."""
    stop_reason: int | str | None = None
    filled: bool = False
    """The answer ended since the context is full."""
    metrics: RequestMetrics | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first one; None with fewer than two."""
        times = self.metrics.token_times[0] if self.metrics and self.metrics.token_times else []
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None

    def __str__(self) -> str:
        parts = [f"{self.num_prompt_tokens} prompt tokens, {self.num_cached_tokens} of them cached"]
        if self.metrics and self.metrics.time_to_first_token is not None:
            parts.append(f"first token after {self.metrics.time_to_first_token:.2f} s")
        rate = self.tokens_per_second
        parts.append(f"{self.num_output_tokens} tokens" + (f" at {rate:.1f} a second" if rate else ""))
        return "; ".join(parts)


@dataclass
class Chat:
    """Messages and the engine that answers them. Whoever shows the chat takes an answer's pieces from :meth:`answer`.

    Raises:
        RefimplError: the model has no chat template.

    """

    engine: Engine
    params: SamplingParams
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.engine.tokenizer.has_chat_template:
            raise RefimplError(
                "this model has no chat template, so it does not know turns of a conversation; give an instruct model, or "
                "use refimpl generate"
            )
        self.params = msgspec.structs.replace(self.params, n=1, output_kind="delta")

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        return str(self.messages[0]["content"]) if self.messages and self.messages[0]["role"] == "system" else None

    def set_system(self, text: str) -> None:
        """Put a system message before all others, in place of the one that is there; an empty text takes it away."""
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def reset(self) -> None:
        """Forget the conversation, but for the system message."""
        self.messages = self.messages[:1] if self.system is not None else []

    def answer(self, text: str) -> Iterator[str]:
        """Ask, and yield the pieces of the answer as they come. The turn is then the last of ``turns``.

        Ctrl-C, taken between steps, ends the answer: its request is aborted and what was said stays in the conversation.
        A question of which no answer came at all is forgotten, so the next one does not follow it.

        Raises:
            RequestError: the conversation does not fit the model's context, or its template; it is as it was before.

        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.engine.tokenizer.apply_chat_template(asked)
        request_id, turn = f"chat-{len(self.turns)}", Turn(num_prompt_tokens=len(prompt))
        hits, said = self.engine.prefix_cache_stats.hits, ""
        self.engine.add_request(request_id, prompt, self.params)
        self.turns.append(turn)
        try:
            with interrupts_between_steps() as check_interrupt:
                while self.engine.is_unfinished(request_id):
                    check_interrupt()
                    if piece := self._step(request_id, turn):
                        said += piece
                        yield piece
        except KeyboardInterrupt:
            pass
        finally:
            self.engine.abort(request_id)  # also where nobody wants the rest
            turn.num_cached_tokens = self.engine.prefix_cache_stats.hits - hits
            room = self.engine.scheduler.config.max_model_len - turn.num_prompt_tokens
            turn.filled = turn.finish_reason == "length" and turn.num_output_tokens >= room
            if said or turn.finish_reason in ("stop", "length"):
                self.messages = [*asked, {"role": "assistant", "content": said}]

    def _step(self, request_id: str, turn: Turn) -> str:
        """One step of the engine; the text that it brought."""
        piece = ""
        for output in self.engine.step():
            if output.request_id != request_id or not output.outputs:
                continue
            [sample] = output.outputs
            piece += sample.text
            turn.num_output_tokens += len(sample.token_ids)
            turn.finish_reason, turn.stop_reason, turn.metrics = sample.finish_reason, sample.stop_reason, output.metrics
        return piece

    # ------------------------------------------------------------------ files

    def save(self, path: Path) -> None:
        """Write the messages as JSON. A file that holds anything but a conversation is left alone.

        Raises:
            RefimplError: it holds something else, or cannot be written.

        """
        try:
            if path.exists():
                _check_conversation(path)
            path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: NUL in a name, or half a surrogate pair in a text
            raise RefimplError(f"the conversation cannot be written to {path}: {error}") from error

    def load(self, path: Path) -> None:
        """Go on with the conversation of a file, in place of this one.

        Raises:
            RefimplError: the file cannot be read, or holds none.

        """
        self.messages = read_messages(path)


def _check_conversation(path: Path) -> None:
    try:
        read_messages(path)
    except RefimplError as error:
        raise RefimplError(f"{path} is there and holds no conversation, so it is not overwritten") from error


def read_messages(path: Path) -> list[dict[str, Any]]:
    """The messages of a file: a JSON list of objects with role and content, or an object with such a list.

    Raises:
        RefimplError: the file cannot be read, or holds something else.

    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise RefimplError(f"no conversation can be read from {path}: {error}") from error
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list):
        raise RefimplError(f"{path} holds no list of messages, each with role and content")
    for number, message in enumerate(messages):
        ok = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not ok:
            raise RequestError(
                f"message {number} of {path} is {str(message)[:60]}; it must have role and content, both texts"
            )
    return messages
