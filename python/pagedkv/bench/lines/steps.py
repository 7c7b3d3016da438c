"""Steps: steady decode, what a long context costs, and whole lives."""

import statistics

import numpy as np

from pagedkv.bench.lines import work
from pagedkv.bench.lines.measured import Measured
from pagedkv.scheduling import Scheduler

SHORT, LONG = 512, 32768
CONTEXT_SEATS = 256
CONTEXT_STEPS = 384


def steady_decode(seats: int) -> Measured:
    """Return microseconds of a step in which every seat decodes."""
    requests = work.as_arrays(work.prompts(seats, 512, 0))
    samples = []
    for _ in range(5):
        scheduler = work.make_scheduler(seats, seats * 48 + 64, budget=32768)
        for i, prompt in enumerate(requests):
            work.add(scheduler, str(i), prompt, 160)
        micros = []
        while scheduler.has_unfinished_requests():
            scheduling, committing, plan = work.step(scheduler)
            if plan.num_tokens == seats == plan.num_sequences:
                micros.append(scheduling + committing)
        samples += work.mean_per_block(micros)
    return Measured(samples)


def decode_context_cost() -> Measured:
    """Return the cost of a decode step at a long context over that at a short one, in pools of equal size, by turns."""
    schedulers = {length: _decoding(length) for length in (SHORT, LONG)}
    micros: dict[int, list[float]] = {length: [] for length in schedulers}
    for _ in range(CONTEXT_STEPS):
        for length, scheduler in schedulers.items():
            scheduling, committing, plan = work.step(scheduler)
            assert plan.num_tokens == CONTEXT_SEATS
            micros[length].append(scheduling + committing)
    short, long = (statistics.median(work.mean_per_block(micros[length])) for length in (SHORT, LONG))
    return Measured([long / short], sizes={"context_512_us": short, "context_32768_us": long})


def _decoding(length: int) -> Scheduler:
    """Return a scheduler in which every seat has a prompt of this length behind it."""
    num_blocks = CONTEXT_SEATS * (LONG + CONTEXT_STEPS + work.BLOCK_SIZE) // work.BLOCK_SIZE + 1
    scheduler = work.make_scheduler(CONTEXT_SEATS, num_blocks, budget=1 << 20)
    rng = np.random.default_rng(0)
    for i in range(CONTEXT_SEATS):
        prompt = rng.integers(100_000, size=length, dtype=np.int32)
        work.add(scheduler, str(i), prompt, CONTEXT_STEPS + work.BLOCK_SIZE)
    num_prefilled = 0
    while num_prefilled < CONTEXT_SEATS:
        num_prefilled = work.step(scheduler)[2].num_samples
    return scheduler


def life_2000() -> Measured:
    """Return requests per second, from `add_request` to the commit of the last token."""
    requests = work.as_arrays(work.prompts(2000, 1024, 768))
    samples = []
    for _ in range(15):
        scheduler = work.make_scheduler(256, 40_000)
        micros = sum(work.add(scheduler, str(i), prompt, 64) for i, prompt in enumerate(requests))
        while scheduler.has_unfinished_requests():
            scheduling, committing, _ = work.step(scheduler)
            micros += scheduling + committing
        samples.append(len(requests) / micros * 1e6)
    return Measured(samples)
