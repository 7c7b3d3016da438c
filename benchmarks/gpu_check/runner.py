"""Run stages one after another, each in a process of its own and within its time, and keep what came of them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a stage's exit status means, beside 0; a fault of the driver or the interpreter gives others, which are failures.
NOT_TO_BE_HAD = 77  # a peer that is not installed, a tool that the runtime refuses: recorded, not failed
PASSED, FAILED, TIMED_OUT, REFUSED, SKIPPED = "passed", "failed", "timed out", "refused", "skipped"
GOOD = (PASSED, REFUSED)
TAIL_LINES = 40
RESULT_VARIABLE = "GPU_CHECK_RESULT"


@dataclass(frozen=True)
class Stage:
    """A part of the check.

    Attributes
    ----------
    name : str
        What the record calls it.
    command : tuple of str
        What runs it. It may write what it found, a JSON object, to the file that `GPU_CHECK_RESULT` names.
    seconds : float
        Its budget; then it is killed with all that it started.
    needs : tuple of str
        Stages without whose success it means nothing, and is skipped.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()


def run_stages(
    stages: Sequence[Stage],
    *,
    seconds: float,
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    after_each: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Run stages in order; a failure of one does not keep others from running.

    Parameters
    ----------
    stages : sequence of Stage
        What to run.
    seconds : float
        Time for all of them. A stage gets what is left of it, its own budget at most, and none is begun without any.
    folder : Path
        Where stages run, and where their results are put.
    log : Path
        The file that their output is added to.
    environment : mapping of str to str
        Their environment variables; what a stage's result has as `environment` is added for those after it.
    after_each : callable
        Is called with all results so far, so that a run that is cut off leaves what it had.

    Returns
    -------
    list of dict
        For each stage `stage`, `status`, `seconds`, `budget`, `exit`, `reason`, `tail` and `results`.
    """
    begun = time.monotonic()
    done: list[dict[str, Any]] = []
    for stage in stages:
        left = seconds - (time.monotonic() - begun)
        reason = _why_not(stage, done, left)
        if reason is None:
            outcome = _run(stage, min(stage.seconds, left), folder, log, environment)
            environment = {**environment, **(outcome["results"] or {}).get("environment", {})}
        else:
            outcome = _outcome(stage, SKIPPED, 0.0, reason=reason)
        done.append(outcome)
        after_each(done)
    return done


def _why_not(stage: Stage, done: list[dict[str, Any]], left: float) -> str | None:
    if left <= 0:
        return "no time was left"
    status = {outcome["stage"]: outcome["status"] for outcome in done}
    missing = [name for name in stage.needs if status.get(name) != PASSED]
    return f"needs {', '.join(missing)}" if missing else None


def _run(stage: Stage, seconds: float, folder: Path, log: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    output, result = folder / f"{stage.name}.log", folder / f"{stage.name}.json"
    result.unlink(missing_ok=True)
    begun = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            stage.command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, RESULT_VARIABLE: str(result)},
            start_new_session=True,  # so that what it starts ends with it
        )
        status, exit_status = _wait(process, seconds)
    took = time.monotonic() - begun
    text = output.read_text(errors="replace")
    with log.open("a") as file:
        file.write(f"==== {stage.name}: {status} after {took:.1f} s\n{text}\n")
    results, reason = _read(result)
    if reason and status == PASSED:
        status = FAILED
    tail = text.splitlines()[-TAIL_LINES:] if status != PASSED else []
    return _outcome(stage, status, took, exit=exit_status, reason=reason, tail=tail, results=results, given=seconds)


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> tuple[str, int | None]:
    try:
        exit_status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return TIMED_OUT, None
    named = {0: PASSED, NOT_TO_BE_HAD: REFUSED}
    return named.get(exit_status, FAILED), exit_status


def _read(result: Path) -> tuple[Any, str | None]:
    """Return what a stage wrote, and why it can't be read; a stage that failed may have written nothing."""
    if not result.is_file():
        return None, None
    try:
        return json.loads(result.read_text()), None
    except ValueError as error:
        return None, f"its result is no JSON: {error}"


def _outcome(stage: Stage, status: str, took: float, *, given: float | None = None, **more: Any) -> dict[str, Any]:
    outcome = {"stage": stage.name, "status": status, "seconds": round(took, 2)}
    outcome |= {"budget": stage.seconds if given is None else round(given, 2)}
    return outcome | {"exit": None, "reason": None, "tail": [], "results": None} | more


def write_result(**found: Any) -> None:
    """Write what a stage found, where the runner looks for it; outside of a run, print it."""
    text = json.dumps(found, allow_nan=False)
    path = os.environ.get(RESULT_VARIABLE)
    if path is None:
        print(text)
    else:
        Path(path).write_text(text)
