"""Continuous batching: requests in, one plan of flat arrays per step out."""

from pagedkv._core import FinishedRequest, Scheduler, StepPlan, StepResult

__all__ = ["FinishedRequest", "Scheduler", "StepPlan", "StepResult"]
