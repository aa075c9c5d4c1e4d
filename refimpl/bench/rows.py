"""Rows that are measured one after the other: each is told and kept as soon as it is there, within a budget of time.

A row that was not measured says why in its place: ``{"not_measured": "interrupted"}``. None is missing silently.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from refimpl.errors import ConfigError, RefimplError

Figures = dict[str, Any]


class DoesNotFit(Exception):  # noqa: N818 - no error: a row that is left out
    """Even the smallest form of a row takes longer than the time that is left for it."""


class Rows:
    """The rows of one result.

    Args:
        names: all rows, in the order in which they will be measured.
        tell: what a row found, in one line.
        max_minutes: for all of them together, and what is loaded in between; None is no limit.

    Raises:
        ConfigError: ``max_minutes`` is 0 or less.

    """

    def __init__(self, names: Sequence[str], tell: Callable[[Figures], str], max_minutes: float | None = None) -> None:
        if max_minutes is not None and not max_minutes > 0:
            raise ConfigError(f"max_minutes is {max_minutes}; it must be above 0")
        self._names = names
        self._tell = tell
        self._deadline = math.inf if max_minutes is None else time.perf_counter() + 60 * max_minutes
        self._figures: dict[str, Figures] = {}
        self._ended_by = "no time was left"

    def measure(self, name: str, row: Callable[[float], Figures]) -> Figures | None:
        """Measure a row; it is called with the seconds that are its share of what is left, ``inf`` without a budget.

        None is returned for a row that does not fit.
        """
        left = self._deadline - time.perf_counter()
        try:
            if left <= 0:
                raise DoesNotFit("no time was left")
            self._figures[name] = row(left / (len(self._names) - len(self._figures)))
        except DoesNotFit as reason:
            self._leave_out(name, str(reason))
            return None
        _say(f"{name}: {self._tell(self._figures[name])}")
        return self._figures[name]

    @contextmanager
    def kept_when_interrupted(self) -> Iterator[None]:
        """Within the block, Ctrl-C or the failure of a side ends the measuring; what was measured, if anything, is kept."""
        try:
            yield
        except (KeyboardInterrupt, RefimplError) as error:
            if not self.measured():
                raise
            self._ended_by = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)

    def measured(self) -> dict[str, Figures]:
        """The rows that have figures."""
        return {name: figures for name, figures in self._figures.items() if "not_measured" not in figures}

    def all(self) -> dict[str, Figures]:
        """Every row, measured or not; those that nobody came to are told now."""
        for name in self._names:
            if name not in self._figures:
                self._leave_out(name, self._ended_by)
        return self._figures

    def _leave_out(self, name: str, reason: str) -> None:
        reason = " ".join(reason.split())  # one line, for tables
        self._figures[name] = {"not_measured": reason}
        _say(f"{name}: not measured, {reason}")


def chosen(asked: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The rows asked for, in their usual order; all, if none is.

    Raises:
        ConfigError: one is not known.

    """
    unknown = [name for name in asked or () if name not in known]
    if unknown:
        raise ConfigError(f"rows are {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if not asked or name in asked]


def _say(line: str) -> None:
    print(f"refimpl: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the result's JSON has stdout to itself
