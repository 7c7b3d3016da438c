"""The stages of a check, in their order, with their time."""

import sys
from pathlib import Path

from gpu_check.runner import Stage

SECONDS = 480.0  # of the whole check
KERNELS, SUITE, VECTORS, ENGINE, GRAPHS, TIMINGS = "kernels", "suite", "vectors", "engine", "graphs", "timings"
FLASHINFER, MEMCHECK, RACECHECK = "flashinfer", "memcheck", "racecheck"


def make_plan(out: Path) -> list[Stage]:
    """Return the stages.

    Parameters
    ----------
    out : Path
        Where files that outlive the check go.
    """

    def program(name: str, seconds: float, *arguments: str, file: str | None = None) -> Stage:
        needs = () if name == KERNELS else (KERNELS,)
        return Stage(name, (sys.executable, "-m", f"gpu_check.stages.{file or name}", *arguments), seconds, needs)

    # Up to the timings they fit even if each takes all of its time; what comes after them has what is left.
    return [
        program(KERNELS, 150),  # compiles them all where the driver refuses those that were packed
        program(SUITE, 150),
        program(VECTORS, 20, str(out)),
        program(ENGINE, 60),
        program(GRAPHS, 30),
        program(TIMINGS, 70),
        program(FLASHINFER, 60),
        program(MEMCHECK, 150, MEMCHECK, file="sanitizer"),
        program(RACECHECK, 150, RACECHECK, file="sanitizer"),
    ]
