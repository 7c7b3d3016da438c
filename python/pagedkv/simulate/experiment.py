"""One run: a workload on a system, described by values, so that it can run in another process."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.simulate import CostModel, Workload, simulate
from pagedkv.simulate.machine import Machine
from pagedkv.simulate.traces import has_prefixes, read_trace

Task = TypeVar("Task")
Answer = TypeVar("Answer")
MADE_UP = ("sharegpt", "alpaca", "translation", "chat")
SYSTEMS = ("pagedkv", "vllm", "orca_oracle", "orca_pow2", "orca_max", "fastertransformer")
# A workload is made at once, in memory.
MOST_REQUESTS = 100_000_000


@dataclass(frozen=True)
class Load:
    """Requests.

    Parameters
    ----------
    source : str
        "sharegpt", "alpaca", "translation" or "chat", or the path of a trace, CSV or JSON lines.
    rate : float, optional
        Requests a second, a Poisson process; without it the trace's own arrivals.
    seconds : float
        How long requests come; for the trace's own arrivals there is no end but its own.
    seed : int
        Of everything random.
    n : int
        Samples, or beams, of each request.
    beam : bool
        Whether they are beams.
    prefix_tokens : int
        Tokens of a system prompt.
    shorter_than : int, optional
        Requests with as many tokens or more are dropped, as the paper does.
    sigma : float
        Spread of Alpaca's answers.
    new_conversation : float
        Chance that an arrival of "chat" opens a conversation.
    max_requests : int, optional
        No more than this.
    """

    source: str = "sharegpt"
    rate: float | None = 1.0
    seconds: float = 3600.0
    seed: int = 0
    n: int = 1
    beam: bool = False
    prefix_tokens: int = 0
    shorter_than: int | None = 2048
    sigma: float = 0.85
    new_conversation: float = 0.5
    max_requests: int | None = None

    def make(self) -> Workload:
        """Return the workload."""
        workload = self._shorter(self._made_up()) if self.source in MADE_UP else self._recorded()
        if self.prefix_tokens:
            workload = self._shorter(workload.with_shared_prefix(self.prefix_tokens))
        return workload if self.n == 1 and not self.beam else workload.with_sampling(self.n, beam=self.beam)

    def _shorter(self, workload: Workload) -> Workload:
        if self.shorter_than is None:
            return workload
        workload = workload.shorter_than(self.shorter_than)
        if not len(workload):
            raise InvalidArgumentError(f"source: expected requests below {self.shorter_than} tokens, found none")
        return workload

    def _count(self) -> int:
        if self.rate is None:
            raise InvalidArgumentError(f"rate: expected requests a second for {self.source!r}, found None")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InvalidArgumentError(f"rate: expected requests a second, above 0, found {self.rate}")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InvalidArgumentError(f"seconds: expected a time above 0, finite, found {self.seconds}")
        count = min(self.rate * self.seconds, math.inf if self.max_requests is None else self.max_requests)
        if count > MOST_REQUESTS:
            raise InvalidArgumentError(f"rate x seconds: expected at most {MOST_REQUESTS:,} requests, found {count:g}")
        return max(1, round(count))

    def _made_up(self) -> Workload:
        count = self._count()
        rate = self.rate or 0.0
        if self.source == "sharegpt":
            return Workload.sharegpt(count, rate, self.seed)
        if self.source == "alpaca":
            return Workload.alpaca(count, rate, self.seed, self.sigma)
        if self.source == "translation":
            return Workload.translation(count, rate, self.seed)
        return Workload.chat(count, rate, self.seed, new_conversation=self.new_conversation)

    def _recorded(self) -> Workload:
        path = Path(self.source)
        workload = self._shorter(read_trace(path))
        if self.rate is None:
            if not workload.has_arrivals:
                raise InvalidArgumentError(
                    f"rate: expected requests a second, because {path} has no arrivals, found None"
                )
            return workload if self.max_requests is None else workload.first(self.max_requests)
        return self._rearranged(workload, is_table=not has_prefixes(path))

    def _rearranged(self, workload: Workload, *, is_table: bool) -> Workload:
        """Return as many of the trace's requests as the rate asks for, shuffled; repeated where there are too few.

        A table has lengths alone; requests with prefixes keep their order, and are not repeated.
        """
        count = self._count()
        if is_table:
            chosen = np.random.default_rng(self.seed).permutation(np.arange(count) % len(workload))
            return workload.take(chosen).with_arrivals(self.rate, seed=self.seed)
        if count > len(workload):
            expected = f"at most {len(workload)} requests of a trace with prefixes"
            raise InvalidArgumentError(f"rate x seconds: expected {expected}, found {count}")
        return workload.first(count).with_arrivals(self.rate, seed=self.seed)


@dataclass(frozen=True)
class Run:
    """A workload on a system.

    Parameters
    ----------
    load : Load
        The requests.
    system : str
        One of `SYSTEMS`.
    machine : Machine
        Its sizes.
    cost : tuple
        Kind of the cost model, "fitted", "roofline" or "profile", and its arguments.
    until, window : float, tuple of float
        When planning ends, and the steps that count.
    options : dict
        Further arguments of `simulate`.
    """

    load: Load = field(default_factory=Load)
    system: str = "pagedkv"
    machine: Machine = field(default_factory=Machine)
    cost: tuple[str, dict[str, Any]] = ("fitted", {})
    until: float = math.inf
    window: tuple[float, float] = (0.0, math.inf)
    options: dict[str, Any] = field(default_factory=dict)

    def at(self, rate: float) -> Run:
        """Return the same run at another rate."""
        return replace(self, load=replace(self.load, rate=rate))


def make_cost_model(cost: tuple[str, dict[str, Any]]) -> CostModel:
    """Return the cost model of this kind and these arguments."""
    kind, arguments = cost
    makers: dict[str, Callable[..., CostModel]] = {
        "fitted": CostModel.fitted,
        "roofline": CostModel.roofline,
        "profile": CostModel.profile,
    }
    if kind not in makers:
        raise InvalidArgumentError(f"cost: expected one of {', '.join(makers)}, found {kind!r}")
    known = list(inspect.signature(makers[kind]).parameters)
    if unknown := [name for name in arguments if name not in known]:
        raise InvalidArgumentError(f"cost: expected arguments of {kind}: {', '.join(known)}; found {unknown[0]}")
    return makers[kind](**arguments)


def execute(run: Run) -> dict[str, float]:
    """Run it and return its figures by name.

    `normalized_latency` is the mean over requests that ended of seconds from arrival to end per token of the answer.
    `token_share` counts the tokens of shared blocks for each sequence that holds them: it can be above 1.
    """
    workload, machine = run.load.make(), run.machine
    simulation = simulate(
        workload,
        run.system,
        machine.cache_config(),
        machine.scheduler_config(run.system),
        make_cost_model(run.cost),
        until=run.until,
        window=run.window,
        swap_copies_per_block=machine.copies(run.system),
        block_bytes=float(machine.block_bytes),
        **run.options,
    )
    arrivals, outputs = workload.arrivals, workload.output_tokens
    ended = np.isfinite(simulation.finish)
    latency = (simulation.finish - arrivals)[ended]
    first = (simulation.first_token - arrivals)[ended]
    prompts = float(workload.prompt_tokens[ended].sum())
    tokens = float(outputs[ended].sum()) * run.load.n
    return {
        "requests": float(len(workload)),
        "finished": float(ended.sum()),
        "normalized_latency": float((latency / outputs[ended]).mean()) if ended.any() else math.nan,
        "latency_p50": _quantile(latency, 0.5),
        "latency_p99": _quantile(latency, 0.99),
        "first_token_p50": _quantile(first, 0.5),
        "first_token_p99": _quantile(first, 0.99),
        "tokens_per_second": tokens / simulation.seconds if simulation.seconds else 0.0,
        "mean_requests": simulation.mean_requests,
        "mean_seqs": simulation.mean_seqs,
        "token_share": simulation.token_share,
        "reserved_share": simulation.reserved_share,
        "internal_share": simulation.internal_share,
        "block_waste": simulation.block_waste,
        "saving": 1 - 1 / simulation.sharing_ratio if simulation.sharing_ratio else 0.0,
        "hit_rate": float(simulation.cached_tokens[ended].sum()) / prompts if prompts else 0.0,
        "recomputed": float(simulation.num_recomputed),
        "swapped": float(simulation.num_swapped),
        "swap_seconds": simulation.swap_seconds,
        "mean_step_seconds": simulation.mean_step_seconds,
        "steps": float(simulation.num_steps),
        "seconds": simulation.seconds,
    }


def _quantile(values: np.ndarray[Any, Any], share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan


def execute_all(
    function: Callable[[Task], Answer],
    tasks: Sequence[Task],
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Answer]:
    """Do tasks in processes of their own; yield their answers in their order, each as soon as it can be.

    Parameters
    ----------
    function : callable
        What to do with a task, importable by name.
    tasks : sequence
        The tasks.
    jobs : int, optional
        Processes; by default one for each processor. One means this process.
    progress : callable, optional
        Told how many have been done.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(tasks))
    if jobs <= 1:
        yield from _one_by_one(function, tasks, progress)
        return
    answers: dict[int, Answer] = {}
    num_told = 0
    # Spawned, not forked: what a parent has open and running stays its own.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(function, task): place for place, task in enumerate(tasks)}
        for num_done, done in enumerate(as_completed(waiting), 1):
            answers[waiting[done]] = done.result()
            if progress is not None:
                progress(num_done)
            while num_told in answers:
                yield answers.pop(num_told)
                num_told += 1


def _one_by_one(
    function: Callable[[Task], Answer], tasks: Sequence[Task], progress: Callable[[int], None] | None
) -> Iterator[Answer]:
    for done, task in enumerate(tasks, 1):
        answer = function(task)
        if progress is not None:
            progress(done)
        yield answer
