"""What all benchmarks share: one JSON line per measured claim, and a table of them for people.

A benchmark is a script `benchmarks/bench_NAME.py`:

    arguments = lines.parser(__doc__).parse_args()
    report = lines.Report("append", arguments.json)
    report.add("append_kv_f32", "GB/s", ours_samples, peer=torch_samples, peer_name="torch index_put")
    report.show()

Every line has the same fields, null where there is nothing to say:

what, unit      name of the line and unit of its values
ours            median of our samples
peer, peer_name the peer we compare ourselves with, and its median
ratio           how many times better than the peer we are; above 1 we are better, whatever the unit
limit           what the hardware (or arithmetic) allows, named by limit_name
of_limit        fraction of that limit reached
peers           further peers, name to value
better          "higher" or "lower", so that ratio can be checked by its reader
samples, spread number of our samples; (q3 - q1) / median, 0 for a single one

and, beside them, whatever sizes the benchmark passed by name; `must_reach` is a column of the table. What a build
cannot do is no missing line: `report.refuse` adds it, every figure null, with the reason in `refused`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Measurement = float | Iterable[float]
Better = Literal["higher", "lower"]
FIELDS = ["what", "unit", "ours", "peer", "peer_name", "ratio", "limit", "limit_name", "of_limit", "peers", "better"]
FIELDS += ["samples", "spread"]


class Report:
    """The lines of one benchmark run, written to a file as they are made.

    Parameters
    ----------
    title : str
        Heading of the table.
    json_path : Path or None
        File for the JSON lines; what it held before is dropped. None: no file.
    """

    def __init__(self, title: str, json_path: Path | None = None) -> None:
        self.title = title
        self.lines: list[dict[str, Any]] = []
        self._json_path = json_path
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text("")

    def add(
        self,
        what: str,
        unit: str,
        ours: Measurement,
        *,
        better: Better,
        peer: Measurement | None = None,
        peer_name: str | None = None,
        limit: float | None = None,
        limit_name: str | None = None,
        limit_is_tolerance: bool = False,
        of_limit: float | None = None,
        peers: Mapping[str, Measurement] | None = None,
        **sizes: Any,
    ) -> dict[str, Any]:
        """Add a line; measurements are single values or samples, of which the median counts.

        With `limit_is_tolerance` the limit is how far ours may lie from the peer, and `of_limit` the share of it used.
        An `of_limit` that is given was measured more closely than by two medians.
        A value of exactly 0 on the side that ratio divides by leaves ratio null: nothing is infinitely better.
        """
        if (peer is None) != (peer_name is None):
            raise ValueError(f"{what}: a peer needs both a value and a name, got {peer=} and {peer_name=}")
        if (limit is None) != (limit_name is None):
            raise ValueError(f"{what}: a limit needs both a value and a name, got {limit=} and {limit_name=}")
        samples = _samples(ours)
        value = statistics.median(samples)
        peer_value = None if peer is None else statistics.median(_samples(peer))
        if of_limit is None:
            of_limit = times_better(value, limit, better)
        if limit_is_tolerance:
            if limit is None or peer_value is None:
                raise ValueError(f"{what}: a tolerance needs a limit and a peer, got {limit=} and {peer=}")
            of_limit = abs(value - peer_value) / limit
        line = {
            "what": what,
            "unit": unit,
            "ours": value,
            "peer": peer_value,
            "peer_name": peer_name,
            "ratio": times_better(value, peer_value, better),
            "limit": limit,
            "limit_name": limit_name,
            "of_limit": of_limit,
            "peers": {name: statistics.median(_samples(measured)) for name, measured in (peers or {}).items()},
            "better": better,
            "samples": len(samples),
            "spread": spread(samples),
        }
        return self._write(line, sizes)

    def refuse(self, what: str, unit: str, reason: str, *, better: Better, **sizes: Any) -> dict[str, Any]:
        """Add a line that could not be measured, and why."""
        line: dict[str, Any] = dict.fromkeys(FIELDS) | {"what": what, "unit": unit, "peers": {}, "better": better}
        return self._write(line | {"samples": 0, "refused": reason}, sizes)

    def _write(self, line: dict[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
        if taken := line.keys() & sizes.keys():
            raise ValueError(f"{line['what']}: {sorted(taken)} are fields of every line, not sizes")
        line |= sizes
        self.lines.append(line)
        if self._json_path is not None:
            with self._json_path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        return line

    def show(self, console: Console | None = None) -> None:
        """Print the lines as a table, without the columns in which no line has anything."""
        rows = [_cells(line) for line in self.lines]
        used = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
        table = Table(title=self.title, title_justify="left")
        for i in used:
            heading, justify = COLUMNS[i]
            table.add_column(heading, justify=justify, no_wrap=heading == "what")
        for row in rows:
            table.add_row(*(row[i] for i in used))
        (console or Console(width=None if sys.stdout.isatty() else 140)).print(table)


COLUMNS: list[tuple[str, Literal["left", "right"]]] = [
    ("what", "left"),
    ("ours", "right"),
    ("spread", "right"),
    ("unit", "left"),
    ("peer", "right"),
    ("times better", "right"),
    ("limit", "right"),
    ("of limit", "right"),
    ("must reach", "left"),
]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line that all benchmarks have; a benchmark may add its own options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object per line to FILE")
    return parser


def spread(samples: Sequence[float]) -> float:
    """Return the distance of the quartiles relative to the median, 0 for a single sample."""
    middle = statistics.median(samples)
    if len(samples) < 2 or middle == 0:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / abs(middle)


def times_better(ours: float, other: float | None, better: Better) -> float | None:
    """Return how many times better `ours` is than `other`; None without another or where it would divide by 0."""
    if other is None:
        return None
    numerator, denominator = (ours, other) if better == "higher" else (other, ours)
    return numerator / denominator if denominator else None


def _samples(measured: Measurement) -> list[float]:
    return [float(value) for value in measured] if isinstance(measured, Iterable) else [float(measured)]


def _cells(line: Mapping[str, Any]) -> list[str]:
    def named(value: str, name: str) -> str:
        return "" if line[value] is None else f"{line[value]:.4g} ({line[name]})"

    return [
        line["what"],
        line["refused"] if line["ours"] is None else f"{line['ours']:.4g}",
        f"{line['spread']:.1%}" if line["samples"] > 1 else "",
        line["unit"],
        named("peer", "peer_name"),
        "" if line["ratio"] is None else f"{line['ratio']:.2f}",
        named("limit", "limit_name"),
        "" if line["of_limit"] is None else f"{line['of_limit']:.0%}",
        line.get("must_reach") or "",
    ]
