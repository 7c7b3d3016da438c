"""Attention and cache operations on the CPU, beside what the machine allows, torch's SDPA and vLLM's kernel.

Everything that a line compares is measured in turns, in the same minute, on the layers of a deep pool one after the
other. With PEER_ENV naming the environment that `peers/vllm_env.sh` built, vLLM's kernel takes its turns too; without
it those columns stay empty. A line counts only if two threads reach 1.7 times the peak of one while it is measured;
after five tries the exit status is 3. `docs/benchmarks.md` says what each line is.
"""

import os
import sys
from pathlib import Path

import torch

import lines
from attention import measures
from attention.machine import Machine
from attention.peers import VLLM
from attention.table import LINES, Line
from attention.turns import MachineBusy

PEER_ENV = os.environ.get("PEER_ENV")
MACHINE_BUSY = 3


def measure_all(bench: measures.Bench, chosen: list[Line]) -> int:
    """Measure the lines in turn; return the exit status."""
    for line in chosen:
        try:
            measured = measures.measure(bench, line, torch.set_num_threads)
        except MachineBusy as busy:
            print(f"machine busy: {line.what}: {busy}", file=sys.stderr)
            return MACHINE_BUSY
        must = line.must.get(bench.machine.isa)
        if must and must.is_met(measured) is False:
            print(f"{line.what}: must reach {must.text()}", file=sys.stderr)
    return 0


def main() -> int:
    parser = lines.parser(__doc__)
    names = [line.what for line in LINES]
    parser.add_argument("--only", nargs="+", metavar="LINE", choices=names, help=f"some of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=15, help="turns of everything (default: %(default)s)")
    parser.add_argument(
        "--any-machine", action="store_true", help="measure on a busy machine too; its lines say that they do not count"
    )
    arguments = parser.parse_args()
    chosen = [line for line in LINES if not arguments.only or line.what in arguments.only]
    report = lines.Report("attention", arguments.json)
    machine = Machine()
    vllm = VLLM(Path(PEER_ENV)) if PEER_ENV else None
    bench = measures.Bench(machine, vllm, report, arguments.rounds, arguments.any_machine)
    try:
        status = measure_all(bench, chosen)
    finally:
        machine.close()
        if vllm:
            vllm.close()
    if report.lines:
        report.show()
    return status


if __name__ == "__main__":
    sys.exit(main())
