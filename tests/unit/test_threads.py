"""Python threads around one scheduler, under the GIL: nothing is lost, nothing comes twice, everything ends.

Free-threaded builds are not tried here, and nothing is claimed for them: docs/threads.md.
"""

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, StateError

NUM_THREADS = 4
REQUESTS_PER_THREAD = 150


@pytest.fixture(autouse=True)
def switch_often():
    """Let threads change places a hundred times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    yield
    sys.setswitchinterval(interval)


def make_scheduler(max_plans_in_flight=1, **options):
    limits = pagedkv.SchedulerConfig(8, max_num_batched_tokens=64, max_plans_in_flight=max_plans_in_flight)
    return pagedkv.Scheduler(pagedkv.CacheConfig(48, 4), limits, **options)


def step(scheduler):
    plan = scheduler.schedule()
    return plan, scheduler.commit(plan, np.full(plan.num_samples, 7, np.int32))


def add_and_abort(scheduler, thread):
    """Add requests and abort some of those added so far, many of them over already; return all and the aborted ones."""
    random = np.random.default_rng(thread)
    added, aborted = [], set()
    for number in range(REQUESTS_PER_THREAD):
        prompt = np.arange(1 + random.integers(12), dtype=np.int32) % 3
        max_tokens = 1 + int(random.integers(6))
        added.append(scheduler.add_request(f"{thread}-{number}", prompt, max_tokens=max_tokens, n=1 + number % 2))
        if random.integers(3) == 0:
            handle = added[random.integers(len(added))]
            scheduler.abort(handle)
            aborted.add(handle)
    return added, aborted


def check_empty(scheduler):
    step(scheduler)
    scheduler.check_integrity()
    _, _, held, fenced = scheduler.num_blocks_by_state
    assert (scheduler.num_unfinished_requests(), held, fenced) == (0, 0, 0)


def test_requests_of_many_threads_end_once_each_while_another_thread_steps():
    scheduler = make_scheduler()
    finished = []
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        futures = [threads.submit(add_and_abort, scheduler, thread) for thread in range(NUM_THREADS)]
        while not all(future.done() for future in futures) or scheduler.has_unfinished_requests():
            finished += [request.handle for request in step(scheduler)[1].finished]
    added = [handle for future in futures for handle in future.result()[0]]
    aborted = {handle for future in futures for handle in future.result()[1]}
    assert len(set(added)) == NUM_THREADS * REQUESTS_PER_THREAD
    assert len(set(finished)) == len(finished)
    assert set(finished) <= set(added) <= set(finished) | aborted
    check_empty(scheduler)


def test_questions_of_other_threads_are_answered_while_a_thread_steps():
    scheduler = make_scheduler()
    handle = scheduler.add_request("long", np.arange(8, dtype=np.int32), max_tokens=100)
    stopped = threading.Event()

    def ask():
        num_answers = 0
        while not stopped.is_set():
            assert 0.0 <= scheduler.usage <= 1.0
            assert sum(scheduler.num_blocks_by_state) == 47
            table = scheduler.block_table(handle)
            assert table is None or (scheduler.ref_counts(table) >= 0).all()
            scheduler.check_integrity()
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(ask) for _ in range(2)]
        for number in range(99):
            scheduler.add_request(str(number), np.arange(5, dtype=np.int32), max_tokens=2)
            step(scheduler)
        stopped.set()
        assert all(future.result() > 0 for future in futures)


def test_threads_that_step_at_the_same_time_break_nothing():
    scheduler = make_scheduler(max_plans_in_flight=2)
    for number in range(40):
        scheduler.add_request(str(number), np.arange(6, dtype=np.int32), max_tokens=4)

    def run():
        while scheduler.has_unfinished_requests():
            with contextlib.suppress(StateError):
                plan = scheduler.schedule()
                while not commit(plan):
                    time.sleep(0)

    def commit(plan):
        """Answer whether the plan was the oldest: another thread's may have to end first."""
        try:
            scheduler.commit(plan, np.full(plan.num_samples, 7, np.int32))
        except StateError:
            return False
        return True

    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(run) for _ in range(3)]
        assert [future.result(timeout=120) for future in futures] == [None] * 3
    check_empty(scheduler)


def test_plans_are_read_and_dropped_by_other_threads_while_their_buffers_are_used_again():
    scheduler = make_scheduler()

    def read(slots, token_ids, expected):
        for _ in range(20):
            assert (slots.tolist(), token_ids.tolist()) == expected
        return len(token_ids)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        futures = []
        for number in range(200):
            scheduler.add_request(str(number), np.full(1 + number % 9, number, np.int32), max_tokens=2)
            plan, _ = step(scheduler)
            arrays = (plan.slot_mapping, plan.token_ids)
            futures.append(threads.submit(read, *arrays, tuple(array.tolist() for array in arrays)))
            del plan, arrays
        assert all(future.result() > 0 for future in futures)


def test_policy_of_the_callers_runs_without_the_lock_while_other_threads_add_and_ask():
    asked = []

    def shortest_first(*, handles, num_tokens, **_):
        asked.append(scheduler.usage)
        threads.submit(lambda: scheduler.num_requests()).result(timeout=60)
        return num_tokens.astype(float)

    scheduler = make_scheduler(policy=shortest_first)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        futures = [threads.submit(add_and_abort, scheduler, thread) for thread in range(NUM_THREADS - 1)]
        while not all(future.done() for future in futures) or scheduler.has_unfinished_requests():
            step(scheduler)
        check_empty(scheduler)
    assert asked


def test_a_mistake_of_one_thread_is_its_own():
    scheduler = make_scheduler()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        good = [threads.submit(add_and_abort, scheduler, thread) for thread in range(2)]
        bad = [threads.submit(scheduler.add_request, "bad", np.array([-1], np.int32), max_tokens=1) for _ in range(50)]
        while not all(future.done() for future in good) or scheduler.has_unfinished_requests():
            step(scheduler)
    assert all(isinstance(future.exception(), InvalidArgumentError) for future in bad)
    assert all(len(future.result()[0]) == REQUESTS_PER_THREAD for future in good)
    check_empty(scheduler)
