"""Who gives way: what the policy says, checked."""

from __future__ import annotations

from collections.abc import Iterable

from refimpl.errors import PolicyError
from refimpl.request import Sequence
from refimpl.scheduler.policies import Policy, SequenceView


def view(sequence: Sequence) -> SequenceView:
    """What a policy may know of a sequence."""
    request = sequence.request
    return SequenceView(
        sequence_id=sequence.sequence_id,
        request_id=request.request_id,
        priority=request.priority,
        user=request.user,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_preemptions=sequence.num_preemptions,
    )


def choose_victim(running: Iterable[Sequence], planned: set[int], policy: Policy) -> Sequence:
    """The running sequence that gives its blocks back: none of this step's rows, and none that is about to end.

    Raises:
        PolicyError: the policy names none of the candidates.

    """
    candidates = [sequence for sequence in running if sequence.sequence_id not in planned and not sequence.ending]
    chosen = policy.victim([view(sequence) for sequence in candidates])
    for sequence in candidates:
        if sequence.sequence_id == chosen:
            return sequence
    raise PolicyError(
        f"the policy {policy.name!r} chose {chosen!r} to give way; it must choose the sequence_id of one of the candidates, "
        f"which are {[sequence.sequence_id for sequence in candidates]}"
    )
