"""A program kept waiting for its turns: it answers each line of its standard input by one JSON line."""

import contextlib
import json
import os
import signal
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
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # A group of its own, which is suspended as one; the system wakes and ends it if we end first.
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0, **pipes)

    def ask(self, line: str) -> dict[str, Any]:
        """Write a line and return the answer."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(line, file=self._process.stdin, flush=True)
        return self.read(line)

    def read(self, asked: str) -> dict[str, Any]:
        """Return its next line, which some write unasked when they are ready."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args} ended at {asked!r}, with exit status {self._process.wait()}")
        return json.loads(answer)

    def rest(self) -> None:
        """Suspend it and what it started until it is asked again: threads that wait for work may spin."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Let it end."""
        self._signal(signal.SIGCONT)
        self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        # One that has ended is told by what it does not answer.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
