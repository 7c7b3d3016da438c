"""When the transfers between a device and the host have ended."""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol


class Transfers(Protocol):
    """Transfers that end in the order in which they were started."""

    def until(self, last: int) -> contextlib.AbstractContextManager[None]:
        """Start, inside, all transfers with ids up to `last`."""

    def last_finished(self) -> int:
        """Return the id up to which all transfers have ended."""

    def outlive(self, memory: Any) -> None:
        """See to it that memory of a device stays until transfers that were started have ended."""


class Synchronous:
    """Transfers that have ended when they were started."""

    def __init__(self) -> None:
        self._last = 0

    @contextlib.contextmanager
    def until(self, last: int) -> Iterator[None]:
        """Start, inside, all transfers with ids up to `last`."""
        yield
        self._last = max(self._last, last)

    def last_finished(self) -> int:
        """Return the id up to which all transfers have ended."""
        return self._last

    def outlive(self, memory: Any) -> None:
        """Do nothing: no transfer is under way."""


class SideStream:
    """Transfers on a stream of their own, each behind what the current stream was asked before.

    Parameters
    ----------
    device : str
        The GPU.

    Notes
    -----
    Nothing waits for a transfer: blocks that one reads are fenced and blocks that one writes are in no plan until
    `last_finished` has told that it ended, so whatever touches them is launched after that.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.device(device)
        self._stream = self._cuda.Stream(self._device)
        self._started: deque[tuple[int, Any]] = deque()
        self._last = 0

    @contextlib.contextmanager
    def until(self, last: int) -> Iterator[None]:
        """Start, inside, all transfers with ids up to `last`; one that failed leaves the others as they are."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            yield
        ended = self._cuda.Event()
        ended.record(self._stream)
        self._started.append((last, ended))

    def last_finished(self) -> int:
        """Return the id up to which all transfers have ended, without waiting for any."""
        while self._started and self._started[0][1].query():
            self._last = max(self._last, self._started.popleft()[0])
        return self._last

    def outlive(self, memory: Any) -> None:
        """See to it that a torch tensor's memory is used again only behind what this stream was asked."""
        if hasattr(memory, "record_stream"):
            memory.record_stream(self._stream)
