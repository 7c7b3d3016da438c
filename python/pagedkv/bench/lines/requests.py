"""Requests: adding and admitting them, a whole prompt from the cache, a burst that shares a prefix."""

from collections.abc import Sequence

import numpy as np

from pagedkv.bench.lines import work
from pagedkv.bench.lines.measured import Measured
from pagedkv.scheduling import Scheduler

BURST_PREFIX = 8000
ADD_ROUNDS = 5  # the first one touches memory that the process has never used, as a server does once


def _after_first(first: work.Prompt, budget: int = 8192) -> Scheduler:
    """Return a scheduler in which one request has run from beginning to end."""
    scheduler = work.make_scheduler(256, 100_000, budget)
    work.add(scheduler, "first", first, 1)
    work.run_to_end(scheduler)
    return scheduler


def add_request_1024(*, as_list: bool) -> Measured:
    """Return microseconds of `add_request` with 1,024 tokens, of which 768 are cached."""
    first, *others = work.prompts(501, 1024, 768)
    requests: Sequence[work.Prompt] = others if as_list else work.as_arrays(others)
    samples = []
    for _ in range(ADD_ROUNDS):
        scheduler = _after_first(first)
        samples += [work.add(scheduler, str(i), prompt, 16) for i, prompt in enumerate(requests)]
    return Measured(samples)


def add_admit_1024() -> Measured:
    """Return the same with each request's share of the `schedule` that admits all of them."""
    first, *others = work.as_arrays(work.prompts(257, 1024, 768))
    samples = []
    for _ in range(20):
        scheduler = _after_first(first, budget=256 * 1024)
        adding = sum(work.add(scheduler, str(i), prompt, 16) for i, prompt in enumerate(others))
        admitting, _, plan = work.step(scheduler)
        assert plan.num_sequences == len(others)
        samples.append((adding + admitting) / len(others))
    return Measured(samples)


def full_hit_32k() -> Measured:
    """Return microseconds of `add_request` and of the `schedule` that admits a prompt whose blocks are all cached."""
    scheduler = work.make_scheduler(4, 8192, budget=65536)
    prompt = work.as_arrays(work.prompts(1, 32768, 0))[0]
    samples = []
    for i in range(41):
        adding = work.add(scheduler, str(i), prompt, 1)
        admitting, _, plan = work.step(scheduler)
        samples.append(adding + admitting)
        assert plan.num_tokens == (work.BLOCK_SIZE if i else len(prompt))
        work.run_to_end(scheduler)
    return Measured(samples[1:])


def burst_256() -> Measured:
    """Return how often a prefix is computed that 256 requests bring at once."""
    scheduler = work.make_scheduler(256, 4096, budget=65536)
    for i, prompt in enumerate(work.as_arrays(work.prompts(256, BURST_PREFIX + 16, BURST_PREFIX))):
        work.add(scheduler, str(i), prompt, 1)
    num_computed, num_steps = 0, 0
    while scheduler.has_unfinished_requests():
        plan = work.step(scheduler)[2]
        num_computed += int(np.count_nonzero(plan.positions < BURST_PREFIX))
        num_steps += 1
    return Measured([num_computed / BURST_PREFIX], sizes={"steps": num_steps})
