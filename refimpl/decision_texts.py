"""Decisions in words: why the scheduler did what it did to a sequence, as a sentence with its numbers."""

from __future__ import annotations

import re

from refimpl.outputs import Decision

DECISION_TEXTS = {
    "arrived": "arrives with {prompt} prompt tokens, wants at most {max_tokens} more; {ahead} waiting before it",
    "waits_blocks": "waits: needs {needed} block(s), {free} free",
    "waits_watermark": "waits: needs {needed} block(s), {free} free beside the {kept} that are kept for those that run",
    "waits_slot": "waits: all {slots} slots are taken",
    "waits_batch": "waits: a static batch runs to its end, {running} sequence(s) still",
    "waits_budget": "waits: the step's budget of {budget} tokens is spent",
    "waits_beams": "waits: other beams of its search have not proposed their tokens yet",
    "waits_update": "pauses: the pool is empty, and a token in flight may be about to free blocks",
    "admitted": "is admitted to slot {slot}: {new} of its {total} tokens in this step, {blocks} new block(s)",
    "resumed": "is admitted again, to slot {slot}: recomputes {new} of {total} tokens in this step, {blocks} new block(s)",
    "swapped_in": "comes back from swap, to slot {slot}: {moved} block(s) copied from the host, {kept} were still here",
    "dropped_swap": "loses its swapped blocks, {blocks} of them on the device, which others need: it is to be recomputed",
    "prefix_hit": "finds {tokens} of its tokens in the prefix cache, in {blocks} block(s)",
    "forked": "shares {blocks} block(s) with {parent}, takes slot {slot}, and draws its next token on its own",
    "copied": "writes into a block that others use: block {source} is copied to {target} first",
    "chunked": "is split by the budget: {new} tokens in this step, {left} left",
    "decoding": "is computed up to its last token; from here one token a step",
    "preempted": "is preempted ({mode}) and waits with its {tokens} tokens: {cause}; {blocks} block(s) freed",
    "drafts_no_more": "goes on without drafted tokens: {cause}",
    "exhausted": "ends: it runs alone and its {tokens} tokens fill the whole pool of {pool} blocks",
    "left_batch": "leaves the static batch: {tokens} token(s) were computed after its end, for nobody",
    "stop_string": "holds the stop string {stop!r} in its text",
    "finished": "ends after {tokens} output tokens: {reason}",
}
"""The sentence of each kind of decision; its fields are the decision's numbers. ``(s)`` becomes an s, or nothing after 1."""
_PLURAL = re.compile(r"(\b(\d+)(?: new)? (?:block|sequence|token))\(s\)")


def describe(decision: Decision) -> str:
    """A decision as a sentence whose subject is the sequence."""
    text = DECISION_TEXTS[decision.kind].format(**decision.numbers)
    return _PLURAL.sub(lambda found: found[1] + ("" if found[2] == "1" else "s"), text)
