"""What the server counts of the engine's steps, beside what the scheduler counts of requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagedkv.engine import LLMEngine

# Bounds of vLLM 0.32 (`v1/metrics/loggers.py`).
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Distribution:
    """Values by bounds, as `pagedkv.scheduling.Histogram` has them.

    Parameters
    ----------
    bounds : array-like of float
        Upper bounds of the buckets but the last, ascending.

    Attributes
    ----------
    counts : numpy.ndarray, shape (num_bounds + 1,), int64
        Values in each bucket, not summed up.
    sum : float
        Sum of the values.
    """

    def __init__(self, bounds: Any) -> None:
        self.bounds = np.asarray(bounds, np.float64)
        self.counts = np.zeros(len(self.bounds) + 1, np.int64)
        self.sum = 0.0

    def observe(self, values: NDArray[Any]) -> None:
        """Count values."""
        self.counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.sum += float(values.sum())


class StepCounts:
    """Step hook that counts steps, their tokens, copied blocks, and the time between the tokens of each sample.

    Parameters
    ----------
    engine : LLMEngine
        Whose steps they are.
    clock : callable
        What says the time in seconds.

    Attributes
    ----------
    num_steps, num_copies : int
        Steps, and blocks that were copied before they were written.
    iteration_tokens : Distribution
        Tokens of each step.
    inter_token_latency : Distribution
        Seconds from one token of a sample to its next; where a step gives it several, to the last of them.

    Notes
    -----
    A step costs a few searches in sorted arrays, whatever the number of samples.
    """

    def __init__(self, engine: LLMEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_steps = 0
        self.num_copies = 0
        self.iteration_tokens = Distribution(_TOKENS)
        self.inter_token_latency = Distribution(engine.get_metrics().request_time_per_output_token_seconds.bounds)
        self._engine = engine
        self._clock = clock
        self._num_seats = engine.limits.max_num_seqs
        # Samples that got a token and may get another, ascending, and when they got it.
        self._samples = np.empty(0, np.int64)
        self._times = np.empty(0, np.float64)
        self._prune_above = 4 * self._num_seats

    def __call__(self, event: Any) -> None:
        """Count a step."""
        plan, result = event.plan, event.result
        self.num_steps += 1
        self.num_copies += len(plan.copies)
        if plan.num_tokens:
            self.iteration_tokens.observe(np.array([plan.num_tokens]))
        if len(result.handles):
            # A request has no more samples than there are seats.
            self._take(result.handles * self._num_seats + result.sequence, result.finish_reason != 0)

    def _take(self, samples: NDArray[np.int64], has_ended: NDArray[np.bool_]) -> None:
        now = self._clock()
        at = np.searchsorted(self._samples, samples)
        is_known = np.zeros(len(samples), bool)
        inside = at < len(self._samples)
        is_known[inside] = self._samples[at[inside]] == samples[inside]
        known = at[is_known]
        self.inter_token_latency.observe(now - self._times[known])
        self._times[known] = now
        if has_ended.any():
            ended = np.isin(self._samples, samples[has_ended], assume_unique=True)
            self._samples, self._times = self._samples[~ended], self._times[~ended]
        if (new := samples[~(is_known | has_ended)]).size:
            self._add(new, now)

    def _add(self, samples: NDArray[np.int64], now: float) -> None:
        if len(self._samples) + len(samples) > self._prune_above:
            self._prune()
        all_samples = np.concatenate([self._samples, samples])
        times = np.concatenate([self._times, np.full(len(samples), now)])
        order = np.argsort(all_samples, kind="stable")
        self._samples, self._times = all_samples[order], times[order]

    def _prune(self) -> None:
        """Forget samples of requests that ended in a way that no step tells of: aborts, and texts that stop them."""
        live = self._engine.scheduler.snapshot()["requests"]["handle"]
        is_live = np.isin(self._samples // self._num_seats, live)
        self._samples, self._times = self._samples[is_live], self._times[is_live]
        self._prune_above = max(4 * self._num_seats, 2 * len(self._samples))
