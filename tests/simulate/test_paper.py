"""The experiments of the paper, as far as they are quick: memory, and what is made of figures."""

import pytest

from pagedkv.simulate.experiment import Load, Run, execute, execute_all
from pagedkv.simulate.paper import Sources, experiments, run_experiments
from pagedkv.simulate.paper.lines import Line
from pagedkv.simulate.sustained import Search, sustained_rate


def chosen(*names):
    return [experiment for experiment in experiments(Sources()) if experiment.name in names]


def test_memory_of_figure_2_is_the_papers_within_its_tolerance():
    lines = list(run_experiments(chosen("fig2"), jobs=1))
    assert len(lines) == 14
    assert [line.what for line in lines if not line.holds] == []
    assert min(line.ours for line in lines if line.what.endswith(("vllm_token", "pagedkv_token"))) >= 96


def test_capacity_of_a_long_sequence_is_the_published_one():
    gigabytes, fp8 = run_experiments(chosen("capacity"), jobs=1)
    assert gigabytes.ours == pytest.approx(1.678, abs=5e-4)
    assert 0.5 < fp8.ours < 0.501
    assert gigabytes.holds
    assert fp8.holds


def test_swap_in_one_span_is_flat_in_block_size_and_in_layers_is_not():
    from pagedkv.simulate.paper.swapping import BLOCK_SIZES, recompute_seconds, swap_seconds

    spans = [swap_seconds(size, 1) for size in BLOCK_SIZES]
    layers = [swap_seconds(size, 80) for size in BLOCK_SIZES]
    assert max(spans) < 1.25 * min(spans)
    assert layers[0] > recompute_seconds() > layers[-1]
    assert max(spans) < recompute_seconds()


def test_every_experiment_has_a_name_of_its_own_and_runs():
    names = [experiment.name for experiment in experiments(Sources())]
    assert len(names) == len(set(names))
    assert {"fig2", "fig12", "fig13", "fig15", "prefix", "sharing", "swap", "capacity"} <= set(names)


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        (Line("x", "u", 5.0, 6.0, 1.0), True),
        (Line("x", "u", 4.9, 6.0, 1.0), False),
        (Line("x", "u", 3.0, between=(1.0, 2.0)), False),
        (Line("x", "u", 3.0, between=(1.0, float("inf"))), True),
        (Line("x", "u", 95.9, 96.3, 2.5, (96.0, 100.0)), False),
        (Line("x", "u", 3.0, 2.0), None),
    ],
)
def test_line_holds_within_its_tolerance(line, holds):
    assert line.holds is holds


def test_sustained_rate_lies_where_latency_passes_the_threshold():
    run = Run(Load("sharegpt", seconds=300.0), "orca_max")
    rate = sustained_rate(Search(run, 1.0))
    below, above = (execute(run.at(factor * rate))["normalized_latency"] for factor in (0.9, 1.1))
    assert below < 0.5 < above


def test_runs_in_other_processes_give_the_same_figures():
    runs = [Run(Load("alpaca", rate, 20.0), "pagedkv") for rate in (2.0, 5.0)]
    assert list(execute_all(execute, runs, jobs=2)) == list(execute_all(execute, runs, jobs=1))


def test_progress_is_told_after_each_task():
    told = []
    list(execute_all(execute, [Run(Load("alpaca", 2.0, 5.0), "vllm")] * 3, jobs=1, progress=told.append))
    assert told == [1, 2, 3]


def test_lines_of_an_experiment_come_before_the_next_one_is_done():
    told = []
    lines = run_experiments(chosen("tenants", "capacity"), jobs=1, progress=lambda done, total: told.append(done))
    ended = [(line.what, len(told)) for line in lines]
    assert ended[0] == ("capacity_llama13b", 0)
    assert ended[-1] == ("tenants_fair", 3)
