"""The kernel suite, the same tests as on the CPU: those that are marked `gpu`."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

from gpu_check.pack import ROOT
from gpu_check.runner import write_result

TESTS = ("tests/kernels",)
MAX_WORKERS = 8  # each has a context on the GPU


def command(report: Path, tests: tuple[str, ...] = TESTS, marker: str = "gpu") -> list[str]:
    """Return what runs the suite and writes a report, on several processes where that is possible."""
    words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "benchmarks" / "gpu_check" / "suite.ini")]
    words += ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", "-m", marker, f"--junitxml={report}"]
    if importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(min(MAX_WORKERS, os.cpu_count() or 1))]
    return [*words, *(str(ROOT / test) for test in tests)]


def read_report(report: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped."""
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    count = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = count["failures"] + count["errors"]
    return {"passed": count["tests"] - failed - count["skipped"], "failed": failed, "skipped": count["skipped"]}


def run(tests: tuple[str, ...] = TESTS, marker: str = "gpu") -> int:
    """Run the tests; that none ran, because all were skipped say, is a failure too."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run(command(report, tests, marker), cwd=ROOT, check=False).returncode
        counts = read_report(report) if report.is_file() else {"passed": 0, "failed": 0, "skipped": 0}
    write_result(**counts, pytest_exit=status)
    return int(status != 0 or counts["passed"] == 0)


if __name__ == "__main__":
    sys.exit(run())
