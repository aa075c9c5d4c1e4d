"""Step records without texts: what may be shown to whoever may not read other people's prompts and answers.

Token ids are texts to whoever has the tokenizer, so they go too; whether a row drew a token stays.
"""

from __future__ import annotations

from typing import Any

import msgspec

from refimpl.events import ArrivalRecord, StepRecord
from refimpl.outputs import Decision

HIDDEN = "·"
"""Stands for a token's text."""


def without_texts(record: StepRecord) -> StepRecord:
    """The same record with every text and every token id hidden."""
    changes: dict[str, Any] = {
        "token_ids": _ids(record.token_ids),
        "token_texts": _texts(record.token_texts),
    }
    if record.arrived:
        changes["arrived"] = tuple(map(_arrival, record.arrived))
    if record.chosen:
        changes["chosen"] = tuple((sequence_id, 0, HIDDEN) for sequence_id, _, _ in record.chosen)
    if record.drafts:
        changes["drafts"] = tuple(map(_ids, record.drafts))
        changes["draft_texts"] = tuple(map(_texts, record.draft_texts))
    if any(_tells(decision) for decision in record.decisions):
        changes["decisions"] = tuple(map(_decision, record.decisions))
    return msgspec.structs.replace(record, **changes)


def _ids(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([min(token_id, 0) for token_id in token_ids])


def _texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([HIDDEN if text else "" for text in texts])


def _arrival(arrival: ArrivalRecord) -> ArrivalRecord:
    return msgspec.structs.replace(
        arrival, token_ids=_ids(arrival.token_ids), token_texts=(HIDDEN,) * len(arrival.token_texts)
    )


def _tells(decision: Decision) -> bool:
    """Whether a decision holds a text of its request: the stop string that was found."""
    return "stop" in decision.numbers


def _decision(decision: Decision) -> Decision:
    if not _tells(decision):
        return decision
    return msgspec.structs.replace(decision, numbers={**decision.numbers, "stop": HIDDEN})
