"""Text that the target writes by itself: what a drafter is trained on and measured by. No data set is needed.

The chat template's user header comes first, and the target goes on as the user, then answers as itself (Xu et al. 2024,
"Magpie"). So the text is distributed as what the drafter will see, in the target's own words. Each request has a seed of its
own; what is held out has other seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from refimpl.config import ModelConfig
from refimpl.errors import ConfigError
from refimpl.llm import LLM
from refimpl.sampling_params import SamplingParams
from refimpl.tokenizer.tokenizer import Tokenizer

USER_TEMPERATURE = 0.8
"""Under 1, at which a small model says much that nobody would ask."""
LONGEST_MESSAGE = 96
"""Tokens of a user's message; a longer one is cut."""
SEEDS_APART = 2**32


@dataclass(frozen=True)
class Texts:
    """Chats, flat: chat i is ``token_ids[starts[i] : starts[i + 1]]``; its answer begins ``answers[i]`` tokens into it."""

    token_ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    answers: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, i: int) -> NDArray[np.int32]:
        """The tokens of chat i."""
        return self.token_ids[self.starts[i] : self.starts[i + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each chat."""
        return np.diff(self.starts)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target said as itself."""
        return int(self.lengths.sum() - self.answers.sum())

    def answer_tokens(self) -> NDArray[np.int32]:
        """The answers' tokens, one after the other."""
        parts = [self[i][self.answers[i] :] for i in range(len(self))]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    @classmethod
    def of(cls, chats: list[tuple[list[int], int]]) -> Texts:
        """Chats as token ids, each with the place where its answer begins."""
        lengths = [len(token_ids) for token_ids, _ in chats]
        flat = np.fromiter((token for token_ids, _ in chats for token in token_ids), dtype=np.int32, count=sum(lengths))
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        return cls(flat, starts, np.array([answer for _, answer in chats], dtype=np.int32))

    @classmethod
    def joined(cls, parts: list[Texts]) -> Texts:
        """Several of them as one."""
        lengths = np.concatenate([part.lengths for part in parts])
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        return cls(
            np.concatenate([part.token_ids for part in parts]), starts, np.concatenate([part.answers for part in parts])
        )

    def without(self, others: Texts) -> Texts:
        """The chats whose question none of the others has. Where nothing is asked, the chats that none of the others is."""
        known = {bytes(others[i][: others.answers[i]]) for i in range(len(others))}
        asked = len(known) > 1
        if not asked:
            known = {bytes(others[i]) for i in range(len(others))}
        kept = [i for i in range(len(self)) if bytes(self[i][: self.answers[i]] if asked else self[i]) not in known]
        return Texts.of([(self[i].tolist(), int(self.answers[i])) for i in kept])


@dataclass(frozen=True)
class ChatFrame:
    """The tokens around a user's message: what comes before it, and between it and the answer."""

    header: list[int]
    bridge: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ModelConfig) -> ChatFrame:
        """That of the chat template: what two chats of different messages have in common. Without one, a text's beginning.

        Raises:
            ConfigError: the model has neither a chat template nor a token that begins or ends a text.

        """
        if not tokenizer.has_chat_template:
            first = [config.bos_token_id] if config.bos_token_id is not None else list(config.eos_token_ids[:1])
            if not first:
                raise ConfigError(
                    "the target has neither a chat template nor a token that begins a text, so it cannot write by itself"
                )
            return cls(first, [])
        one, other = (tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in ("A", "7"))
        return cls(one[: _common(one, other)], one[len(one) - _common(one[::-1], other[::-1]) :])


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class SelfWriter:
    """Lets a target write chats.

    Args:
        llm: the target.
        seed: of all that is written; chat i is the same however many are asked for at once.
        max_tokens: the longest chat, the template's tokens counted.

    """

    def __init__(self, llm: LLM, seed: int, max_tokens: int) -> None:
        config = llm.engine.model_config
        self._llm, self._seed, self._max_tokens = llm, seed, max_tokens
        self._ends = set(config.eos_token_ids)
        self._frame = ChatFrame.of(llm.get_tokenizer(), config)
        self._room = max_tokens - len(self._frame.header) - len(self._frame.bridge)
        if self._room < 2:
            raise ConfigError(
                f"chats of {max_tokens} tokens leave no room: the chat template alone takes {max_tokens - self._room}"
            )

    def chats(
        self,
        first: int,
        count: int,
        temperature: Callable[[int], float],
        show_progress: bool,
        messages: Callable[[int], Sequence[dict[str, str]] | None] = lambda number: None,
    ) -> Texts:
        """Chats ``first`` to ``first + count - 1``, each a function of its number.

        ``temperature`` is that of a chat's answer, ``messages`` are what it answers; None: what the target asks itself.
        Where these take more than half of the room, or there is no chat template, it asks itself too.
        """
        numbers = range(first, first + count)
        prompts = [self._given(messages(number)) for number in numbers]
        own = [i for i, prompt in enumerate(prompts) if prompt is None]
        for i, prompt in zip(own, self._own_prompts([first + i for i in own], show_progress), strict=True):
            prompts[i] = prompt
        asked = [prompt for prompt in prompts if prompt is not None]
        answering = [
            self._params(2 * i + 1, temperature(i), self._max_tokens - len(prompt))
            for i, prompt in zip(numbers, asked, strict=True)
        ]
        answers = self._write(asked, answering, show_progress)
        return Texts.of([(prompt + answer, len(prompt)) for prompt, answer in zip(asked, answers, strict=True)])

    def _given(self, messages: Sequence[dict[str, str]] | None) -> list[int] | None:
        if messages is None or not self._frame.bridge:
            return None
        prompt = self._llm.get_tokenizer().apply_chat_template(list(messages))
        return prompt if 2 * len(prompt) <= self._max_tokens else None

    def _own_prompts(self, numbers: Sequence[int], show_progress: bool) -> list[list[int]]:
        """What the target asks itself, and the beginning of a text where it has no chat template."""
        if not self._frame.bridge:
            return [self._frame.header for _ in numbers]
        longest = max(1, min(LONGEST_MESSAGE, self._room // 2))
        asking = [self._params(2 * i, USER_TEMPERATURE, longest) for i in numbers]
        written = self._write([self._frame.header for _ in numbers], asking, show_progress)
        return [[*self._frame.header, *self._without_end(message), *self._frame.bridge] for message in written]

    def _params(self, number: int, temperature: float, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=self._seed * SEEDS_APART + number,
            detokenize=False, output_kind="final_only",
        )  # fmt: skip

    def _write(self, prompts: list[list[int]], params: list[SamplingParams], show_progress: bool) -> list[list[int]]:
        outputs = self._llm.generate(list(prompts), params, use_tqdm=show_progress)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _without_end(self, message: list[int]) -> list[int]:
        return message[:-1] if message and message[-1] in self._ends else message


def save_texts(texts: Texts, path: Path) -> None:
    """Write texts as safetensors, by a rename: the file is whole or not there."""
    from safetensors.numpy import save_file

    work = path.with_suffix(".part")
    save_file({"token_ids": texts.token_ids, "starts": texts.starts, "answers": texts.answers}, work)
    os.replace(work, path)


def load_texts(path: Path) -> Texts:
    """Read what :func:`save_texts` wrote."""
    from safetensors.numpy import load_file

    return Texts(**load_file(path))


def rounds(total: int, most: int) -> Iterator[tuple[int, int]]:
    """``total`` in pieces of at most ``most``: (first, count)."""
    for first in range(0, total, most):
        yield first, min(most, total - first)


LOOP_TOKENS = 24
"""A text loops where so many tokens, and at least two periods, repeat what stands one period before them."""
LONGEST_PERIOD = 64


def looping(texts: Texts) -> NDArray[np.bool_]:
    """For each token of all chats, whether it stands in a loop: it goes on with a period that was repeated for some time."""
    tokens = texts.token_ids
    found = np.zeros(len(tokens), dtype=bool)
    places = np.arange(len(tokens), dtype=np.int32)
    offsets = places - np.repeat(texts.starts[:-1], texts.lengths).astype(np.int32)
    for period in range(1, min(LONGEST_PERIOD, len(tokens) - 1) + 1):
        repeats = (tokens[period:] == tokens[:-period]) & (offsets[period:] >= period)
        here = places[period:]
        last_change = np.maximum.accumulate(np.where(repeats, np.int32(period - 1), here))
        found[period:] |= here - last_change >= max(LOOP_TOKENS, 2 * period)
    return found


def cut_loops(texts: Texts) -> Texts:
    """The chats, each cut where it has looped for a while: what a loop teaches is learnt from its first turns."""
    loops = np.flatnonzero(looping(texts))
    begins = texts.starts[:-1] + texts.answers
    first = np.append(loops, len(texts.token_ids))[np.searchsorted(loops, begins)]
    ends = np.minimum(texts.starts[1:], first + 1)
    return Texts.of(
        [
            (texts.token_ids[start:end].tolist(), int(answer))
            for start, end, answer in zip(texts.starts, ends, texts.answers, strict=False)
        ]
    )
