"""SpeculationView: are the drafts worth it? What was drafted and accepted, by place, and what a round brings.

Left, for each sequence the last rounds, a chip a token: accepted drafts, the first refused one struck through, those behind
it pale, and the token that the model drew itself in a frame. Right, how often the drafts at each place were accepted, of
those that came to be judged, and what rounds bring, beside what these rates predict. Below, tokens a sequence step by step,
with the number of drafts. How the log tells them is said in :mod:`refimpl.visualizers.speculation_fold`.
"""

from __future__ import annotations

from typing import Any

from refimpl.visualizers.figure import WHOLE, Caption, Look, Picture, count
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import Palette
from refimpl.visualizers.speculation_fold import Outcomes, Round, SpeculationFold
from refimpl.visualizers.speculation_svg import draw
from refimpl.visualizers.words import percent, readable

MOST_LINES = 12
"""Rounds that are shown, of all sequences together."""
MOST_SEQUENCES = 6
ROUNDS_LOOKED_AT = 400
"""The last ones, among which those of each sequence are found."""
MOST_STEPS = 120
LONGEST_TEXT = 14
"""Characters of a chip."""


class SpeculationView:
    """The figure; see :class:`refimpl.visualizers.figure.Figure`."""

    name = "speculation_view"
    title = "SpeculationView"
    question = "Are the drafts worth it: how many are accepted, and what does a round bring?"
    folds = (SpeculationFold,)

    def picture(self, history: History, position: int, look: Look = WHOLE) -> Picture:
        """The rounds up to the record at ``position``.

        ``sequences`` are [letter, request, hue, rounds], a round is [position, step, drafts, accepted, the token drawn or
        None]; ``places`` are [judged, accepted] for the 1st, 2nd, … draft; ``lengths`` are [drafts, rounds, tokens, tokens
        a round as predicted]; ``steps`` are [drafts, sequences, tokens], the last one at ``position``.
        """
        fold = history.fold(SpeculationFold)
        position = min(position, len(history.records) - 1)
        outcomes, newest = fold.outcomes(position), fold.newest(position, ROUNDS_LOOKED_AT)
        lengths = outcomes.by_length()
        predicted = sum(rounds * tokens for _, rounds, _, tokens in lengths) / max(1, outcomes.num_rounds)
        sequences, num_hidden = _sequences(newest, look.pinned)
        return {
            "caption": _caption(outcomes),
            "sequences": sequences,
            "num_hidden": num_hidden,
            "places": [list(place) for place in outcomes.places()],
            "lengths": [list(length) for length in lengths],
            "predicted": predicted,
            "measured": outcomes.num_tokens / max(1, outcomes.num_rounds),
            "num_rounds": outcomes.num_rounds,
            "num_cut": outcomes.num_cut,
            "steps": [list(step) for step in fold.steps[max(0, position + 1 - MOST_STEPS) : position + 1]],
        }

    def svg(self, picture: Picture, palette: Palette) -> str:
        """Rounds, rates and steps."""
        return draw(picture, palette)

    def text(self, picture: Picture) -> str:
        """The same in letters: ``[the cat] -sat- (on) +ran``: two accepted, one refused, one not judged, one drawn."""
        lines = []
        for letter, _, _, rounds in picture["sequences"]:
            lines += [f"{letter:>3} step {step:>5,}  {_line(*rest)}" for _, step, *rest in rounds]
        for place, (judged, accepted) in enumerate(picture["places"], start=1):
            bar = "█" * round(20 * accepted / judged)
            lines.append(f"draft {place:>2} {bar:<20} {percent(accepted, judged):>4}  {accepted:,} of {judged:,} accepted")
        for drafts, rounds, tokens, predicted in picture["lengths"]:
            told = f"{tokens / rounds:.2f} tokens a round, {predicted:.2f} predicted, over {count(rounds, 'round')}"
            lines.append(f"K = {drafts:>2}: {told}")
        return "\n".join(lines)


def _line(drafts: list[str], num_accepted: int, drawn: str | None) -> str:
    """One round in letters."""
    parts = [f"[{' '.join(drafts[:num_accepted])}]"] if num_accepted else []
    behind = drafts[num_accepted:]
    if behind and drawn is not None:
        parts.append(f"-{behind[0]}-")
        behind = behind[1:]
    parts += [f"({' '.join(behind)})"] if behind else []
    return " ".join([*parts, f"+{drawn}" if drawn is not None else "end"])


def _sequences(newest: list[Round], pinned: str | None) -> tuple[list[list[Any]], int]:
    """[letter, request, hue, last rounds] of the sequences of the newest rounds, in order of age; how many more they are."""
    of: dict[int, list[Round]] = {}
    for one in reversed(newest):
        of.setdefault(one.sequence_id, []).append(one)
    chosen = sorted(of, key=lambda sequence_id: of[sequence_id][0].request_id != pinned)[:MOST_SEQUENCES]
    each = max(1, MOST_LINES // max(1, len(chosen)))
    shown = []
    for sequence_id in sorted(chosen):
        rounds = of[sequence_id][:each][::-1]
        last = rounds[-1]
        shown.append([last.letter, last.request_id, last.hue, [_told(one) for one in rounds]])
    return shown, len(of) - len(chosen)


def _told(one: Round) -> list[Any]:
    drafts = [_short(text) for text in one.drafts]
    return [one.position, one.step, drafts, one.num_accepted, None if one.drawn is None else _short(one.drawn)]


def _short(text: str) -> str:
    shown = readable(text)
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[: LONGEST_TEXT - 1]}…"


def _caption(outcomes: Outcomes) -> Caption:
    drafted, lengths = outcomes.with_drafts(), outcomes.by_length()
    num_rounds = drafted.num_rounds
    if not num_rounds:
        return [("No tokens have been drafted and judged.", True)]
    judged, accepted = outcomes.places()[0]
    predicted = sum(rounds * tokens for drafts, rounds, _, tokens in lengths if drafts) / num_rounds
    parts: Caption = [
        (f"A round with drafts brings {drafted.num_tokens / num_rounds:.2f} tokens", True),
        (f", over {count(num_rounds, 'round')}; {percent(accepted, judged)} of the first drafts are accepted. ", False),
        (f"The rates of all places predict {predicted:.2f}: 1 + α₁ + α₁α₂ + …, as far as each round's drafts go.", False),
    ]
    if without := outcomes.num_rounds - num_rounds:
        parts.append((f" For {count(without, 'row')} more no draft was found.", False))
    if outcomes.num_cut:
        ended = "round was" if outcomes.num_cut == 1 else "rounds were"
        parts.append((f" {outcomes.num_cut:,} {ended} cut short by the end of a request.", False))
    return parts


FIGURE = SpeculationView()
