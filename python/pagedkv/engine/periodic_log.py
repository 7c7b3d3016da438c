"""A line in the log every few seconds: rates, requests, usage of the cache and its hits."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.scheduling import Scheduler, SchedulerStats

logger = logging.getLogger(__name__)

_SECONDS = 10.0


class PeriodicLog:
    """Step hook that logs what the engine did since it last said so.

    Parameters
    ----------
    scheduler : Scheduler
        Whose statistics they are.
    seconds : float
        Time between two lines.
    clock : callable
        What says the time in seconds.
    """

    def __init__(
        self, scheduler: Scheduler, seconds: float = _SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._seconds = seconds
        self._clock = clock
        self._last_time = clock()
        self._last = _Counts(scheduler.stats())

    def __call__(self, event: Any) -> None:
        """Log if it is time."""
        now = self._clock()
        elapsed = now - self._last_time
        if elapsed < self._seconds:
            return
        stats = self._scheduler.stats()
        counts = _Counts(stats)
        new = counts.since(self._last)
        self._last_time, self._last = now, counts
        preemptions = f", Preemptions: {new.preemptions}" if new.preemptions else ""
        logger.info(
            "Engine: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs,"
            " Waiting: %d reqs%s, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            new.computed / elapsed,
            new.generated / elapsed,
            stats.num_requests_running,
            stats.num_requests_waiting,
            preemptions,
            100 * stats.kv_cache_usage,
            100 * new.hits / new.queries if new.queries else 0.0,
        )


class _Counts:
    """Counters of an engine at some time, or their growth between two times."""

    def __init__(self, stats: SchedulerStats | None = None) -> None:
        self.computed = self.generated = self.preemptions = self.hits = self.queries = 0
        if stats is not None:
            totals = stats.totals
            self.computed = totals.prompt_tokens - totals.prompt_tokens_cached - totals.prompt_tokens_loaded
            self.generated = totals.generation_tokens
            self.preemptions = totals.num_preemptions
            self.hits, self.queries = totals.prefix_cache.hits, totals.prefix_cache.queries

    def since(self, before: _Counts) -> _Counts:
        new = _Counts()
        for name, value in vars(self).items():
            setattr(new, name, value - getattr(before, name))
        return new
