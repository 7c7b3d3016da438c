"""A program kept waiting for its turns: it answers each line of its standard input by one JSON line."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Program:
    """A running program.

    Parameters
    ----------
    command : sequence
        What to run, in the root of the checkout.
    environment : mapping, optional
        Its environment variables; by default ours.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> dict[str, Any]:
        """Write a line and return the answer."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self.read(line)

    def read(self, asked: str) -> dict[str, Any]:
        """Return its next line, which some write unasked when they are ready."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args} ended at {asked!r}, with exit status {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()
