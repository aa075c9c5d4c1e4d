"""When requests come: an open loop, in which nobody waits for an answer before sending the next request.

Gaps between arrivals are drawn from a gamma distribution of mean ``1 / rate`` and shape ``burstiness``. Of shape 1 it is the
exponential one, and the arrivals are a Poisson process; a shape below 1 makes bursts with pauses between them, one above 1
makes the arrivals even.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import accumulate, takewhile

from refimpl.errors import ConfigError


def arrival_times(rate: float, seconds: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Seconds from the start at which requests come, rising, none after ``seconds``.

    Args:
        rate: arrivals a second on average.
        seconds: how long requests keep coming.
        seed: of the gaps; the same seed gives the same pattern at every rate, stretched.
        burstiness: the shape of the gaps' distribution.

    Raises:
        ConfigError: a number is not above 0, or nobody would come.

    """
    for name, value in (("the rate", rate), ("seconds", seconds), ("burstiness", burstiness)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value:g}; it must be a number above 0")
    times = list(takewhile(lambda at: at <= seconds, accumulate(gaps(rate, seed, burstiness))))
    if not times:
        raise ConfigError(
            f"nobody comes within {seconds:g} seconds at {rate:g} requests a second with seed {seed}; measure for longer, "
            "or at a higher rate"
        )
    return times


def gaps(rate: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """The seconds before each arrival, without end."""
    drawn = random.Random(seed)  # noqa: S311 - a workload, no secret
    while True:
        yield drawn.gammavariate(burstiness, 1 / (rate * burstiness))
