"""The record of a check: what ran on which machine, what came of it, and the figures with their marks."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check.runner import GOOD, SKIPPED

SCHEMA = 1
FIELDS = {"schema", "commit", "started", "seconds", "machine", "stages", "lines", "marks", "passed"}


@dataclass(frozen=True)
class Mark:
    """A figure that a line must reach.

    Attributes
    ----------
    line : str
        The line of the record, by its `what`.
    field : str
        Its field: `ours`, `of_limit` or `ratio`.
    least, most : float or None
        What it must be at least, or at most.
    """

    line: str
    field: str
    least: float | None = None
    most: float | None = None

    def judge(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what was found; `met` is None where nothing was measured."""
        values = [line[self.field] for line in lines if line["what"] == self.line and line[self.field] is not None]
        found = values[-1] if values else None
        met = None
        if found is not None:
            met = (self.least is None or found >= self.least) and (self.most is None or found <= self.most)
        return {
            "line": self.line,
            "field": self.field,
            "least": self.least,
            "most": self.most,
            "found": found,
            "met": met,
        }


# On an H200: the marks of issue 6.
MARKS = (
    Mark("decode_bf16_32x4096", "of_limit", least=0.90),
    Mark("decode_fp8_over_bf16", "ours", least=1.7),
    Mark("decode_bf16_1x8192", "ours", most=20.0),
    Mark("prefill_bf16_4x4096", "ours", least=330.0),
)


def make_record(
    stages: Sequence[Mapping[str, Any]],
    *,
    commit: str,
    started: str,
    seconds: float,
    machine: Mapping[str, Any],
    planned: Sequence[str],
) -> dict[str, Any]:
    """Put a record together.

    Parameters
    ----------
    stages : sequence of dict
        What `run_stages` returned so far.
    commit, started : str
        What was checked, and when.
    seconds : float
        How long it took.
    machine : mapping
        The device, the driver and the packages.
    planned : sequence of str
        The stages that there are; a record without one of them has not passed.
    """
    lines = [line for stage in stages for line in (stage["results"] or {}).get("lines", [])]
    status = {stage["stage"]: stage["status"] for stage in stages}
    return {
        "schema": SCHEMA,
        "commit": commit,
        "started": started,
        "seconds": round(seconds, 1),
        "machine": dict(machine),
        "stages": [dict(stage) for stage in stages],
        "lines": lines,
        "marks": [mark.judge(lines) for mark in MARKS],
        "passed": all(status.get(name, SKIPPED) in GOOD for name in planned),
    }


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record in one piece: a run that is cut off leaves the last whole one."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def exit_status(record: Mapping[str, Any]) -> int:
    """Return 0 where all is well, 1 where a stage failed, and 2 where only a mark was missed."""
    if not record["passed"]:
        return 1
    return 2 if any(mark["met"] is False for mark in record["marks"]) else 0


def summary(record: Mapping[str, Any]) -> str:
    """Return a short table, for people."""
    rows = [f"{stage['stage']:<12} {stage['status']:<10} {stage['seconds']:7.1f} s" for stage in record["stages"]]
    for line in record["lines"]:
        if line["ours"] is None:
            rows.append(f"{line['what']:<28} {line.get('refused')}")
            continue
        peer = f"   {line['ratio']:.2f} times {line['peer_name']}" if line["ratio"] else ""
        limit = f"   {line['of_limit']:.0%} of {line['limit_name']}" if line["of_limit"] else ""
        rows.append(f"{line['what']:<28} {line['ours']:10.4g} {line['unit']}{limit}{peer}")
    for mark in record["marks"]:
        bound = f">= {mark['least']}" if mark["least"] is not None else f"<= {mark['most']}"
        state = {None: "not measured", True: "met", False: "MISSED"}[mark["met"]]
        found = "" if mark["found"] is None else f", found {mark['found']:.4g}"
        rows.append(f"mark {mark['line']}.{mark['field']} {bound}{found}: {state}")
    return "\n".join([*rows, "passed" if record["passed"] else "FAILED"])
