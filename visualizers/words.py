"""Small words of captions: lists of letters, and the texts of tokens."""

from __future__ import annotations

from collections.abc import Iterable


def names(letters: Iterable[str], most: int = 6) -> str:
    """``A``, ``A and B``, ``A, B and C``, ``A, B, C and 9 more``."""
    listed = list(letters)
    if len(listed) > most:
        listed = [*listed[: most - 1], f"{len(listed) - most + 1} more"]
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def readable(token: str) -> str:
    """A token's text with its line ends shown, and without characters that no document may hold."""
    shown = token.replace("\n", "↵").replace("\t", "⇥")
    return "".join(char if char.isprintable() else "·" for char in shown) or "·"


def percent(part: float, whole: float) -> str:
    """``48%``, and ``<1%`` where rounding would say that there is none."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.5:
        return "<1%"
    if 99.5 <= share < 100:
        return ">99%"
    return f"{share:.0f}%"


def size(count: float) -> str:
    """Bytes: ``12 B``, ``360 KiB``, ``41.8 MiB``, ``1.25 GiB``."""
    for unit, power, digits in (("GiB", 3, 2), ("MiB", 2, 1), ("KiB", 1, 1)):
        if count >= 1024**power:
            whole = count % 1024**power == 0
            return f"{count / 1024**power:,.{0 if whole else digits}f} {unit}"
    return f"{count:,.0f} B"


def letters(number: int) -> str:
    """0 → A, 25 → Z, 26 → AA: names short enough for a cell."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(65 + rest) + text
    return text
