"""Continuous batching: requests in, one plan of flat arrays per step out."""

from pagedkv._core import (
    Explanation,
    FinishedRequest,
    Histogram,
    PrefixCacheStats,
    RequestStats,
    RequestTotals,
    Scheduler,
    SchedulerStats,
    StepPlan,
    StepResult,
)

__all__ = [
    "Explanation",
    "FinishedRequest",
    "Histogram",
    "PrefixCacheStats",
    "RequestStats",
    "RequestTotals",
    "Scheduler",
    "SchedulerStats",
    "StepPlan",
    "StepResult",
]
