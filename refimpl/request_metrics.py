"""RequestMetrics: when things happened to a request, and how often."""

from __future__ import annotations

import itertools

import msgspec


class RequestMetrics(msgspec.Struct):
    """When things happened to a request, and how many tokens it had; kept up while it runs.

    Times of the day are seconds of the engine's clock (``time.monotonic``), durations are seconds. What has not happened yet
    is None.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    """When it first got a slot and blocks."""
    first_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[list[float]] = []
    """For each sample, when each of its output tokens became known."""
    num_preemptions: int = 0
    """How often a sample gave its slot and blocks back to others."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache when it first ran: they were not computed."""
    num_drafts: int = 0
    """Tokens that were drafted for its samples and checked."""
    num_accepted: int = 0
    """Drafts that became output tokens."""

    @property
    def num_generation_tokens(self) -> int:
        """Output tokens so far, of all samples."""
        return sum(map(len, self.token_times))

    @property
    def queued_time(self) -> float | None:
        """Seconds from arrival until it first ran."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token of any sample (TTFT): queue and prompt."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def inter_token_latencies(self) -> list[list[float]]:
        """For each sample, the seconds between neighbouring output tokens (ITL); 0 between those of one step, where drafts
        are accepted.
        """
        return [[b - a for a, b in itertools.pairwise(times)] for times in self.token_times]

    @property
    def mean_time_per_output_token(self) -> float | None:
        """Seconds a token after the first (TPOT), over all samples; None while none has two."""
        latencies = [latency for sample in self.inter_token_latencies for latency in sample]
        return sum(latencies) / len(latencies) if latencies else None

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival until the last sample ended."""
        return _between(self.arrival_time, self.finished_time)

    def __str__(self) -> str:
        def ms(seconds: float | None) -> str:
            return "not yet" if seconds is None else f"{1000 * seconds:,.1f} ms"

        rows = [
            ("prompt", f"{self.num_prompt_tokens:,} tokens, {self.num_cached_tokens:,} of them cached"),
            ("output", f"{self.num_generation_tokens:,} tokens"),
            ("queued", ms(self.queued_time)),
            ("first token after", ms(self.time_to_first_token)),
            ("a token takes", ms(self.mean_time_per_output_token)),
            ("end to end", ms(self.e2e_latency)),
        ]
        if self.num_drafts:
            rows.append(("drafted", f"{self.num_drafts:,} tokens, {self.num_accepted:,} of them accepted"))
        if self.num_preemptions:
            rows.append(("preempted", f"{self.num_preemptions} times"))
        return "\n".join(f"{name:<18} {value}" for name, value in rows)


def _between(start: float, end: float | None) -> float | None:
    return None if end is None else end - start
