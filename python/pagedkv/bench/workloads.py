"""Requests to measure with: prompts, output lengths, and when each arrives."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.simulate import Workload

VOCABULARY = 100_000


@dataclass(frozen=True)
class Request:
    """One request of a workload."""

    prompt: NDArray[np.int32]
    max_tokens: int
    arrival: float


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, of shape (num_requests,)."""

    prompt: NDArray[np.int64]
    output: NDArray[np.int64]


def random_prompts(
    rng: np.random.Generator, count: int, input_len: int, output_len: int, range_ratio: float
) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Return prompts that share nothing and output lengths, each drawn from `length * (1 +- range_ratio)`."""
    inputs = _around(rng, input_len, range_ratio, count)
    return [_tokens(rng, int(length)) for length in inputs], _around(rng, output_len, range_ratio, count)


def prefix_repetition(
    rng: np.random.Generator, count: int, num_prefixes: int, prefix_len: int, suffix_len: int, output_len: int
) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Return prompts in shuffled order, each one of a few prefixes and a suffix of its own."""
    prefixes = [_tokens(rng, prefix_len) for _ in range(num_prefixes)]
    chosen = rng.permutation(np.arange(count) % num_prefixes)
    prompts = [np.concatenate([prefixes[i], _tokens(rng, suffix_len)]) for i in chosen]
    return prompts, np.full(count, output_len, np.int64)


def chat_lengths(rng: np.random.Generator, count: int) -> Lengths:
    """Return lengths like those of conversations people shared: long tails, medians of some tens and hundreds.

    Log-normal: the medians and the spread are those of ShareGPT's prompts (36; 2.0) and answers (251; 1.3), as rounded
    figures; a trace of your own says more.
    """
    prompt = np.exp(rng.normal(math.log(36), 2.0, count)).clip(1, 4096)
    output = np.exp(rng.normal(math.log(251), 1.3, count)).clip(1, 2048)
    return Lengths(prompt.astype(np.int64), output.astype(np.int64))


def recorded(workload: Workload) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Return prompts that share what those of a trace shared, and the output lengths."""
    return [workload.prompt(place) for place in range(len(workload))], workload.output_tokens.astype(np.int64)


def of_lengths(rng: np.random.Generator, lengths: Lengths) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Return prompts of these lengths that share nothing, and the output lengths."""
    return [_tokens(rng, int(length)) for length in lengths.prompt], lengths.output


def poisson(rng: np.random.Generator, count: int, rate: float) -> NDArray[np.float64]:
    """Return seconds of arrival, `rate` a second on average, independent of one another."""
    return np.cumsum(rng.exponential(1 / rate, count))


def bursts(count: int, size: int, interval: float) -> NDArray[np.float64]:
    """Return seconds of arrival of groups of `size` that come at once, `interval` apart."""
    return np.asarray(np.arange(count) // size * interval, np.float64)


def _around(rng: np.random.Generator, length: int, ratio: float, count: int) -> NDArray[np.int64]:
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return rng.integers(low, high + 1, size=count)


def _tokens(rng: np.random.Generator, length: int) -> NDArray[np.int32]:
    return rng.integers(VOCABULARY, size=length, dtype=np.int32)
