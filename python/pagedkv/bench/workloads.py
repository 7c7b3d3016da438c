"""Requests to measure with: prompts, output lengths, and when each arrives."""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 100_000
# Names that traces have for a column.
PROMPT_COLUMNS = ("prompt_tokens", "input_length", "input_tokens", "ContextTokens")
OUTPUT_COLUMNS = ("output_tokens", "output_length", "GeneratedTokens")
ARRIVAL_COLUMNS = ("arrival", "timestamp", "TIMESTAMP")


@dataclass(frozen=True)
class Request:
    """One request of a workload."""

    prompt: NDArray[np.int32]
    max_tokens: int
    arrival: float


@dataclass(frozen=True)
class Lengths:
    """Lengths of a trace in tokens, and seconds of arrival where it has them; all of shape (num_requests,)."""

    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    arrival: NDArray[np.float64] | None = None


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


def read_trace(path: Path) -> Lengths:
    """Read a trace of lengths: CSV with a header, or one JSON object per line.

    Columns are told by name: `prompt_tokens` and `output_tokens`, or as the traces of Azure and Mooncake call them; an
    `arrival` in seconds is optional (a `timestamp` of Mooncake is in milliseconds, a `TIMESTAMP` of Azure a date).
    """
    rows = list(_rows(path))
    if not rows:
        raise ValueError(f"{path}: expected at least one request, found none")
    prompt = _column(path, rows, PROMPT_COLUMNS)
    output = _column(path, rows, OUTPUT_COLUMNS)
    name = next((name for name in ARRIVAL_COLUMNS if name in rows[0]), None)
    arrival = None if name is None else _arrivals(path, name, [row[name] for row in rows])
    return Lengths(prompt, output, arrival)


def of_lengths(rng: np.random.Generator, lengths: Lengths) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Return prompts of these lengths that share nothing, and the output lengths."""
    return [_tokens(rng, int(length)) for length in lengths.prompt], lengths.output


def poisson(rng: np.random.Generator, count: int, rate: float) -> NDArray[np.float64]:
    """Return seconds of arrival, `rate` a second on average, independent of one another."""
    return np.cumsum(rng.exponential(1 / rate, count))


def bursts(count: int, size: int, interval: float) -> NDArray[np.float64]:
    """Return seconds of arrival of groups of `size` that come at once, `interval` apart."""
    return np.asarray(np.arange(count) // size * interval, np.float64)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, 1):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}: line {number}: {error}") from error
        else:
            yield from csv.DictReader(file)


def _column(path: Path, rows: list[dict[str, str]], names: tuple[str, ...]) -> NDArray[np.int64]:
    name = next((name for name in names if name in rows[0]), None)
    if name is None:
        raise ValueError(f"{path}: expected one of the columns {', '.join(names)}, found {', '.join(rows[0])}")
    values = np.empty(len(rows), np.int64)
    for i, row in enumerate(rows):
        try:
            values[i] = int(row[name])
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(
                f"{path}: request {i + 1}: {name}: expected a whole number, found {row.get(name)!r}"
            ) from error
    # Traces have requests without an answer; each draws one token at least.
    return values.clip(min=1)


def _arrivals(path: Path, name: str, values: list[str]) -> NDArray[np.float64]:
    try:
        if name == "TIMESTAMP":
            seconds = np.array([datetime.fromisoformat(value[:26]).timestamp() for value in values])
        else:
            seconds = np.array([float(value) for value in values]) / (1000 if name == "timestamp" else 1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name}: {error}") from error
    return np.asarray(np.sort(seconds) - seconds.min(), np.float64)


def _around(rng: np.random.Generator, length: int, ratio: float, count: int) -> NDArray[np.int64]:
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return rng.integers(low, high + 1, size=count)


def _tokens(rng: np.random.Generator, length: int) -> NDArray[np.int32]:
    return rng.integers(VOCABULARY, size=length, dtype=np.int32)
