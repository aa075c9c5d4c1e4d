"""Overview: a whole run of any size as a small grid of letters, where nothing that happened is averaged away."""

from __future__ import annotations

import re

BINS = 480
"""Most bins in a line: two pixels each at full width."""
LINES = 64
_ZERO = ord("0")
_RUN = re.compile(rb"(.)\1*")


class Overview:
    """A line is one row, or some neighbouring ones; a bin is one step, or some neighbouring ones; a cell keeps the highest
    state that any of them had. When a grid is full, neighbours are merged in twos.

    Args:
        num_states: states are numbers below this, by priority: the highest of a cell is what it shows.
        first: the first column; what was before is not known, and stays empty.

    """

    def __init__(self, num_states: int, first: int = 0) -> None:
        self.steps_per_bin = 1
        while first // self.steps_per_bin >= BINS:
            self.steps_per_bin *= 2
        self.rows_per_line = 1
        self._num_states = num_states
        self._num_bins = first // self.steps_per_bin
        self._cells: list[bytearray] = []
        self._counts: list[list[int]] = []
        """By line and state, the rows that are in it now."""
        self._states: list[int] = []
        """By line, a bit for each state that a row is in."""
        self._touched: list[tuple[int, int]] = []
        """(row, state): what happened since the last column was closed."""

    def change(self, row: int, old: int, new: int) -> None:
        """A row goes from one state to another, from the next column to be closed on."""
        while row // self.rows_per_line >= LINES:
            self._halve_lines()
        line = row // self.rows_per_line
        while line >= len(self._cells):
            self._cells.append(bytearray([_ZERO] * self._num_bins))
            self._counts.append([0] * self._num_states)
            self._states.append(0)
        counts = self._counts[line]
        counts[old] -= 1
        counts[new] += 1
        if counts[old] <= 0:
            self._states[line] &= ~(1 << old)
        if counts[new] > 0:
            self._states[line] |= 1 << new
        self._touched.append((row, new))

    def mark(self, row: int, state: int) -> None:
        """Something happened to a row in the column at hand that is no state of it."""
        self._touched.append((row, state))

    def close(self, column: int) -> None:
        """The column's states are all known. O(rows that changed), and O(lines) where a bin begins."""
        while column // self.steps_per_bin >= BINS:
            self._halve_bins()
        if column // self.steps_per_bin >= self._num_bins:
            self._num_bins += 1
            for cells, states in zip(self._cells, self._states, strict=True):
                cells.append(_ZERO + max(0, states.bit_length() - 1))
        for row, state in self._touched:
            cells = self._cells[row // self.rows_per_line]
            cells[-1] = max(cells[-1], _ZERO + state)
        self._touched.clear()

    def lines(self) -> list[list[int]]:
        """Each line as runs, flat: state, bins, state, bins, … from its first bin on."""
        return [
            [number for run in _RUN.finditer(cells) for number in (cells[run.start()] - _ZERO, run.end() - run.start())]
            for cells in self._cells
        ]

    def _halve_bins(self) -> None:
        self.steps_per_bin *= 2
        self._num_bins = (self._num_bins + 1) // 2
        self._cells = [_in_twos(cells) for cells in self._cells]

    def _halve_lines(self) -> None:
        self.rows_per_line *= 2
        pairs = range(0, len(self._cells), 2)
        self._cells = [bytearray(map(max, zip(*self._cells[i : i + 2], strict=True))) for i in pairs]
        self._counts = [list(map(sum, zip(*self._counts[i : i + 2], strict=True))) for i in pairs]
        self._states = [sum(1 << state for state, count in enumerate(counts) if count > 0) for counts in self._counts]


def _in_twos(cells: bytearray) -> bytearray:
    """The higher of each two neighbours; the last one may be alone."""
    merged = bytearray(map(max, cells[::2], cells[1::2]))
    return merged + cells[-1:] if len(cells) % 2 else merged
