"""Traces of requests in files."""

from pathlib import Path

from pagedkv._core import Workload


def has_prefixes(path: Path) -> bool:
    """Return whether a trace is of JSON lines, which say what prompts share, by its name."""
    return path.suffix in {".jsonl", ".json"}


def read_trace(path: Path) -> Workload:
    """Read a trace, JSON lines or CSV.

    Raises
    ------
    InvalidArgumentError
        Naming line and field.
    """
    return Workload.read_jsonl(path) if has_prefixes(path) else Workload.read_table(path)
