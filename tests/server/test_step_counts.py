"""What the server counts of steps, on results that are made up."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("transformers")
from pagedkv.server.step_counts import Distribution, StepCounts

BOUNDS = np.array([0.1, 1.0])


class Engine:
    """As much of an engine as the counts look at."""

    def __init__(self, live=()):
        self.limits = SimpleNamespace(max_num_seqs=4)
        self.scheduler = SimpleNamespace(snapshot=lambda: {"requests": {"handle": np.array(self.live, np.int64)}})
        self.live = list(live)

    def get_metrics(self):
        return SimpleNamespace(request_time_per_output_token_seconds=SimpleNamespace(bounds=BOUNDS))


class Steps:
    """Steps at times that are told."""

    def __init__(self, live=()):
        self.now = 0.0
        self.engine = Engine(live)
        self.counts = StepCounts(self.engine, clock=lambda: self.now)

    def step(self, now, *samples, ended=(), num_tokens=1):
        self.now = now
        handles, numbers = np.array(samples, np.int64).reshape(-1, 2).T
        result = SimpleNamespace(
            handles=handles,
            sequence=numbers.astype(np.int32),
            finish_reason=np.array([int(sample in ended) for sample in samples], np.int8),
        )
        self.counts(SimpleNamespace(plan=SimpleNamespace(copies=[], num_tokens=num_tokens), result=result))

    @property
    def gaps(self):
        found = self.counts.inter_token_latency
        return found.counts.tolist(), pytest.approx(found.sum)


def test_first_token_of_a_sample_has_no_latency():
    steps = Steps()
    steps.step(1.0, (0, 0), (1, 0))
    assert steps.gaps == ([0, 0, 0], 0.0)


def test_latency_is_from_one_token_of_a_sample_to_its_next():
    steps = Steps()
    steps.step(1.0, (0, 0), (1, 0))
    steps.step(1.05, (1, 0))
    steps.step(1.5, (1, 0), (0, 0))
    assert steps.gaps == ([1, 2, 0], 0.05 + 0.45 + 0.5)


def test_samples_of_a_request_are_apart():
    steps = Steps()
    steps.step(0.0, (3, 0), (3, 2))
    steps.step(0.5, (3, 2), (3, 1))
    steps.step(2.5, (3, 1), (3, 0), (3, 2))
    assert steps.gaps == ([0, 1, 3], 0.5 + 2.0 + 2.5 + 2.0)


def test_sample_that_ended_is_forgotten():
    steps = Steps()
    steps.step(0.0, (0, 0), (0, 1))
    steps.step(0.5, (0, 0), (0, 1), ended=[(0, 0)])
    steps.step(1.0, (0, 1), (5, 0))
    assert steps.gaps == ([0, 3, 0], 1.5)


def test_requests_that_no_step_ends_are_forgotten_in_time():
    steps = Steps()
    # Each gets a token and is aborted; the request 10,000 goes on.
    steps.engine.live = [10_000]
    steps.step(0.0, (10_000, 0))
    for handle in range(1000):
        steps.step(1.0 + handle, (handle, 0))
    assert len(steps.counts._samples) <= 17
    steps.step(2000.0, (10_000, 0))
    assert steps.gaps == ([0, 0, 1], 2000.0)


def test_tokens_of_steps_are_counted_and_empty_steps_are_not():
    steps = Steps()
    for num_tokens in (0, 1, 9, 20_000):
        steps.step(0.0, num_tokens=num_tokens)
    found = steps.counts.iteration_tokens
    assert (steps.counts.num_steps, found.counts.sum(), found.sum) == (4, 3, 20_010.0)
    assert np.flatnonzero(found.counts).tolist() == [0, 2, 13]


def test_distribution_counts_a_value_at_a_bound_below_it():
    found = Distribution([1.0, 2.0])
    found.observe(np.array([1.0, 1.5, 2.0, 2.1]))
    assert (found.counts.tolist(), found.sum) == ([1, 2, 1], pytest.approx(6.6))
