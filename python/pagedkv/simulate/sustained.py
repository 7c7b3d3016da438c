"""The rate that a system sustains: where normalized latency passes a threshold."""

import math
from dataclasses import dataclass

from pagedkv.simulate.experiment import Run, execute

# Seconds per token of the answer, halfway up the paper's plots, which end at 1.
THRESHOLD = 0.5
# Relative width of the bracket at which the search ends.
PRECISION = 0.002
MAX_RATE = 4096.0


@dataclass(frozen=True)
class Search:
    """A run whose rate is to be found, a rate to begin with, and the threshold."""

    run: Run
    start: float = 1.0
    threshold: float = THRESHOLD


def sustained_rate(search: Search) -> float:
    """Return the rate at which mean normalized latency passes the threshold.

    The search doubles or halves until the threshold lies between two rates, and then cuts the bracket in the middle of
    the logarithms. A longer trace moves the answer: queues that grow have longer to grow.
    """
    low, high = _bracket(search)
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        if _is_sustained(search, middle):
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _bracket(search: Search) -> tuple[float, float]:
    low = high = search.start
    while not _is_sustained(search, low):
        high, low = low, low / 2
        if low < 1 / MAX_RATE:
            raise ValueError(f"no rate keeps {search.run.system} below {search.threshold} s per token")
    while low == high or _is_sustained(search, high):
        low, high = high, high * 2
        if high > MAX_RATE:
            raise ValueError(
                f"{search.run.system} stays below {search.threshold} s per token at {low} requests a second"
            )
    return low, high


def _is_sustained(search: Search, rate: float) -> bool:
    return execute(search.run.at(rate))["normalized_latency"] <= search.threshold
