"""Turns: everything that is compared is measured a little at a time, one after the other, again and again."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Samples = dict[str, list[float]]

MIN_SCALING = 1.7
MAX_TRIES = 5
REST_SECONDS = 0.01  # until threads that wait for more work in a loop have gone to sleep
RETRY_SECONDS = 10.0
# What a turn runs before it counts, as the program of the limits does: cores that rested are slow for milliseconds.
WARM_SECONDS = 0.03


@dataclass(frozen=True)
class Turn:
    """Something to measure: its samples come `count` at a time."""

    name: str
    run: Callable[[int], list[float]]
    count: int = 1


class MachineBusy(Exception):
    """Two threads are not worth two: others use this machine, and no figure of it counts."""


def stopwatch(run: Callable[[int], object]) -> Callable[[int], list[float]]:
    """Return what times calls of `run`, in seconds; they are numbered on and on, so that `run` can go around."""
    numbers = itertools.count()

    def time_call() -> float:
        start = time.perf_counter()
        run(next(numbers))
        return time.perf_counter() - start

    def time_calls(count: int) -> list[float]:
        warm = 0.0
        while warm < WARM_SECONDS:
            warm += time_call()
        return [time_call() for _ in range(count)]

    return time_calls


def take_turns(turns: Sequence[Turn], rounds: int) -> Samples:
    """Return the samples of all turns by name, after a round that does not count; every round starts at another."""
    samples: Samples = {turn.name: [] for turn in turns}
    for number in range(-1, rounds):
        first = max(number, 0) % len(turns)
        for turn in [*turns[first:], *turns[:first]]:
            time.sleep(REST_SECONDS)
            taken = turn.run(turn.count)
            if number >= 0:
                samples[turn.name] += taken
    return samples


def scaling(samples: Mapping[str, Sequence[float]]) -> float:
    """Return how many times the peak of one thread two threads reach.

    The best sample of one thread: what slows down both alike would not show in two medians.
    """
    return statistics.median(samples["fma_2"]) / max(samples["fma_1"])


def measure(run: Callable[[], Samples], *, any_machine: bool = False) -> tuple[Samples, bool]:
    """Measure until two threads reach `MIN_SCALING`, and answer the samples and whether they count.

    Raises `MachineBusy` after `MAX_TRIES`; with `any_machine` the first try is taken as it is.
    """
    seen = []
    for attempt in range(MAX_TRIES):
        if attempt:
            time.sleep(RETRY_SECONDS)
        samples = run()
        seen.append(scaling(samples))
        if seen[-1] >= MIN_SCALING or any_machine:
            return samples, seen[-1] >= MIN_SCALING
    tries = ", ".join(f"{times:.2f}" for times in seen)
    raise MachineBusy(f"two threads reach {tries} times the peak of one, at least {MIN_SCALING} is needed")
