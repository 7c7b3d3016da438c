"""Measure the scheduler: made-up or recorded requests, or the work of `make bench-scheduler`.

Requests run against the real scheduler; the model only takes time. With `--clock virtual` that time passes at once, so
that minutes of traffic take seconds; with `--clock real` it is slept.

    pagedkv bench scheduler random --num-requests 1000 --rate 50
    pagedkv bench scheduler prefix-repetition --num-prefixes 8 --prefix-len 1024
    pagedkv bench scheduler chat --arrivals burst --burst-size 64 --burst-interval 2
    pagedkv bench scheduler trace --trace requests.csv --use-trace-arrivals
    pagedkv bench scheduler lines --only steady_decode_256
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pagedkv.bench import workloads
from pagedkv.bench.drive import Clock, Measured, StepTime, drive
from pagedkv.bench.lines import requests, steps, waiting
from pagedkv.bench.lines.measured import Measured as Line
from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.scheduling import Scheduler
from pagedkv.simulate.traces import read_trace

WORKLOADS = ("random", "prefix-repetition", "chat", "trace")
# What `make bench-scheduler` measures through Python, beside a peer: benchmarks/bench_scheduler.py has their limits.
LINES: dict[str, tuple[str, Callable[[], Line]]] = {
    "steady_decode_256": ("us", lambda: steps.steady_decode(256)),
    "steady_decode_1024": ("us", lambda: steps.steady_decode(1024)),
    "decode_context_cost": ("factor", steps.decode_context_cost),
    "add_request_1024": ("us", lambda: requests.add_request_1024(as_list=False)),
    "add_request_1024_list": ("us", lambda: requests.add_request_1024(as_list=True)),
    "life_2000": ("requests/s", steps.life_2000),
    "full_hit_32k": ("us", requests.full_hit_32k),
    "burst_256": ("times the prefix", requests.burst_256),
    "lpm_4096": ("us", waiting.lpm_4096),
    "lpm_4096_changed": ("us", waiting.lpm_4096_changed),
    "add_admit_1024": ("us", requests.add_admit_1024),
}
UNITS = {
    "requests_per_s": "of the clock",
    "scheduler_s": "in schedule, commit and add_request",
    "scheduler_steps_per_s": "steps per second of that",
    "scheduler_requests_per_s": "requests per second of that",
    "step_us_median": "schedule and commit",
    "queue_s_mean": "from arrival to the first plan",
    "hit_rate": "of the prompt tokens",
    "usage_mean": "of the usable blocks",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = __doc__
    parser.add_argument("workload", choices=[*WORKLOADS, "lines"], help="what to run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE, one JSON object a line")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="LINE", choices=LINES, help="of `lines`, measure these")
    made = parser.add_argument_group("requests")
    made.add_argument("--num-requests", type=_positive, default=1000, metavar="N", help="(default: %(default)s)")
    made.add_argument("--input-len", type=_positive, default=512, metavar="TOKENS", help="(default: %(default)s)")
    made.add_argument("--output-len", type=_positive, default=128, metavar="TOKENS", help="(default: %(default)s)")
    made.add_argument("--range-ratio", type=_share, default=0.5, help="spread of random lengths (default: %(default)s)")
    made.add_argument("--num-prefixes", type=_positive, default=10, metavar="N", help="(default: %(default)s)")
    made.add_argument("--prefix-len", type=_positive, default=1024, metavar="TOKENS", help="(default: %(default)s)")
    made.add_argument("--suffix-len", type=_positive, default=128, metavar="TOKENS", help="(default: %(default)s)")
    made.add_argument("--trace", type=Path, metavar="FILE", help="CSV or JSON lines with prompt and output lengths")
    arriving = parser.add_argument_group("arrivals")
    arriving.add_argument("--arrivals", choices=("poisson", "burst"), default="poisson", help="(default: %(default)s)")
    arriving.add_argument("--rate", type=_rate, default=20.0, help="requests a second (default: %(default)s)")
    arriving.add_argument("--burst-size", type=_positive, default=64, metavar="N", help="(default: %(default)s)")
    arriving.add_argument("--burst-interval", type=_rate, default=1.0, metavar="S", help="(default: %(default)s)")
    arriving.add_argument("--use-trace-arrivals", action="store_true", help="as the trace has them")
    time = parser.add_argument_group("time")
    time.add_argument("--clock", choices=("virtual", "real"), default="virtual", help="(default: %(default)s)")
    time.add_argument("--step-us", type=_amount, default=5000.0, help="of the model, each step (default: %(default)s)")
    time.add_argument("--token-us", type=_amount, default=10.0, help="and per token of it (default: %(default)s)")
    limits = parser.add_argument_group("scheduler")
    limits.add_argument("--num-blocks", type=_positive, default=8192, metavar="N", help="(default: %(default)s)")
    limits.add_argument("--block-size", type=_positive, default=16, metavar="TOKENS", help="(default: %(default)s)")
    limits.add_argument("--max-num-seqs", type=_positive, default=256, metavar="N", help="(default: %(default)s)")
    limits.add_argument(
        "--max-num-batched-tokens", type=_positive, default=8192, metavar="N", help="(default: %(default)s)"
    )
    limits.add_argument("--max-model-len", type=_positive, default=32768, metavar="N", help="(default: %(default)s)")
    limits.add_argument("--policy", choices=("fcfs", "lpm"), default="fcfs", help="(default: %(default)s)")
    limits.add_argument("--no-prefix-cache", action="store_true", help="share nothing")


def run(arguments: argparse.Namespace) -> int:
    """Measure, show a table, and write the file that was asked for."""
    rows = _lines(arguments) if arguments.workload == "lines" else [_workload(arguments)]
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    return 0


def make_requests(arguments: argparse.Namespace) -> list[workloads.Request]:
    """Return the workload that the arguments describe; equal seeds give equal requests."""
    rng = np.random.default_rng(arguments.seed)
    recorded: NDArray[np.float64] | None = None
    count = arguments.num_requests
    if arguments.workload == "random":
        made = workloads.random_prompts(rng, count, arguments.input_len, arguments.output_len, arguments.range_ratio)
    elif arguments.workload == "prefix-repetition":
        sizes = arguments.num_prefixes, arguments.prefix_len, arguments.suffix_len, arguments.output_len
        made = workloads.prefix_repetition(rng, count, *sizes)
    elif arguments.workload == "chat":
        made = workloads.of_lengths(rng, workloads.chat_lengths(rng, count))
    else:
        if arguments.trace is None:
            raise ValueError("--trace: expected a file for the workload trace, found none")
        trace = read_trace(arguments.trace).first(count)
        recorded = trace.arrivals if trace.has_arrivals else None
        made = workloads.recorded(trace)
    prompts, outputs = made
    arrivals = _arrivals(arguments, rng, len(prompts), recorded)
    return [
        workloads.Request(prompt, int(output), float(arrival))
        for prompt, output, arrival in zip(prompts, outputs, arrivals, strict=True)
    ]


def _arrivals(
    arguments: argparse.Namespace, rng: np.random.Generator, count: int, recorded: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    if arguments.use_trace_arrivals:
        if recorded is None:
            raise ValueError("--use-trace-arrivals: expected a trace with arrivals, found none")
        return recorded
    if arguments.arrivals == "burst":
        return workloads.bursts(count, arguments.burst_size, arguments.burst_interval)
    return workloads.poisson(rng, count, arguments.rate)


def _workload(arguments: argparse.Namespace) -> dict[str, object]:
    requests = make_requests(arguments)
    cache = CacheConfig(arguments.num_blocks, arguments.block_size, enable_prefix_caching=not arguments.no_prefix_cache)
    limits = SchedulerConfig(
        arguments.max_num_seqs,
        arguments.max_num_batched_tokens,
        arguments.max_model_len,
        policy=arguments.policy,
    )
    scheduler = Scheduler(cache, limits)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=len(requests))
        measured = drive(
            scheduler,
            requests,
            StepTime(arguments.step_us, arguments.token_us),
            Clock(is_virtual=arguments.clock == "virtual"),
            lambda num_done: progress.update(task, completed=num_done),
        )
    _show(arguments.workload, measured)
    return {"what": arguments.workload, "seed": arguments.seed, "clock": arguments.clock, **measured.summary()}


def _show(workload: str, measured: Measured) -> None:
    table = Table(title=f"scheduler: {workload}", title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("of what")
    for name, value in measured.summary().items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        table.add_row(name, shown, UNITS.get(name, ""))
    Console().print(table)


def _lines(arguments: argparse.Namespace) -> list[dict[str, object]]:
    table = Table(title="scheduler: the lines of make bench-scheduler, without a peer", title_justify="left")
    for heading in ("what", "ours", "unit", "samples"):
        table.add_column(heading, justify="left" if heading in {"what", "unit"} else "right", no_wrap=True)
    rows: list[dict[str, object]] = []
    for what in arguments.only or LINES:
        unit, measure = LINES[what]
        line = measure()
        value = statistics.median(line.samples)
        rows.append({"what": what, "ours": value, "unit": unit, "samples": len(line.samples), **line.sizes})
        table.add_row(what, f"{value:.4g}", unit, str(len(line.samples)))
    Console().print(table)
    return rows


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text}")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text}")
    return value


def _rate(text: str) -> float:
    value = _amount(text)
    if value == 0:
        raise argparse.ArgumentTypeError("expected a number above 0, found 0")
    return value


def _share(text: str) -> float:
    value = _amount(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a number below 1, found {text}")
    return value
