"""compute-sanitizer over small shapes: memcheck or racecheck. Where the runtime refuses it, that is recorded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_check.runner import NOT_TO_BE_HAD, write_result

PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
FOUND = 99  # what we ask it to return where it found something
# How a runtime says that it lets no tool near the device, as seen on gVisor.
REFUSALS = ("Device not supported", "Failed to initialize", "Unable to attach", "Operation not permitted")


def find_tool() -> str | None:
    """Return where compute-sanitizer is, or None."""
    return shutil.which("compute-sanitizer") or next((place for place in PLACES if Path(place).is_file()), None)


def judge(status: int, output: str) -> tuple[int, str]:
    """Return our exit status for a run of the tool, and what to say of it."""
    if status == FOUND:
        return 1, "it found something"
    if refusal := next((text for text in REFUSALS if text in output), None):
        return NOT_TO_BE_HAD, f"the runtime refuses it: {refusal}"
    if status or ("ERROR SUMMARY" not in output and "RACECHECK SUMMARY" not in output):
        return 1, f"it ended with {status}, and its output has {'a' if 'SUMMARY' in output else 'no'} summary"
    return 0, "it found nothing"


def main(tool: str) -> int:
    """Run one of its tools over `small_shapes`."""
    sanitizer = find_tool()
    if sanitizer is None:
        write_result(outcome="compute-sanitizer is not installed")
        return NOT_TO_BE_HAD
    words = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        # Libraries ask the driver for what it may not have, and go on: an error that it returns is no finding.
        words += ["--report-api-errors", "no"]
    words += [sys.executable, "-m", "gpu_check.stages.small_shapes"]
    # Blocks of torch's allocator lie side by side: without it an access beyond one is seen.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    print(output)
    status, outcome = judge(done.returncode, output)
    write_result(outcome=outcome, summary=[line for line in output.splitlines() if "SUMMARY" in line])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
