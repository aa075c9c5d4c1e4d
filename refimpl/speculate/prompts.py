"""Prompts as people write them, from templates: what a target asks itself is easier for it than what it is asked.

The templates and what fills them stand in ``prompts.json``: questions about topics, tasks of code, and system prompts, of
which an empty one is the chat template's own. A prompt is a function of (seed, number). Every tenth topic and task is kept
for prompts that are held out.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

Kind = Literal["own", "question", "code"]
KINDS: tuple[Kind, ...] = ("own", "question", "own", "code")
"""Of the chats of a training text, in turn; ``own``: the target asks itself."""


class _Templates(msgspec.Struct, frozen=True):
    topics: list[str]
    questions: list[str]
    code: list[str]
    tasks: list[str]
    systems: list[str]


@functools.cache
def _templates() -> _Templates:
    return msgspec.json.decode(Path(__file__).with_name("prompts.json").read_bytes(), type=_Templates)


def written_prompt(kind: Kind, seed: int, number: int, held_out: bool) -> list[dict[str, str]]:
    """The messages of a prompt that is not the target's own."""
    generator, templates = np.random.default_rng((seed, number)), _templates()

    def one_of(names: list[str]) -> str:
        return names[generator.integers(len(names))]

    topics, tasks = (
        [name for i, name in enumerate(names) if (i % 10 == 9) == held_out] for names in (templates.topics, templates.tasks)
    )
    form = one_of(templates.code if kind == "code" else templates.questions)
    system = one_of(templates.systems)
    content = form.format(a=one_of(topics), b=one_of(topics), task=one_of(tasks))
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": content}]
