"""The story of a request: every decision that was taken about it, in order, with times and numbers."""

from __future__ import annotations

from refimpl.decision_texts import describe
from refimpl.request import DECISIONS_KEPT, Request, Sequence, Status


def explain(request: Request, num_waiting_before: dict[int, int]) -> str:
    """A paragraph a sample: what was decided, at which step, how long after the arrival, and where it stands now.

    ``num_waiting_before`` says, for each sequence id that waits, how many have their turn before it.
    """
    lines = []
    for sequence in request.sequences:
        lines.append(f"request {sequence.name}")
        if len(sequence.decisions) == DECISIONS_KEPT:
            lines.append(f"  (the last {DECISIONS_KEPT} decisions)")
        lines += [
            f"  {decision.time - request.metrics.arrival_time:+9.3f} s  step {decision.step:<5d} {describe(decision)}"
            for decision in sequence.decisions
        ]
        lines.append(f"  now: {_now(sequence, num_waiting_before)}")
    if num_drafts := request.metrics.num_drafts:
        lines.append(f"of {num_drafts} drafted tokens, {request.metrics.num_accepted} were accepted")
    return "\n".join(lines)


def _why(stop_reason: int | str, finish_reason: str | None) -> str:
    """A stop string in quotes; a token id, or a sentence about an error, as it is."""
    return repr(stop_reason) if finish_reason == "stop" else str(stop_reason)


def _now(sequence: Sequence, num_waiting_before: dict[int, int]) -> str:
    output = len(sequence.output_token_ids)
    if sequence.status is Status.FINISHED:
        why = "" if sequence.stop_reason is None else f" ({_why(sequence.stop_reason, sequence.finish_reason)})"
        times = sequence.token_times
        first = f", the first {times[0] - sequence.request.metrics.arrival_time:.3f} s after arrival" if times else ""
        return f"finished with reason {sequence.finish_reason}{why}: {output} output tokens{first}"
    if sequence.status is Status.WAITING:
        if sequence.sequence_id not in num_waiting_before:
            return "joins when sample 0 has computed the prompt that they share"
        before = num_waiting_before[sequence.sequence_id]
        place = "at the head of the queue" if before == 0 else f"behind {before} others"
        return f"waits {place}, with {len(sequence.token_ids)} tokens known"
    return (
        f"runs in slot {sequence.slot}: {sequence.num_computed_tokens} tokens computed, {output} output tokens of at most "
        f"{sequence.request.max_tokens}"
    )
