"""The two programs beside this one: the peer, kept waiting for its turns, and the benches of the Rust core."""

import functools
import json
import subprocess
from pathlib import Path

from pagedkv.bench.lines.measured import Measured
from program import ROOT, Program


class Peer:
    """vLLM's scheduler in an environment of its own."""

    def __init__(self, environment: Path) -> None:
        self._program = Program([environment / "bin" / "python", ROOT / "benchmarks" / "peers" / "vllm_scheduler.py"])
        self.name = ""

    def run(self, workload: str) -> list[float]:
        """Return the samples of a workload."""
        line = self._program.ask(workload)
        self.name = line["peer"]
        return line["samples"]

    def close(self) -> None:
        """End the process."""
        self._program.close()


def build_rust_benches() -> None:
    """Compile them, so that no measurement waits for the compiler."""
    _cargo_bench("--no-run")


@functools.cache
def run_rust_bench(*arguments: str) -> dict[str, Measured]:
    """Return the lines of one measurement, once measured, by name."""
    measured = {}
    for answer in _cargo_bench("--", *arguments).splitlines():
        line = json.loads(answer)
        what, samples, limit = line.pop("what"), line.pop("samples"), line.pop("limit")
        measured[what] = Measured(samples, limit, line)
    return measured


def _cargo_bench(*arguments: str) -> str:
    command = ["cargo", "bench", "--quiet", "--package", "pagedkv-core", "--bench", "scheduler", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
