r"""Simulate serving: one workload on several systems at several rates, or the experiments of the paper.

Every system sees the same requests. A workload is made up (sharegpt, alpaca, translation, chat) or a trace: CSV with
the columns prompt_tokens and output_tokens, Azure's LLM traces, or JSON lines such as Mooncake's and what
TraceRecorder writes. `paper` runs the experiments of the paper and prints its values beside ours.

"tokens held" is a share of the pool's slots, in which tokens of shared blocks count for each sequence that holds them:
with samples, beams or shared prefixes it can be above 100 %.

    pagedkv simulate sharegpt --rates 0.5 1 1.5 2 --plot latency.svg
    pagedkv simulate requests.jsonl --recorded-arrivals --systems pagedkv vllm --num-slots 200000 \
        --longest 32768 --drop-longer --max-num-batched-tokens 32768
    pagedkv simulate lengths.csv --rates 1 2 --longest 2048 --drop-longer
    pagedkv simulate alpaca --samples 4 --rates 6 9 12 --systems pagedkv orca_oracle
    pagedkv simulate paper --only fig2 fig12 --plots figures --json paper.jsonl
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagedkv.simulate.experiment import MADE_UP, SYSTEMS, Load, Run, execute, execute_all
from pagedkv.simulate.machine import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, NUM_SLOTS, Machine
from pagedkv.simulate.paper import Experiment, Line, Sources, experiments, run_experiments

# Figures of a run, what the table calls them, and how it shows them.
SHOWN = {
    "finished": ("ended", "{:,.0f}"),
    "normalized_latency": ("s/token", "{:.4f}"),
    "first_token_p50": ("first p50", "{:.3f}"),
    "first_token_p99": ("first p99", "{:.3f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "mean_requests": ("batch", "{:.1f}"),
    "token_share": ("tokens held", "{:.1%}"),
    "saving": ("saved", "{:.1%}"),
    "hit_rate": ("hits", "{:.1%}"),
    "recomputed": ("recomputed", "{:,.0f}"),
    "swapped": ("swapped", "{:,.0f}"),
}
# Arguments of the paper's experiments, those that they share with workloads, and those that are read only where
# requests come at a rate, or by one system.
OF_PAPER = ("only", "traces", "plots", "format")
OF_BOTH = ("workload", "jobs", "json")
OF_RATES = ("rates", "seconds", "plot")
OF_PAGEDKV = ("prefix_cache", "policy", "preemption")
# Of tables that go to a file or a pipe, whose width nobody knows.
WIDTH = 140


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = __doc__
    parser.add_argument("workload", metavar="WORKLOAD", help=f"{', '.join(MADE_UP)}, the path of a trace, or paper")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="processes (default: one a processor)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE, one JSON object a line")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["pagedkv", "vllm", "orca_oracle", "orca_max"])
    _add_requests(parser.add_argument_group("requests"))
    _add_machine(parser.add_argument_group("machine (by default the paper's: OPT-13B on an A100 with 40 GB)"))
    cost = parser.add_argument_group("cost model")
    cost.add_argument(
        "--cost", choices=("fitted", "roofline", "profile"), default="fitted", help="(default: %(default)s)"
    )
    cost.add_argument("--profile", type=Path, metavar="FILE", help="measured steps: CSV")
    cost.add_argument(
        "--cost-argument", nargs="*", default=[], metavar="NAME=VALUE", help="of CostModel.fitted or roofline"
    )
    drawing = parser.add_argument_group("plots (need matplotlib)")
    drawing.add_argument("--plot", type=Path, metavar="FILE", help="normalized latency over rate, .png or .svg")
    paper = parser.add_argument_group("paper")
    paper.add_argument("--only", nargs="+", metavar="NAME", help="of its experiments, run these")
    paper.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="sharegpt_lengths.csv, mooncake_conversation.jsonl"
    )
    paper.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the experiments into it")
    paper.add_argument("--format", choices=("svg", "png"), default="svg", help="of the plots (default: %(default)s)")


def _add_requests(arriving: argparse._ArgumentGroup) -> None:
    arriving.add_argument("--rates", nargs="+", type=float, default=[1.0], metavar="R", help="a second (default: 1)")
    arriving.add_argument("--recorded-arrivals", action="store_true", help="as the trace has them")
    arriving.add_argument("--seconds", type=float, default=1200.0, help="of arrivals (default: %(default)s)")
    arriving.add_argument("--max-requests", type=_positive, metavar="N", help="no more than these")
    arriving.add_argument("--drop-longer", action="store_true", help="drop what has --longest tokens or more")
    width = arriving.add_mutually_exclusive_group()
    width.add_argument("--samples", type=_positive, default=1, metavar="N", help="of each (default: %(default)s)")
    width.add_argument("--beams", type=_positive, metavar="K", help="beams of each, instead of samples")
    arriving.add_argument(
        "--system-prompt", type=_not_negative, default=0, metavar="TOKENS", help="that all prompts begin with"
    )


def _add_machine(machine: argparse._ArgumentGroup) -> None:
    machine.add_argument(
        "--num-slots", type=_positive, default=NUM_SLOTS, metavar="TOKENS", help="(default: %(default)s)"
    )
    machine.add_argument("--block-size", type=_positive, default=BLOCK_SIZE, metavar="TOKENS")
    machine.add_argument(
        "--longest", type=_positive, default=MAX_MODEL_LEN, metavar="TOKENS", help="(default: %(default)s)"
    )
    machine.add_argument("--max-num-batched-tokens", type=_positive, default=MAX_NUM_BATCHED_TOKENS, metavar="N")
    machine.add_argument("--max-num-seqs", type=_positive, metavar="N", help="(default: 2048, 256 for Orca)")
    machine.add_argument("--token-bytes", type=_positive, default=819_200, metavar="BYTES", help="of keys and values")
    machine.add_argument("--prefix-cache", action="store_true", help="of pagedkv")
    machine.add_argument("--policy", choices=("fcfs", "priority", "lpm", "fair"), default="fcfs", help="of pagedkv")
    machine.add_argument("--preemption", choices=("recompute", "swap"), default="recompute", help="of pagedkv")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, show a table, and write the files that were asked for."""
    _refuse_unused(arguments)
    if arguments.plot is not None or arguments.plots is not None:
        import matplotlib  # noqa: F401, ICN001 - at once, so that nobody waits to hear that it is missing
    return _paper(arguments) if arguments.workload == "paper" else _workload(arguments)


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse arguments that would change nothing, so that nobody takes them for heard."""
    parser = argparse.ArgumentParser()
    configure(parser)
    defaults = vars(parser.parse_args([arguments.workload]))
    given = [name for name, value in defaults.items() if getattr(arguments, name) != value]
    is_paper = arguments.workload == "paper"
    needs = dict.fromkeys(OF_PAPER, (is_paper, "with paper"))
    if is_paper:
        needs |= {name: (name in OF_PAPER + OF_BOTH, "with a workload") for name in given}
    else:
        needs |= dict.fromkeys(OF_RATES, (not arguments.recorded_arrivals, "without --recorded-arrivals"))
        needs |= dict.fromkeys(OF_PAGEDKV, ("pagedkv" in arguments.systems, "with --systems pagedkv"))
        needs["profile"] = (arguments.cost == "profile", "with --cost profile")
        needs["cost_argument"] = (arguments.cost != "profile", "without --cost profile")
    for name in given:
        is_used, expected = needs.get(name, (True, ""))
        if not is_used:
            raise ValueError(f"--{name.replace('_', '-')}: expected only {expected}")


def _workload(arguments: argparse.Namespace) -> int:
    if arguments.workload not in MADE_UP and not Path(arguments.workload).is_file():
        raise ValueError(
            f"workload: expected {', '.join(MADE_UP)}, paper or the path of a trace, found {arguments.workload}"
        )
    if arguments.plot is not None and arguments.plot.suffix not in {".png", ".svg"}:
        raise ValueError(f"--plot: expected a file .png or .svg, found {arguments.plot}")
    runs = _runs(arguments)
    with _bar() as bar:
        task = bar.add_task("runs", total=len(runs))
        found = list(execute_all(execute, runs, arguments.jobs, lambda done: bar.update(task, completed=done)))
    rows = [
        {"workload": arguments.workload, "system": run.system, "rate": run.load.rate, "seed": run.load.seed, **figures}
        for run, figures in zip(runs, found, strict=True)
    ]
    _show_rows(rows, arguments.workload)
    _write(arguments.json, rows)
    if arguments.plot is not None:
        _plot(arguments.plot, rows)
    return 0


def _runs(arguments: argparse.Namespace) -> list[Run]:
    load = Load(
        arguments.workload,
        None,
        arguments.seconds,
        arguments.seed,
        arguments.beams or arguments.samples,
        arguments.beams is not None,
        arguments.system_prompt,
        arguments.longest if arguments.drop_longer else None,
        max_requests=arguments.max_requests,
    )
    machine = Machine(
        arguments.num_slots,
        arguments.block_size,
        arguments.longest,
        arguments.max_num_batched_tokens,
        arguments.max_num_seqs,
        arguments.token_bytes,
        enable_prefix_caching=arguments.prefix_cache,
        policy=arguments.policy,
        preemption_mode=arguments.preemption,
    )
    cost = _cost(arguments)
    rates = [None] if arguments.recorded_arrivals else arguments.rates
    return [Run(replace(load, rate=rate), system, machine, cost) for system in arguments.systems for rate in rates]


def _cost(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    if arguments.cost == "profile":
        if arguments.profile is None:
            raise ValueError("--profile: expected a file of measured steps for --cost profile, found none")
        if not arguments.profile.is_file():
            raise ValueError(f"--profile: expected a file of measured steps, found none at {arguments.profile}")
        return "profile", {"path": arguments.profile}
    found = {}
    for text in arguments.cost_argument:
        name, sign, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            sign = ""
        if not sign:
            raise ValueError(f"--cost-argument: expected NAME=NUMBER, found {text}")
    return arguments.cost, found


def _paper(arguments: argparse.Namespace) -> int:
    sources, mooncake = Sources(), None
    if arguments.traces is not None:
        lengths, mooncake = (
            arguments.traces / name for name in ("sharegpt_lengths.csv", "mooncake_conversation.jsonl")
        )
        for path in (lengths, mooncake):
            if not path.is_file():
                raise ValueError(f"--traces: expected a folder with {path.name}, found none at {path}")
        sources = Sources(sharegpt=str(lengths))
    chosen = experiments(sources, mooncake)
    if arguments.only is not None:
        names = [experiment.name for experiment in chosen]
        if unknown := [name for name in arguments.only if name not in names]:
            raise ValueError(f"--only: expected {', '.join(names)}, found {', '.join(unknown)}")
        chosen = [experiment for experiment in chosen if experiment.name in arguments.only]
    lines = _run_paper(chosen, arguments.jobs)
    _show_lines(lines)
    rows = [_row(line) for line in lines]
    _write(arguments.json, rows)
    if arguments.plots is not None:
        from pagedkv.simulate.paper.drawings import draw_experiments

        for path in draw_experiments(chosen, arguments.plots, f".{arguments.format}"):
            _console().print(f"drawn: {path}", soft_wrap=True)
    return 0


def _run_paper(chosen: list[Experiment], jobs: int | None) -> list[Line]:
    with _bar() as bar:
        task = bar.add_task("runs", total=None)
        return list(run_experiments(chosen, jobs, lambda done, total: bar.update(task, completed=done, total=total)))


def _row(line: Line) -> dict[str, Any]:
    names = ("what", "unit", "ours", "paper", "tolerance", "difference", "holds", "note", "details")
    return {name: getattr(line, name) for name in names}


def _show_lines(lines: list[Line]) -> None:
    table = Table(title="the paper, reproduced", title_justify="left")
    for heading in ("figure", "paper", "ours", "difference", "unit", "must be", "holds"):
        table.add_column(heading, justify="right" if heading in {"paper", "ours", "difference"} else "left")
    for line in lines:
        paper, difference = ("" if value is None else f"{value:.2f}" for value in (line.paper, line.difference))
        holds = {True: "yes", False: "no", None: ""}[line.holds]
        table.add_row(line.what, paper, f"{line.ours:.2f}", difference, line.unit, line.must_reach, holds)
    _console().print(table)


def _show_rows(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=f"simulation: {title}", title_justify="left")
    table.add_column("system", no_wrap=True)
    table.add_column("rate", justify="right")
    for heading, _ in SHOWN.values():
        table.add_column(heading, justify="right")
    for row in rows:
        rate = "recorded" if row["rate"] is None else f"{row['rate']:g}"
        table.add_row(row["system"], rate, *(form.format(row[name]) for name, (_, form) in SHOWN.items()))
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _plot(path: Path, rows: list[dict[str, Any]]) -> None:
    from pagedkv.simulate.plots import draw_curves

    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["system"], []).append((row["rate"], row["normalized_latency"]))
    draw_curves(path, curves, x="requests a second", y="normalized latency, s a token")


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a number of at least {least}, found {text}")
    return value
