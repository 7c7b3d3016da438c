"""Why some figures are not the paper's: the runs behind the explanations of docs/paper.md."""

from __future__ import annotations

from dataclasses import replace

from pagedkv.simulate.experiment import Run
from pagedkv.simulate.paper.lines import Line
from pagedkv.simulate.paper.memory import BEAM_ALPACA, Figures, Sources, figure_13_runs, figure_15_runs
from pagedkv.simulate.paper.throughput import sharing_searches
from pagedkv.simulate.sustained import Search

# Around the rate of Figure 13, 30 requests a second, and the costs and spreads of its Alpaca.
RATES = (28.0, 28.5, 29.0)
SEQ_MILLISECONDS = 0.31
SPREADS = (0.8, 1.0)
TURNOVERS = (0.15, 0.3)
# What a sequence costs in a step, where six beams are to gain by sharing; the fitted line has 0.33.
SHARING_MILLISECONDS = (0.1, 0.03, 0.0)


def alpaca_runs(sources: Sources) -> dict[str, Run]:
    """Return the runs of vLLM on Alpaca next to that of Figure 13: other rates, costs and spreads."""
    run = figure_13_runs(sources)["alpaca", "vllm"]
    runs = {f"rate_{rate:g}": run.at(rate) for rate in RATES}
    runs[f"seq_{SEQ_MILLISECONDS:g}ms"] = replace(run, cost=("fitted", {"per_seq": 1e-3 * SEQ_MILLISECONDS}))
    return runs | {f"spread_{sigma:g}": replace(run, load=replace(run.load, sigma=sigma)) for sigma in SPREADS}


def alpaca(found: dict[str, Figures]) -> list[Line]:
    """Return the batches."""
    note = "30 requests a second are the knee: what moves it a little moves the batch a lot"
    return [
        Line(f"cause_fig13_alpaca_{name}", "requests", figures["mean_requests"], note=note)
        for name, figures in found.items()
    ]


def turnover_runs(sources: Sources) -> dict[tuple[float, int], Run]:
    """Return the runs of beams on Alpaca with other turnovers than the one that was chosen."""
    runs = figure_15_runs(sources)
    return {
        (turnover, n): replace(runs["vllm", "beam", n], options={"beam_turnover": turnover})
        for turnover in TURNOVERS
        for n in BEAM_ALPACA
    }


def turnovers(found: dict[tuple[float, int], Figures]) -> list[Line]:
    """Return what sharing saves with them."""
    return [
        Line(
            f"cause_beam_{n}_turnover_{turnover:g}",
            "% of the blocks",
            100 * figures["saving"],
            BEAM_ALPACA[n],
            note="another turnover than the one that was chosen",
        )
        for (turnover, n), figures in found.items()
    ]


def sharing_searches_by_cost(sources: Sources) -> dict[tuple[float, str], Search]:
    """Return the searches for six beams with sharing on and off, where a sequence costs less."""
    searches = sharing_searches(sources)
    return {
        (cost, name): replace(search, run=replace(search.run, cost=("fitted", {"per_seq": 1e-3 * cost})))
        for cost in SHARING_MILLISECONDS
        for name in ("on", "off")
        for search in [searches["beam", 6, name]]
    }


def sharing_by_cost(found: dict[tuple[float, str], float]) -> list[Line]:
    """Return how many times the rate is sustained with sharing on."""
    return [
        Line(
            f"cause_sharing_throughput_beam_6_seq_{cost:g}ms",
            "times the rate",
            found[cost, "on"] / found[cost, "off"],
            note="a sequence of a step costs so much; 0.33 ms in the fitted line",
            details={"rate_on": found[cost, "on"], "rate_off": found[cost, "off"]},
        )
        for cost in SHARING_MILLISECONDS
    ]
