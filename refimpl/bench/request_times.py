"""What a user feels of a service: when the tokens of each request came, and what that comes to over all requests.

========================  =============================================================================
time to first token       from the arrival, the time in the queue included (TTFT)
time per output token     from the first token to the last, over the tokens after the first (TPOT)
widest gap                the longest that a user waited between two tokens
goodput                   requests a second that kept both of two limits, one for TTFT and one for TPOT
========================  =============================================================================

Tokens that come together, as drafts do that were accepted, have no gap between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass
class RequestTimes:
    """Of one request; kept up while its tokens come. Times are seconds of one clock."""

    arrival: float
    first: float | None = None
    """When its first token came."""
    last: float | None = None
    """When its latest came."""
    tokens: int = 0
    widest_gap: float = 0.0

    def came(self, now: float, count: int) -> None:
        """Take down that ``count`` more tokens came."""
        if not count:
            return
        if self.last is None:
            self.first = now
        else:
            self.widest_gap = max(self.widest_gap, now - self.last)
        self.last = now
        self.tokens += count

    @property
    def to_first_token(self) -> float | None:
        """Seconds until its first token; None before that."""
        return None if self.first is None else self.first - self.arrival

    @property
    def per_output_token(self) -> float | None:
        """Seconds a token after the first; None while there is one at most."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    def keeps(self, ttft: float, tpot: float) -> bool:
        """Whether it kept both limits, in seconds. A request of one token has no time per output token to exceed."""
        return self.to_first_token is not None and self.to_first_token <= ttft and (self.per_output_token or 0.0) <= tpot


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """The values of :data:`SHARES`: of n sorted ones the one in place ``⌊share · n⌋``, counted from 0. Empty of none."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in SHARES.items()}


def summary(requests: Sequence[RequestTimes], seconds: float) -> dict[str, Any]:
    """Percentiles and rates over requests that were served within ``seconds``."""
    output_tokens = sum(request.tokens for request in requests)
    return {
        "requests": len(requests),
        "output_tokens": output_tokens,
        "seconds": seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "ttft": percentiles(value for one in requests if (value := one.to_first_token) is not None),
        "tpot": percentiles(value for one in requests if (value := one.per_output_token) is not None),
        "widest_gap": percentiles(one.widest_gap for one in requests if one.tokens > 1),
    }


def goodput(requests: Sequence[RequestTimes], seconds: float, ttft: float, tpot: float) -> dict[str, float]:
    """Requests a second, and the share of all, that kept both limits (seconds)."""
    kept = sum(request.keeps(ttft, tpot) for request in requests)
    return {"ttft": ttft, "tpot": tpot, "requests_per_second": kept / seconds, "share": kept / max(1, len(requests))}
