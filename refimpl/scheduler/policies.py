"""Policies: who goes first, and who gives way. A policy is an object of about twenty lines, given as ``scheduling_policy``.

A policy sees frozen views, and answers with a key or an id. The scheduler does the rest, so a policy can be unwise but not
unsafe: an answer that names nobody is refused with a sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Views
from typing import Any, Protocol, runtime_checkable

import msgspec

from refimpl.errors import ConfigError


class SequenceView(msgspec.Struct, frozen=True, gc=False):
    """What a policy may know of a sequence. Token counts are those of the moment."""

    sequence_id: int
    """The lower came first."""
    request_id: str
    priority: int
    user: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int


@runtime_checkable
class Policy(Protocol):
    """What the scheduler asks. Subclass :class:`FirstComeFirstServed` to change one answer only."""

    name: str
    dynamic: bool
    """Whether a waiting sequence's key changes. Then the whole queue is asked before each admission: O(n)."""

    def key(self, sequence: SequenceView) -> Any:
        """Orders the queue and the running sequences: the lowest goes first. Ties go by arrival."""

    def victim(self, candidates: Views[SequenceView]) -> int:
        """The id of the one that gives its blocks back when there are none; candidates are in order, first goes first."""

    def preempts(self, waiting: SequenceView, running: SequenceView) -> bool:
        """Whether a waiting sequence may take the place of a running one."""

    def computed(self, sequence: SequenceView, num_tokens: int) -> None:
        """Told of each row that a step computes, if ``dynamic``: for policies that count."""


class FirstComeFirstServed:
    """By arrival; the newest gives way."""

    name = "fcfs"
    dynamic = False

    def key(self, sequence: SequenceView) -> Any:
        """Nothing but the arrival, which breaks ties."""
        return 0

    def victim(self, candidates: Views[SequenceView]) -> int:
        """The last in order."""
        return candidates[-1].sequence_id

    def preempts(self, waiting: SequenceView, running: SequenceView) -> bool:
        """Nobody."""
        return False

    def computed(self, sequence: SequenceView, num_tokens: int) -> None:
        """Nothing is counted."""


class Priority(FirstComeFirstServed):
    """The lower ``priority`` first, then by arrival; a waiting one takes the place of a running one of higher number."""

    name = "priority"

    def key(self, sequence: SequenceView) -> Any:
        """The request's priority."""
        return sequence.priority

    def preempts(self, waiting: SequenceView, running: SequenceView) -> bool:
        """Only across priorities: equals wait for each other."""
        return waiting.priority < running.priority


class ShortestPromptFirst(FirstComeFirstServed):
    """An example: short prompts do not queue behind long ones (and long ones may wait for ever)."""

    name = "shortest_prompt_first"

    def key(self, sequence: SequenceView) -> Any:
        """The prompt's length in tokens."""
        return sequence.num_prompt_tokens


class FairShareByUser(FirstComeFirstServed):
    """An example with a memory: the user for whom the fewest tokens were computed goes first."""

    name = "fair_share_by_user"
    dynamic = True

    def __init__(self) -> None:
        self.tokens_of: Counter[str | None] = Counter()

    def key(self, sequence: SequenceView) -> Any:
        """Tokens computed for its user so far."""
        return self.tokens_of[sequence.user]

    def computed(self, sequence: SequenceView, num_tokens: int) -> None:
        """Count them."""
        self.tokens_of[sequence.user] += num_tokens


BY_NAME: dict[str, type[FirstComeFirstServed]] = {
    policy.name: policy for policy in (FirstComeFirstServed, Priority, ShortestPromptFirst, FairShareByUser)
}


def choose_policy(policy: Any) -> Policy:
    """The policy of a name, or the object itself.

    Raises:
        ConfigError: no policy has that name, or the object lacks a part.

    """
    if isinstance(policy, str):
        if policy not in BY_NAME:
            raise ConfigError(f"scheduling_policy is {policy!r}; it must be one of {', '.join(BY_NAME)}, or a Policy object")
        return BY_NAME[policy]()
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"scheduling_policy is a {type(policy).__name__}; a Policy has name, dynamic, key, victim, preempts, computed "
            "(subclass FirstComeFirstServed to change one of them)"
        )
    return policy
