"""Who gives way: what the policy says, checked. And how: swapped to the host, or computed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from refimpl.errors import PolicyError
from refimpl.request import Sequence
from refimpl.scheduler.policies import Policy, SequenceView


@dataclass(frozen=True)
class PreemptionCosts:
    """What a preemption costs on this machine, as measured: bytes over the link, or FLOPs over the rate of the model.

    Swapping moves the keys and values of every token twice, out and in: its time grows with the length. Recomputing runs
    the model over all of them once: FLOPs grow with the length, and those of attention with its square.
    """

    kv_bytes_per_token: int
    link_bytes_per_second: float
    flops_per_token: float
    """Of the matrix products: twice the weights."""
    attention_flops_per_token_pair: float
    """Of a query and a key: 4 times the width of all query heads, over all layers."""
    flops_per_second: float

    def swap_seconds(self, num_tokens: int) -> float:
        """Seconds to move a sequence of so many tokens out and in again."""
        return 2 * num_tokens * self.kv_bytes_per_token / self.link_bytes_per_second

    def recompute_seconds(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens again, alone."""
        pairs = num_tokens * (num_tokens + 1) / 2
        return (num_tokens * self.flops_per_token + pairs * self.attention_flops_per_token_pair) / self.flops_per_second

    @property
    def crossover(self) -> float:
        """The length in tokens from which on swapping is the cheaper; 0 if it always is."""
        per_token = 2 * self.kv_bytes_per_token / self.link_bytes_per_second * self.flops_per_second
        return max(0.0, 2 * (per_token - self.flops_per_token) / self.attention_flops_per_token_pair - 1)


def choose_mode(preemption_mode: str, costs: PreemptionCosts | None, num_tokens: int) -> str:
    """What is done with a victim of so many computed tokens: "swap" or "recompute". Without costs, "auto" recomputes."""
    if preemption_mode != "auto":
        return preemption_mode
    if costs is None:
        return "recompute"
    return "swap" if costs.swap_seconds(num_tokens) < costs.recompute_seconds(num_tokens) else "recompute"


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


def key_of(sequence: Sequence, policy: Policy) -> Any:
    """What orders a sequence.

    Raises:
        PolicyError: the policy raised.

    """
    try:
        return policy.key(view(sequence))
    except Exception as error:  # a user's code raises whatever it likes
        raise PolicyError(f"the policy {policy.name!r} raised {error!r} as {sequence.name}'s place was asked for") from error


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
