"""The drawing of SpeculationView without a browser: the same parts as static/speculation_view.js."""

from __future__ import annotations

from typing import Any

from refimpl.visualizers.figure import WIDTH, Picture, count, document, plain, rect, text
from refimpl.visualizers.palette import Palette, hue, on
from refimpl.visualizers.words import percent

LEFT_WIDTH, RIGHT = 800, 840
"""Pixels: of the rounds, and where the rates begin."""
TOP, LINE, CHIP = 28, 22, 17
CHAR = 6.6
"""Pixels of a character of 11 px, about."""
STEPS_TALL = 64


def draw(picture: Picture, palette: Palette) -> str:
    """Rounds at the left, rates at the right, steps below."""
    body, left = _rounds(picture, palette)
    rates, right = _rates(picture, palette)
    below = max(left, right) + 20
    body += rates + _steps(picture, below, palette)
    return document(WIDTH, below + STEPS_TALL + 44, body, plain(picture["caption"]))


# ---------------------------------------------------------------------- rounds


def _rounds(picture: Picture, palette: Palette) -> tuple[str, float]:
    more = f", {picture['num_hidden']:,} more sequences are not shown" if picture["num_hidden"] else ""
    body = text(0, 8, "The last rounds", palette["ink"], size=12, weight=550)
    body += text(114, 8, f"of each sequence, the newest below{more}", palette["ink2"])
    y = TOP + CHIP / 2
    for letter, _, number, rounds in picture["sequences"]:
        body += rect(0, y - 6, 4, LINE * len(rounds) - 8, hue(palette, number))
        body += text(10, y, letter, palette["ink"], weight=600)
        for one in rounds:
            body += text(92, y, f"step {one[1]:,}", palette["ink3"], size=10, anchor="end")
            body += _round(one, y, number, palette)
            y += LINE
        y += 6
    return body + _legend(y + 6, palette), y + 20


def _round(one: list[Any], y: float, number: int | None, palette: Palette) -> str:
    _, _, drafts, num_accepted, drawn = one
    body, x = "", 102.0
    forms = chips(drafts, num_accepted, drawn)
    for token, form in forms:
        width = CHAR * len(token) + 10
        if x + width > LEFT_WIDTH - 90:
            body += text(x, y, "…", palette["ink2"])
            break
        body += _chip(token, form, x, y, width, number, palette)
        x += width + 3
    told = "no draft found" if not drafts else f"{num_accepted} of {len(drafts)} accepted"
    return body + text(LEFT_WIDTH, y, told if drawn is not None else f"{told}, end", palette["ink2"], anchor="end")


def chips(drafts: list[str], num_accepted: int, drawn: str | None) -> list[tuple[str, str]]:
    """(text, form) of each chip of a round: accepted, refused, behind, drawn. The token drawn stands behind the drafts."""
    forms = []
    for place, token in enumerate(drafts):
        refused = place == num_accepted and drawn is not None
        forms.append((token, "accepted" if place < num_accepted else "refused" if refused else "behind"))
    return [*forms, (drawn, "drawn")] if drawn is not None else forms


def _chip(token: str, form: str, x: float, y: float, width: float, number: int | None, palette: Palette) -> str:
    own = hue(palette, number)
    fills = {"accepted": own, "refused": palette["bg"], "behind": palette["free"], "drawn": palette["bg"]}
    frames = {"refused": f'stroke="{palette["ink3"]}"', "drawn": f'stroke="{palette["ink"]}" stroke-width="2"'}
    inks = {"accepted": on(own), "refused": palette["ink2"], "behind": palette["ink3"], "drawn": palette["ink"]}
    body = rect(round(x, 1), y - CHIP / 2, round(width, 1), CHIP, fills[form], f'rx="3" {frames.get(form, "")}')
    body += text(
        round(x + width / 2, 1), y + 0.5, token, inks[form], weight=600 if form == "drawn" else 400, anchor="middle"
    )
    if form == "refused":
        body += rect(round(x + 4, 1), y - 0.5, round(width - 8, 1), 1.2, palette["ink"])
    return body


def _legend(y: float, palette: Palette) -> str:
    body, x = "", 102.0
    for form, told in LEGEND:
        width = CHAR * len("token") + 10
        body += _chip("token", form, x, y, width, None, palette) + text(x + width + 6, y, told, palette["ink2"])
        x += width + 6.2 * len(told) + 26
    return body


