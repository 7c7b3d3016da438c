"""Requests and steps: the same tokens, seats, blocks and budgets that `peers/vllm_scheduler.py` uses."""

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.scheduling import Scheduler, StepPlan

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65536
SAMPLED = np.full(1 << 16, 7, np.int32)  # what the model would sample

Prompt = NDArray[np.int32] | list[int]


def make_scheduler(max_num_seqs: int, num_blocks: int, budget: int = 8192, **limits: Any) -> Scheduler:
    """Return a scheduler over a pool of its own."""
    scheduler_config = SchedulerConfig(max_num_seqs, budget, MAX_MODEL_LEN, **limits)
    return Scheduler(CacheConfig(num_blocks, BLOCK_SIZE), scheduler_config)


def prompts(count: int, length: int, shared: int) -> list[list[int]]:
    """Return prompts that begin with the same tokens."""
    rng = random.Random(0)
    head = [rng.randrange(100_000) for _ in range(shared)]
    return [head + [rng.randrange(100_000) for _ in range(length - shared)] for _ in range(count)]


def as_arrays(prompts: Sequence[list[int]]) -> list[NDArray[np.int32]]:
    """Return the prompts as the arrays that are the fast way in."""
    return [np.array(prompt, np.int32) for prompt in prompts]


def add(scheduler: Scheduler, request_id: str, prompt: Prompt, max_tokens: int) -> float:
    """Add a request; return the microseconds."""
    start = time.perf_counter()
    scheduler.add_request(request_id, prompt, max_tokens=max_tokens)
    return (time.perf_counter() - start) * 1e6


def step(scheduler: Scheduler) -> tuple[float, float, StepPlan]:
    """Run one step; return the microseconds of `schedule` and of `commit`, and the plan."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    scheduling = time.perf_counter() - start
    tokens = SAMPLED[: plan.num_samples]
    start = time.perf_counter()
    scheduler.commit(plan, tokens)
    return scheduling * 1e6, (time.perf_counter() - start) * 1e6, plan


def run_to_end(scheduler: Scheduler) -> None:
    """Run steps until every request has ended."""
    while scheduler.has_unfinished_requests():
        step(scheduler)


def mean_per_block(micros: Sequence[float]) -> list[float]:
    """Return the mean of every 16 steps: one in sixteen takes a new block for each sequence."""
    whole = len(micros) // BLOCK_SIZE * BLOCK_SIZE
    return [float(mean) for mean in np.reshape(micros[:whole], (-1, BLOCK_SIZE)).mean(axis=1)]
