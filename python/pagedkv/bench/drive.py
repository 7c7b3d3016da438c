"""A scheduler under a workload, with a model that only takes time."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedkv.bench.workloads import Request
from pagedkv.scheduling import Scheduler

ANSWER = np.full(1 << 16, 7, np.int32)


@dataclass(frozen=True)
class StepTime:
    """What the model would take for a step, in microseconds: so much each time, and so much per token."""

    base_us: float = 5000.0
    token_us: float = 10.0

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a step over this many tokens."""
        return (self.base_us + self.token_us * num_tokens) * 1e-6


@dataclass
class Measured:
    """What was seen; times in microseconds of the scheduler's work, in seconds of the clock otherwise."""

    step_us: list[float] = field(default_factory=list)
    add_us: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    elapsed_s: float = 0.0

    def summary(self) -> dict[str, float]:
        """Return the figures by name."""
        scheduling = (sum(self.step_us) + sum(self.add_us)) * 1e-6
        step = np.array(self.step_us or [0.0])
        queue = np.array(self.queue_s or [0.0])
        return {
            "requests": self.num_requests,
            "refused": self.num_refused,
            "steps": len(self.step_us),
            "tokens": self.num_tokens,
            "elapsed_s": self.elapsed_s,
            "requests_per_s": self.num_requests / self.elapsed_s if self.elapsed_s else 0.0,
            "scheduler_s": scheduling,
            "scheduler_steps_per_s": len(self.step_us) / scheduling if scheduling else 0.0,
            "scheduler_requests_per_s": self.num_requests / scheduling if scheduling else 0.0,
            "step_us_median": float(np.median(step)),
            "step_us_p99": float(np.quantile(step, 0.99)),
            "add_us_median": float(np.median(self.add_us or [0.0])),
            "queue_s_mean": float(queue.mean()),
            "queue_s_p99": float(np.quantile(queue, 0.99)),
            "hit_rate": self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0,
            "preemptions": self.num_preemptions,
            "usage_mean": float(np.mean(self.usage or [0.0])),
            "usage_max": max(self.usage, default=0.0),
        }


class Clock:
    """Seconds since the start: of a clock that steps move, or of the wall."""

    def __init__(self, *, is_virtual: bool) -> None:
        self._is_virtual = is_virtual
        self._begun = time.perf_counter()
        self._now = 0.0

    def now(self) -> float:
        """Return the time."""
        return self._now if self._is_virtual else time.perf_counter() - self._begun

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        if self._is_virtual:
            self._now += max(0.0, seconds)
        elif seconds > 0:
            time.sleep(seconds)


def drive(
    scheduler: Scheduler,
    requests: Sequence[Request],
    step_time: StepTime,
    clock: Clock,
    progress: Callable[[int], None] = lambda num_done: None,
) -> Measured:
    """Run requests to their end, each added when it arrives.

    What can never fit is counted and left out. `progress` hears how many requests have ended.
    """
    measured = Measured()
    coming = deque(sorted(requests, key=lambda request: request.arrival))
    arrivals: dict[str, float] = {}
    lengths: dict[str, int] = {}
    while coming or scheduler.has_unfinished_requests():
        while coming and coming[0].arrival <= clock.now():
            _add(scheduler, coming.popleft(), len(measured.add_us) + measured.num_refused, arrivals, lengths, measured)
        if not scheduler.has_unfinished_requests():
            if coming:
                clock.wait(coming[0].arrival - clock.now())
            continue
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduling = time.perf_counter() - start
        for _, request_id, sample in plan.new:
            if sample == 0 and request_id in arrivals:
                measured.queue_s.append(clock.now() - arrivals.pop(request_id))
        clock.wait(step_time.seconds(plan.num_tokens))
        start = time.perf_counter()
        result = scheduler.commit(plan, ANSWER[: plan.num_samples])
        measured.step_us.append((scheduling + time.perf_counter() - start) * 1e6)
        measured.num_tokens += plan.num_tokens
        measured.usage.append(scheduler.usage)
        for request in result.finished:
            measured.num_requests += 1
            measured.num_prompt_tokens += lengths.pop(request.request_id)
            measured.num_cached_tokens += request.num_cached_tokens
        if result.finished:
            progress(measured.num_requests + measured.num_refused)
    measured.num_preemptions = scheduler.num_preemptions
    measured.elapsed_s = clock.now()
    return measured


def _add(
    scheduler: Scheduler,
    request: Request,
    number: int,
    arrivals: dict[str, float],
    lengths: dict[str, int],
    measured: Measured,
) -> None:
    request_id = f"{number}"
    start = time.perf_counter()
    try:
        scheduler.add_request(request_id, request.prompt, max_tokens=request.max_tokens, now=request.arrival)
    except ValueError:
        measured.num_refused += 1
        return
    measured.add_us.append((time.perf_counter() - start) * 1e6)
    arrivals[request_id] = request.arrival
    lengths[request_id] = len(request.prompt)
