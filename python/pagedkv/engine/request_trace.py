"""The trace that an engine writes of its requests, for simulations: lengths, arrivals, hashed prefixes, no text."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedkv.engine.sampling_params import RequestOutputKind
from pagedkv.simulate.recorder import TraceRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike

    from pagedkv.engine.beam_search import BeamSearchParams
    from pagedkv.engine.outputs import RequestOutput
    from pagedkv.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class RequestTrace:
    """Tells a `TraceRecorder` what an engine tells its callers.

    A file that cannot be written any more ends the trace, with a line in the log, and not the engine.

    Parameters
    ----------
    path : path
        File to write; one that is there is replaced.
    block_size : int
        Tokens that a hash stands for.
    clock : callable
        What says the time in seconds.
    """

    def __init__(self, path: str | PathLike[str], block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = TraceRecorder(path, block_size)
        self._clock = clock
        self._has_failed = False
        # Tenants are names in an engine and numbers in a trace; 0 is nobody.
        self._tenants: dict[str, int] = {}
        # Of each open request: whether its outputs are deltas, and the tokens of each sample so far.
        self._samples: dict[str, tuple[bool, dict[int, int]]] = {}

    def added(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int,
        tenant: str | None,
        cache_salt: str | None,
        lora_id: int | None,
    ) -> None:
        """Note a request that has just come."""
        number = 0 if tenant is None else self._tenants.setdefault(tenant, len(self._tenants) + 1)
        is_delta = getattr(params, "output_kind", None) == RequestOutputKind.DELTA
        # One of this name is known where an interrupt came before anybody heard of its end.
        self.aborted([request_id])
        self._samples[request_id] = is_delta, {}
        # Prompts of different adapters share as little as those of different salts.
        salt = cache_salt if lora_id is None else repr((lora_id, cache_salt))
        options: dict[str, Any] = {"priority": priority, "tenant": number, "cache_salt": salt}
        self._recorder.added(request_id, prompt_token_ids, now=self._clock(), **options)

    def told(self, outputs: Iterable[RequestOutput]) -> None:
        """Count the tokens of outputs, and write the lines of requests that ended."""
        for output in outputs:
            if output.request_id not in self._samples:
                continue  # an interrupt came before it was noted
            is_delta, lengths = self._samples[output.request_id]
            for sample in output.outputs:
                before = lengths.get(sample.index, 0) if is_delta else 0
                lengths[sample.index] = before + len(sample.token_ids)
            if output.finished:
                del self._samples[output.request_id]
                longest = max(lengths.values(), default=0)
                self._attempt(partial(self._recorder.finished, output.request_id, longest))

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Forget requests that will not end by themselves."""
        for request_id in request_ids:
            self._samples.pop(request_id, None)
            self._recorder.dropped(request_id)

    def close(self) -> None:
        """Close the file."""
        self._attempt(self._recorder.close)

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._has_failed:
                logger.error("the trace of requests ends here: %s", error)
            self._has_failed = True
