"""TextPlan: which chats a target writes: who asks, and how freely it answers, by a chat's number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refimpl.llm import LLM
from refimpl.speculate.prompts import KINDS, Kind, written_prompt
from refimpl.speculate.self_text import SelfWriter, Texts, save_texts

WORK = "training"
"""The folder within a drafter's for what it is trained from."""
TEXT = "text-"
"""How the files of the training text begin there; each holds some chats."""
HELD_OUT = "held-out-"
"""How those of what is held out begin; the plan's name follows."""
CHATS_AT_ONCE = 2048
"""Of a part, chats that are written before they are saved."""

ROOM_TO_ASK = 256
"""Chats that are shorter leave none for prompts as people write them."""


@dataclass(frozen=True)
class TextPlan:
    """Chats of one seed. Kinds of prompts come in turn, and for each the temperatures of answers in turn."""

    seed: int
    kinds: tuple[Kind, ...] = KINDS
    temperatures: tuple[float, ...] = (0.7, 0.7, 0.7, 0.0)
    held_out_topics: bool = False

    @classmethod
    def training(cls, seed: int, max_tokens: int) -> TextPlan:
        """What is trained on."""
        return cls(seed) if max_tokens >= ROOM_TO_ASK else cls(seed, ("own",))

    @classmethod
    def held_out(cls, seed: int, max_tokens: int) -> dict[str, TextPlan]:
        """What acceptance is measured on, by name: the target's own prompts sampled and greedily, and those of people."""
        own = {"sampled": cls(seed, ("own",), (0.7,)), "greedy": cls(seed, ("own",), (0.0,))}
        if max_tokens < ROOM_TO_ASK:
            return own
        return {
            **own,
            "question": cls(seed, ("question",), (0.7,), True),
            "code": cls(seed, ("code",), (0.7,), True),
            "code-greedy": cls(seed, ("code",), (0.0,), True),
        }

    def write(self, llm: LLM, max_tokens: int, first: int, count: int, show_progress: bool = False) -> Texts:
        """Chats ``first`` to ``first + count - 1``, of at most ``max_tokens`` tokens."""
        writer = SelfWriter(llm, self.seed, max_tokens)
        return writer.chats(first, count, self._temperature, show_progress, self._messages)

    def _temperature(self, number: int) -> float:
        return self.temperatures[number // len(self.kinds) % len(self.temperatures)]

    def _messages(self, number: int) -> list[dict[str, str]] | None:
        kind = self.kinds[number % len(self.kinds)]
        return None if kind == "own" else written_prompt(kind, self.seed, number, self.held_out_topics)


def write_part(target: Any, out: Path, seed: int, max_tokens: int, numbers: range, engine: Mapping[str, Any]) -> int:
    """Write chats of the training text into a drafter's folder, some at a time, and give the tokens of their answers."""
    plan, written = TextPlan.training(seed, max_tokens), 0
    with LLM(target, **engine) as llm:
        for first in range(numbers.start, numbers.stop, CHATS_AT_ONCE):
            texts = plan.write(llm, max_tokens, first, min(CHATS_AT_ONCE, numbers.stop - first))
            save_texts(texts, _folder(out) / f"{TEXT}{first:07}.safetensors")
            written += texts.num_answer_tokens
    return written


def write_held_out(target: Any, out: Path, seed: int, max_tokens: int, count: int, engine: Mapping[str, Any]) -> int:
    """The same for what is held out."""
    written = 0
    with LLM(target, **engine) as llm:
        for name, plan in TextPlan.held_out(seed, max_tokens).items():
            texts = plan.write(llm, max_tokens, 0, count)
            save_texts(texts, _folder(out) / f"{HELD_OUT}{name}.safetensors")
            written += texts.num_answer_tokens
    return written


def _folder(out: Path) -> Path:
    folder = out / WORK
    folder.mkdir(parents=True, exist_ok=True)
    return folder
