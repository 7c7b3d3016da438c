"""The line that a server logs every few seconds, on a real scheduler and a clock that is told."""

import numpy as np
import pytest

pytest.importorskip("transformers")
from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.engine.periodic_log import PeriodicLog
from pagedkv.scheduling import Scheduler


class Steps:
    """A scheduler whose steps the log is told of."""

    def __init__(self):
        self.now = 0.0
        self.scheduler = Scheduler(CacheConfig(16, 4), SchedulerConfig(2, 64, 64))
        self.log = PeriodicLog(self.scheduler, clock=lambda: self.now)

    def run(self, request_id):
        """Run a request of ten tokens, eight of which are in full blocks, to its fourth token."""
        self.scheduler.add_request(request_id, np.arange(10, dtype=np.int32), max_tokens=4)
        while self.scheduler.has_unfinished_requests():
            self.step()

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan, [1] * plan.num_samples)
        self.log(None)


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", "pagedkv.engine.periodic_log")
    return lambda: [record.getMessage() for record in caplog.records]


def test_line_has_rates_requests_usage_and_hits_since_the_last(lines):
    steps = Steps()
    steps.run("a")
    steps.now = 10.0
    steps.log(None)
    steps.run("b")
    steps.scheduler.add_request("c", np.arange(20, 30, dtype=np.int32), max_tokens=4)
    steps.now = 20.0
    steps.step()
    first, second = lines()
    assert first == (
        "Engine: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 0.4 tokens/s, Running: 0 reqs,"
        " Waiting: 0 reqs, KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
    )
    # Of 20 tokens looked up eight were found, the others computed; three of fifteen blocks are held.
    assert second == (
        "Engine: Avg prompt throughput: 1.2 tokens/s, Avg generation throughput: 0.5 tokens/s, Running: 1 reqs,"
        " Waiting: 0 reqs, KV cache usage: 20.0%, Prefix cache hit rate: 40.0%"
    )


def test_nothing_is_logged_before_it_is_time(lines):
    steps = Steps()
    steps.now = 9.9
    steps.run("a")
    assert lines() == []
