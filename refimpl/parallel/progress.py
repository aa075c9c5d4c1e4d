"""Progress: how far each rank is, and which one the others wait for.

A rank whose main thread is stuck still says that it lives. What it says with it is how many collectives it has entered::

    rank 0   … 41 42 ·  waits in its 42nd
    rank 1   … 41 42 ·  waits too
    rank 2   … 41    ·  computes what comes before its 42nd, or is stuck there

All ranks compute the same, so a long step (a prompt of many tokens on a CPU, a kernel that is compiled) takes all of them
as long, and nobody waits. So time counts only from the moment when a rank is seen behind another one, and begins again
with each collective that it enters. On a GPU a collective is entered when the host orders it: what is found is a stuck host.

Rank 0 is never found: it is the engine's own process, where a hook of one's own may stop in a debugger; of a step that does
not end there the watchdog tells.
"""

from __future__ import annotations

from collections.abc import Collection

WHILE_LOADING_SECONDS = 3600.0
"""How long others may wait for a rank that loads: it may have the slowest disk."""


class Progress:
    """Collectives entered, by rank, and how long each rank has been waited for.

    Args:
        size: ranks, rank 0 among them.
        patience: seconds for which others may wait for a rank that serves.

    """

    def __init__(self, size: int, patience: float) -> None:
        self._patience = patience
        self._entered = [0] * size
        self._behind: dict[int, float] = {}

    def tell(self, rank: int, entered: int) -> None:
        """A rank has entered so many collectives since it joined the others."""
        if entered != self._entered[rank]:
            self._entered[rank] = entered
            self._behind.pop(rank, None)

    def forget(self) -> None:
        """Nobody has been waited for yet: this process was stopped, and the others' words with it."""
        self._behind.clear()

    def stuck(self, now: float, serving: Collection[int]) -> str | None:
        """Which rank the others have waited for too long, in a sentence; None if there is none. To be asked often.

        Args:
            now: seconds, of a clock that only goes forward.
            serving: the ranks that have loaded everything.

        """
        furthest, overdue = max(self._entered), {}
        for rank, entered in enumerate(self._entered):
            if rank == 0 or entered == furthest:
                self._behind.pop(rank, None)
                continue
            waited = now - self._behind.setdefault(rank, now)
            if waited > (self._patience if rank in serving else max(self._patience, WHILE_LOADING_SECONDS)):
                overdue[rank] = waited
        if not overdue:
            return None
        rank = min(overdue, key=self._entered.__getitem__)  # the others behind wait for it too
        return (
            f"rank {rank} lives but is stuck: others have waited {overdue[rank]:.0f} seconds in their collective "
            f"{furthest:,}, and it has entered {self._entered[rank]:,} (distributed_timeout_seconds is {self._patience:g})"
        )
