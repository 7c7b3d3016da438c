"""Longest-prefix-match: the `schedule` that orders thousands of waiting requests while no seat is free."""

import numpy as np

from pagedkv.bench.lines import work
from pagedkv.bench.lines.measured import Measured
from pagedkv.scheduling import Scheduler

NUM_WAITING = 4096
NUM_GROUPS = 16
PROMPT_LEN = 2000
SHARED_LEN = 1792
CHUNK = 256
HOLDER_LEN = 2048
NUM_DECODED = 128


def lpm_4096() -> Measured:
    """Return microseconds of a `schedule` that follows one after which nothing in the cache changed."""
    scheduler = _waiting()
    for _ in range(HOLDER_LEN // CHUNK):
        work.step(scheduler)
    samples = [scheduling for scheduling, _, _ in (work.step(scheduler) for _ in range(NUM_DECODED))]
    return Measured(samples, sizes=_sizes(scheduler))


def lpm_4096_changed() -> Measured:
    """Return microseconds of a `schedule` after 256 blocks were cached that the waiting requests can hit."""
    samples = []
    for _ in range(3):
        scheduler = _waiting()
        work.step(scheduler)
        for _ in range(SHARED_LEN // CHUNK - 1):
            scheduling, _, plan = work.step(scheduler)
            assert plan.num_tokens == NUM_GROUPS * CHUNK
            samples.append(scheduling)
    return Measured(samples, sizes=_sizes(scheduler))


def _waiting() -> Scheduler:
    """Return a scheduler whose seats are all taken and in which 4,096 requests wait.

    A request sits on each of 16 seats and computes a prompt of 2,048 tokens, 256 a step; 256 requests that share 1,792
    tokens with it wait for each.
    """
    limits = {"policy": "lpm", "long_prefill_token_threshold": CHUNK}
    num_blocks = NUM_GROUPS * (HOLDER_LEN + NUM_DECODED + CHUNK) // work.BLOCK_SIZE + 1
    scheduler = work.make_scheduler(NUM_GROUPS, num_blocks, NUM_GROUPS * CHUNK, **limits)
    rng = np.random.default_rng(0)
    holders = rng.integers(100_000, size=(NUM_GROUPS, HOLDER_LEN), dtype=np.int32)
    for group, prompt in enumerate(holders):
        work.add(scheduler, f"holder {group}", prompt, NUM_DECODED + CHUNK)
    work.step(scheduler)
    for i in range(NUM_WAITING):
        own = rng.integers(100_000, size=PROMPT_LEN - SHARED_LEN, dtype=np.int32)
        work.add(scheduler, str(i), np.concatenate([holders[i % NUM_GROUPS, :SHARED_LEN], own]), 16)
    return scheduler


def _sizes(scheduler: Scheduler) -> dict[str, float]:
    num_running, num_waiting = scheduler.num_requests()
    return {"num_running": num_running, "num_waiting": num_waiting, "shared_tokens": SHARED_LEN}
