"""The scheduler and its manager, model execution left out, beside vLLM's own scheduler on the same core.

Everything but the open loop runs on one core. With PEER_ENV naming the environment that `peers/vllm_env.sh` built, the
peer does each line's work right before and right after us; without it the peer's columns stay empty. Work is built
outside of what is timed. `docs/benchmarks.md` says what each line is.
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lines
from pagedkv.bench.lines import requests, steps, waiting
from pagedkv.bench.lines.measured import Measured
from scheduler import threads
from scheduler.programs import Peer, build_rust_benches, run_rust_bench

PEER_ENV = os.environ.get("PEER_ENV")
BARE_LOOP = "xxh3_128 of 80 bytes, probe, compare"
TWO_LOADS = "two dependent random loads"


@dataclass(frozen=True)
class Line:
    """A line, how it is measured, and what the peer calls the same work, where it can do it."""

    what: str
    run: Callable[[], Measured]
    peer: str | None = None
    unit: str = "us"
    better: lines.Better = "lower"
    limit_name: str | None = None
    all_cores: bool = False


def rust(what: str, *arguments: str) -> Callable[[], Measured]:
    return lambda: run_rust_bench(*(arguments or (what,)))[what]


LINES = [
    Line("steady_decode_256", lambda: steps.steady_decode(256), "steady_decode_256"),
    Line("steady_decode_1024", lambda: steps.steady_decode(1024), "steady_decode_1024"),
    Line("decode_context_cost", steps.decode_context_cost, unit="factor"),
    Line("add_request_1024", lambda: requests.add_request_1024(as_list=False), "add_request_1024"),
    Line("add_request_1024_list", lambda: requests.add_request_1024(as_list=True), "add_request_1024"),
    Line("life_2000", steps.life_2000, "life_2000", unit="requests/s", better="higher"),
    Line("full_hit_32k", requests.full_hit_32k, "full_hit_32k"),
    Line("block_allocate", rust("block_allocate", "blocks"), "block_allocate"),
    Line("block_free", rust("block_free", "blocks"), "block_free"),
    Line("decode_slot", rust("decode_slot"), "decode_slot"),
    Line("block_hit_4k", rust("block_hit_4k"), "block_hit_4k", limit_name=BARE_LOOP),
    Line("block_hit_100k", rust("block_hit_100k"), "block_hit_100k", limit_name=BARE_LOOP),
    Line("pool_scale", rust("pool_scale"), unit="factor"),
    Line("pool_scale_cold", rust("pool_scale_cold"), limit_name=TWO_LOADS),
    Line("burst_256", requests.burst_256, "burst_256", unit="times the prefix"),
    Line("lpm_4096", waiting.lpm_4096),
    Line("lpm_4096_changed", waiting.lpm_4096_changed),
    Line("add_admit_1024", requests.add_admit_1024, "add_admit_1024"),
]


def open_loop_lines(seconds: int) -> list[Line]:
    """Return the lines of the open loop from Rust threads, and from Python threads under the GIL."""
    units = {"open_loop_step_p99": "factor", "open_loop_add_p99": "us", "open_loop_lost": "requests"}
    arguments = ("open_loop", f"--seconds={seconds}")
    from_rust = [Line(what, rust(what, *arguments), unit=unit, all_cores=True) for what, unit in units.items()]

    def python(what: str, unit: str) -> Line:
        return Line(f"{what}_python", lambda: threads.open_loop(seconds)[what], unit=unit, all_cores=True)

    return from_rust + [python(what, unit) for what, unit in units.items()]


def add_line(report: lines.Report, line: Line, peer: Peer | None) -> None:
    workload = line.peer if peer else None
    peers = peer.run(workload) if peer and workload else []
    measured = line.run()
    peers += peer.run(workload) if peer and workload else []
    report.add(
        line.what,
        line.unit,
        measured.samples,
        better=line.better,
        peer=peers or None,
        peer_name=peer.name if peer and workload else None,
        limit=statistics.median(measured.limit) if line.limit_name else None,
        limit_name=line.limit_name,
        **measured.sizes,
    )


def main() -> None:
    parser = lines.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="LINE", help="measure these lines only")
    parser.add_argument("--seconds", type=int, default=60, help="how long each open loop runs (default: %(default)s)")
    arguments = parser.parse_args()
    chosen = LINES + open_loop_lines(arguments.seconds)
    if arguments.only:
        chosen = [line for line in chosen if line.what in arguments.only]
    build_rust_benches()
    cores = os.sched_getaffinity(0)
    one_core = {max(cores)}
    os.sched_setaffinity(0, one_core)
    peer = Peer(Path(PEER_ENV)) if PEER_ENV else None
    report = lines.Report("scheduler", arguments.json)
    for line in chosen:
        os.sched_setaffinity(0, cores if line.all_cores else one_core)
        add_line(report, line, peer)
    if peer:
        peer.close()
    report.show()


if __name__ == "__main__":
    main()
