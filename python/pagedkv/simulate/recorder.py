"""Record the requests of a live engine: when each came, how long it was, what it shared; no text."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pagedkv.exceptions import InvalidArgumentError

DEFAULT_BLOCK_SIZE = 16


class TraceRecorder:
    """Writes one JSON line for each request that ends, which `Workload.read_jsonl` reads.

    Prefixes are told by hashes of whole blocks, each chained to the one before and keyed with a secret that is
    forgotten with the recorder: lines of one trace can be compared with one another, and with nothing else.

    Parameters
    ----------
    path : path
        File to write; one that is there is replaced.
    block_size : int
        Tokens that a hash stands for.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from pagedkv.simulate import Workload
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "trace.jsonl"
    >>> with TraceRecorder(path, block_size=4) as recorder:
    ...     recorder.added("a", [1, 2, 3, 4, 5], now=10.0)
    ...     recorder.added("b", [1, 2, 3, 4, 6], now=12.5)
    ...     recorder.finished("b", 7)
    ...     recorder.finished("a", 3)
    >>> trace = Workload.read_jsonl(path)
    >>> trace.arrivals.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    ([0.0, 2.5], [5, 5], [3, 7])
    >>> bool((trace.prompt(0)[:4] == trace.prompt(1)[:4]).all())
    True
    """

    def __init__(self, path: str | PathLike[str], block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size: expected at least 1, found {block_size}")
        self.block_size = block_size
        self._key = secrets.token_bytes(32)
        self._open: dict[str, dict[str, Any]] = {}
        # Line by line, so that what has ended is there whatever becomes of the process.
        self._file = Path(path).open("w", buffering=1)  # noqa: SIM115 - it is open as long as the recorder

    def added(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray[Any, Any],
        *,
        now: float,
        priority: int = 0,
        tenant: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Note a request that came at `now` seconds, by a clock whose beginning does not matter.

        Prompts of different salts share nothing, as in the prefix cache.

        Raises
        ------
        InvalidArgumentError
            If a request of this name is open.
        """
        if request_id in self._open:
            raise InvalidArgumentError(f"request_id: expected one that is not open, found {request_id!r}")
        if not (math.isfinite(now) and now >= 0):
            raise InvalidArgumentError(f"now: expected finite seconds of at least 0, found {now}")
        row: dict[str, Any] = {
            "timestamp": round(1000 * now, 3),
            "input_length": len(prompt_token_ids),
            "hash_ids": self._hashes(prompt_token_ids, cache_salt),
            "block_size": self.block_size,
        }
        if priority:
            row["priority"] = priority
        if tenant:
            row["tenant"] = tenant
        self._open[request_id] = row

    def finished(self, request_id: str, num_output_tokens: int) -> None:
        """Write the line of a request that ended with so many tokens; one that was never added is passed over."""
        row = self._open.pop(request_id, None)
        if row is not None:
            row["output_length"] = num_output_tokens
            self._file.write(json.dumps(row) + "\n")

    def dropped(self, request_id: str) -> None:
        """Forget a request that will not end by itself; one that was never added is passed over."""
        self._open.pop(request_id, None)

    def record(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray[Any, Any],
        num_output_tokens: int,
        *,
        arrival: float,
        priority: int = 0,
        tenant: int = 0,
    ) -> None:
        """Write the line of a request that has ended, for who learns of it only then.

        Parameters
        ----------
        prompt_token_ids : sequence of int
            Its prompt, such as `RequestOutput.prompt_token_ids`.
        num_output_tokens : int
            Tokens of its longest sample.
        arrival : float
            Seconds at which it came.
        priority, tenant : int
            As in `added`.
        """
        self.added("", prompt_token_ids, now=arrival, priority=priority, tenant=tenant)
        self.finished("", num_output_tokens)

    def close(self) -> None:
        """Close the file. Requests that are open are not written: nobody knows how long they would have been."""
        self._open.clear()
        self._file.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _hashes(self, prompt_token_ids: Sequence[int] | np.ndarray[Any, Any], cache_salt: str | None) -> list[int]:
        tokens = np.ascontiguousarray(prompt_token_ids, dtype="<i4")
        digest, hashes = b"" if cache_salt is None else b"\x01" + cache_salt.encode(), []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = tokens[start : start + self.block_size].tobytes()
            digest = hashlib.blake2b(digest + block, key=self._key, digest_size=16).digest()
            # Integers of JSON are exact to 53 bits where readers use floats.
            hashes.append(int.from_bytes(digest[:8], "little") >> 11)
        return hashes
