"""Serving, simulated: request traces on the scheduler that serves, beside the systems of the paper."""

from pagedkv._core import (
    CostModel,
    SaturatedReplay,
    Simulation,
    Workload,
    read_lengths,
    replay_saturated,
    simulate,
)
from pagedkv.simulate.recorder import TraceRecorder

__all__ = [
    "CostModel",
    "SaturatedReplay",
    "Simulation",
    "TraceRecorder",
    "Workload",
    "read_lengths",
    "replay_saturated",
    "simulate",
]
