"""The experiments of the paper, and what this package adds: each a list of runs, and lines made of what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pagedkv.simulate import Workload
from pagedkv.simulate.experiment import Run, execute, execute_all
from pagedkv.simulate.paper import beyond, capacity, causes, memory, models, swapping, throughput
from pagedkv.simulate.paper.lines import Line
from pagedkv.simulate.paper.memory import Sources
from pagedkv.simulate.sustained import sustained_rate

__all__ = ["Experiment", "Line", "Sources", "experiments", "run_experiments"]

# Means over so many seeds: windows of the paper hold some hundred requests, and shares of seeds lie three points apart.
FIGURE_2_SEEDS = 10
FIGURE_13_SEEDS = 5
# With nothing but the step itself, whatever runs in it, memory alone decides.
MEMORY_ALONE = {"per_seq": 0.0, "per_context_token": 0.0, "per_prompt_token": 0.0, "per_copied_token": 0.0}


@dataclass(frozen=True)
class Experiment:
    """Tasks by name, what does one, and what makes lines of the answers.

    Parameters
    ----------
    name : str
        What it is called, and the name of its plots.
    function : callable
        Does a task; importable, so that another process can.
    tasks : dict
        The tasks.
    lines : callable
        Makes lines of the answers, under the names of the tasks.
    num_seeds : int
        Runs of each task, whose figures are averaged.
    """

    name: str
    function: Callable[[Any], Any]
    tasks: dict[Any, Any]
    lines: Callable[[dict[Any, Any]], list[Line]]
    num_seeds: int = 1
    answers: dict[Any, Any] = field(default_factory=dict)


def experiments(sources: Sources, mooncake: Path | None = None) -> list[Experiment]:
    """Return all experiments; those on Mooncake's trace where it is given."""
    memory_alone = {
        key: replace(search, run=replace(search.run, cost=("fitted", MEMORY_ALONE)))
        for key, search in throughput.sharing_searches(sources).items()
    }
    found = [
        Experiment("fig2", execute, dict(memory.figure_2_runs(sources)), memory.figure_2, FIGURE_2_SEEDS),
        Experiment("fig13", execute, dict(memory.figure_13_runs(sources)), memory.figure_13, FIGURE_13_SEEDS),
        _search("fig12", throughput.figure_12_searches(sources), throughput.figure_12),
        _search("fig12_models", models.searches(sources), models.ratios),
        Experiment("fig12_curves", execute, dict(throughput.curve_runs(sources)), lambda answers: []),
        Experiment("fig15", execute, dict(memory.figure_15_runs(sources)), memory.figure_15),
        Experiment(
            "fig15_sharegpt", execute, dict(memory.figure_15_runs(sources, "sharegpt")), memory.sharegpt_savings
        ),
        _search("prefix", throughput.prefix_searches(), throughput.prefixes),
        _search("chat", throughput.chat_searches(), throughput.chat),
        _search("sharing", throughput.sharing_searches(sources), throughput.sharing),
        _search("sharing_memory_alone", memory_alone, lambda answers: throughput.sharing(answers, "_memory_alone")),
        Experiment("fig13_causes", execute, dict(causes.alpaca_runs(sources)), causes.alpaca),
        Experiment("beam_causes", execute, dict(causes.turnover_runs(sources)), causes.turnovers),
        _search("sharing_causes", causes.sharing_searches_by_cost(sources), causes.sharing_by_cost),
        Experiment("swap", execute, dict(swapping.end_to_end_runs(sources)), _swap_lines),
        Experiment("block_size", execute, dict(memory.block_size_runs(sources)), memory.block_sizes),
        _search("fp8", beyond.fp8_searches(sources), beyond.fp8),
        Experiment("capacity", execute, {}, lambda answers: capacity.capacities()),
        Experiment("tenants", beyond.run_tenants, {name: name for name in beyond.POLICIES}, beyond.tenants),
    ]
    if mooncake is not None:
        tasks = {task[1:]: task for task in beyond.trace_tasks(mooncake)}
        found.append(Experiment("mooncake", beyond.run_trace, tasks, lambda answers: _trace_lines(mooncake, answers)))
    return found


def run_experiments(
    chosen: Sequence[Experiment], jobs: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Iterator[Line]:
    """Do the tasks of all experiments, fill in their answers, and yield the lines, of each experiment when it is done.

    Parameters
    ----------
    chosen : sequence of Experiment
        What to do.
    jobs : int, optional
        Processes; by default one for each processor.
    progress : callable, optional
        Told how many tasks are done, and of how many.
    """
    tasks = [
        (experiment.function, task)
        for experiment in chosen
        for one in experiment.tasks.values()
        for task in _with_seeds(one, experiment.num_seeds)
    ]
    answers = execute_all(_call, tasks, jobs, None if progress is None else lambda done: progress(done, len(tasks)))
    for experiment in chosen:
        for key in experiment.tasks:
            experiment.answers[key] = _mean(list(islice(answers, experiment.num_seeds)))
        yield from experiment.lines(experiment.answers)


def _call(task: tuple[Callable[[Any], Any], Any]) -> Any:
    function, argument = task
    return function(argument)


def _search(name: str, searches: dict[Any, Any], lines: Callable[[dict[Any, Any]], list[Line]]) -> Experiment:
    return Experiment(name, sustained_rate, searches, lines)


def _swap_lines(answers: dict[Any, Any]) -> list[Line]:
    return [*swapping.microbenchmark(), *swapping.end_to_end(answers)]


def _trace_lines(path: Path, answers: dict[Any, Any]) -> list[Line]:
    bound = beyond.trace_upper_bound(Workload.read_jsonl(path))
    return beyond.trace_lines([(path, *key) for key in answers], list(answers.values()), bound)


def _with_seeds(task: Any, count: int) -> list[Any]:
    if count == 1:
        return [task]
    run: Run = task
    return [replace(run, load=replace(run.load, seed=seed)) for seed in range(count)]


def _mean(answers: list[Any]) -> Any:
    if len(answers) == 1:
        return answers[0]
    return {name: sum(answer[name] for answer in answers) / len(answers) for name in answers[0]}
