"""The open loop from Python threads: what `rust/pagedkv-core/benches/scheduler/open_loop.rs` does, under the GIL."""

import functools
import threading
import time
from collections import deque

import numpy as np

import pagedkv
from pagedkv.bench.lines import work
from pagedkv.bench.lines.measured import Measured

SEATS = 1024
NUM_THREADS = 4
RATE = 10_000  # requests per second of all threads together
NUM_LIVE = 512  # requests that a thread leaves alone; when it has added more, it aborts its oldest
PROMPT_LEN, SHARED_LEN = 256, 192
MAX_OUTPUT = 16_384
NUM_BLOCKS = 1 << 19


class Adder(threading.Thread):
    """Adds requests at its rate, as far as the interpreter lets it, and aborts old ones."""

    def __init__(self, scheduler: pagedkv.Scheduler, number: int, seconds: int) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._number = number
        self._seconds = seconds
        self.micros: list[float] = []
        self.handles: list[int] = []
        self.aborted: list[int] = []

    def run(self) -> None:
        rng = np.random.default_rng(self._number)
        prompt = np.random.default_rng(NUM_THREADS).integers(100_000, size=PROMPT_LEN, dtype=np.int32)
        live: deque[int] = deque()
        begun = time.perf_counter()
        for i in range(RATE // NUM_THREADS * self._seconds):
            prompt[SHARED_LEN:] = rng.integers(100_000, size=PROMPT_LEN - SHARED_LEN, dtype=np.int32)
            request_id, max_tokens = f"{self._number}-{i}", int(rng.integers(1, MAX_OUTPUT + 1))
            time.sleep(max(0.0, begun + i * NUM_THREADS / RATE - time.perf_counter()))
            start = time.perf_counter()
            if start > begun + self._seconds:
                return
            handle = self._scheduler.add_request(request_id, prompt, max_tokens=max_tokens)
            self.micros.append((time.perf_counter() - start) * 1e6)
            self.handles.append(handle)
            live.append(handle)
            if len(live) > NUM_LIVE:
                self.aborted.append(live.popleft())
                self._scheduler.abort(self.aborted[-1])


@functools.cache
def open_loop(seconds: int) -> dict[str, Measured]:
    """Return the three lines of the open loop."""
    limits = pagedkv.SchedulerConfig(max_num_seqs=SEATS, max_model_len=2 * MAX_OUTPUT)
    scheduler = pagedkv.Scheduler(pagedkv.CacheConfig(NUM_BLOCKS), limits)
    adders = [Adder(scheduler, number, seconds) for number in range(NUM_THREADS)]
    for adder in adders:
        adder.start()
    micros: list[float] = []
    finished: list[int] = []
    while any(adder.is_alive() for adder in adders):
        step_micros, num_sequences = _step(scheduler, finished)
        if micros or num_sequences == SEATS:  # steps count from the first that fills all seats
            micros.append(step_micros)
    num_finished = len(finished)
    added = [handle for adder in adders for handle in adder.handles]
    aborted = [handle for adder in adders for handle in adder.aborted]
    adding = np.concatenate([adder.micros for adder in adders])
    median = float(np.median(micros))
    sizes = {"step_us": median, "steps": len(micros), "seconds": seconds}
    _step(scheduler, finished)  # takes the last aborts
    lost = _num_lost(scheduler, set(added) - set(aborted) - set(finished))
    return {
        "open_loop_step_p99": Measured([float(np.quantile(micros, 0.99)) / median], sizes=sizes),
        "open_loop_add_p99": Measured([float(np.quantile(adding, 0.99))], sizes={"add_us": float(np.median(adding))}),
        "open_loop_lost": Measured(
            [lost], sizes={"added": len(added), "aborted": len(aborted), "finished": num_finished}
        ),
    }


def _step(scheduler: pagedkv.Scheduler, finished: list[int]) -> tuple[float, int]:
    """Run one step; return its microseconds and sequences, and leave the handles of requests that ended in it."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    scheduling = time.perf_counter() - start
    tokens = work.SAMPLED[: plan.num_samples]
    start = time.perf_counter()
    result = scheduler.commit(plan, tokens)
    micros = (scheduling + time.perf_counter() - start) * 1e6
    finished += [request.handle for request in result.finished]
    return micros, plan.num_sequences


def _num_lost(scheduler: pagedkv.Scheduler, silent: set[int]) -> int:
    """Return how many requests ended unheard, or are still held when those that are left are aborted."""
    num_unheard = abs(scheduler.num_unfinished_requests() - len(silent))
    for handle in silent:
        scheduler.abort(handle)
    work.step(scheduler)
    scheduler.check_integrity()
    return num_unheard + scheduler.num_unfinished_requests()