LEGEND = (
    ("accepted", "accepted draft"),
    ("refused", "refused"),
    ("behind", "behind it, not judged"),
    ("drawn", "drawn by the model itself"),
)

# ---------------------------------------------------------------------- rates


def _rates(picture: Picture, palette: Palette) -> tuple[str, float]:
    room = WIDTH - RIGHT
    body = text(RIGHT, 8, "Accepted, by place", palette["ink"], size=12, weight=550)
    body += text(WIDTH, 8, "of those that were judged", palette["ink2"], anchor="end")
    y = TOP + 8.0
    for place, (judged, accepted) in enumerate(picture["places"], start=1):
        body += text(RIGHT, y, f"draft {place}", palette["ink2"])
        body += rect(RIGHT + 52, y - 7, room - 210, 14, palette["free"])
        body += rect(RIGHT + 52, y - 7, round((room - 210) * accepted / judged, 1), 14, palette["tint"])
        body += text(RIGHT + room - 110, y, percent(accepted, judged), palette["ink"], weight=600, anchor="end")
        body += text(WIDTH, y, f"{accepted:,} of {judged:,}", palette["ink2"], anchor="end")
        y += 20
    y += 12
    body += text(RIGHT, y, "Tokens a round", palette["ink"], size=12, weight=550)
    for at, told in zip(_COLUMNS, ("rounds", "measured", "1 + α₁ + α₁α₂ + …"), strict=True):
        body += text(RIGHT + at, y, told, palette["ink3"], size=10, anchor="end")
    for label, *numbers in table(picture):
        y += 18
        body += text(RIGHT, y, label, palette["ink"])
        for at, told in zip(_COLUMNS, numbers, strict=True):
            body += text(RIGHT + at, y, told, palette["ink"], anchor="end")
    return body, y + 12


_COLUMNS = (166, 246, 376)


def table(picture: Picture) -> list[list[str]]:
    """Rows of [drafts, rounds, measured, predicted], as text; the last one is of all rounds."""
    rows = [
        [f"K = {drafts}", f"{rounds:,}", f"{tokens / rounds:.2f}", f"{predicted:.2f}"]
        for drafts, rounds, tokens, predicted in picture["lengths"]
    ]
    if len(rows) != 1 and picture["num_rounds"]:
        rows.append(["all", f"{picture['num_rounds']:,}", f"{picture['measured']:.2f}", f"{picture['predicted']:.2f}"])
    return rows


# ---------------------------------------------------------------------- steps


def _steps(picture: Picture, y: float, palette: Palette) -> str:
    steps = picture["steps"]
    highest = max([2.0, *(tokens / rows for _, rows, tokens in steps if rows), *(drafts + 1 for drafts, _, _ in steps)])
    body = text(0, y + 8, "Tokens a sequence, step by step", palette["ink"], size=12, weight=550)
    note = (
        f"the last {count(len(steps), 'step')}; a line at 1 + K, the most that K drafts can bring"
        if steps
        else "no step yet"
    )
    body += text(WIDTH, y + 8, note, palette["ink2"], anchor="end")
    top, bottom, left = y + 22, y + 22 + STEPS_TALL, 28
    pitch = min(16.0, (WIDTH - left) / max(1, len(steps)))
    for level in range(1, int(highest) + 1):
        at = round(bottom - STEPS_TALL * level / highest, 1)
        body += rect(left, at, WIDTH - left, 1, palette["rule"])
        if level in (1, int(highest)):
            body += text(left - 6, at, f"{level}", palette["ink3"], size=10, anchor="end")
    for index, (drafts, rows, tokens) in enumerate(steps):
        x = left + index * pitch
        if rows:
            tall = STEPS_TALL * tokens / rows / highest
            body += rect(round(x, 1), round(bottom - tall, 1), round(max(1, pitch - 1), 1), round(tall, 1), palette["tint"])
        at = round(bottom - STEPS_TALL * (1 + drafts) / highest, 1)
        body += rect(round(x, 1), at - 0.75, round(pitch, 1), 1.5, palette["ink"])
    if steps:
        last = f"K = {steps[-1][0]}" + (f", {steps[-1][2] / steps[-1][1]:.2f} tokens a sequence" if steps[-1][1] else "")
        body += text(left, bottom + 14, f"{last} in this step", palette["ink2"], size=10)
    return body + rect(left, top - 4, 1, STEPS_TALL + 4, palette["rule"])
