"""An engine behind asyncio: requests are async iterators, and steps run in a thread of their own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack

from pagedkv.engine.llm_engine import LLMEngine
from pagedkv.engine.options import EngineOptions, RequestOptions
from pagedkv.engine.prompts import read_prompt
from pagedkv.engine.sampling_params import RequestOutputKind, SamplingParams
from pagedkv.engine.stream import Stream
from pagedkv.exceptions import EngineDeadError, InvalidArgumentError, QueueFullError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from pagedkv.engine.beam_search import BeamSearchParams
    from pagedkv.engine.outputs import RequestOutput

logger = logging.getLogger(__name__)


class AsyncLLMEngine:
    """Runs requests of many tasks in one continuous batch.

    Parameters
    ----------
    model, tokenizer, dtype
        As for `LLMEngine`.
    max_queued_requests : int, optional
        Most requests that may wait beside those that run; more are refused with `QueueFullError`.
    **options
        The keywords of `LLMEngine`.

    Notes
    -----
    Steps run in one thread that the engine starts; methods are called from tasks of any event loop, also of several. A
    step that fails ends the engine: every request is told by `EngineDeadError`.

    Examples
    --------
    >>> import asyncio
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> config = LlamaConfig(vocab_size=32, intermediate_size=64, max_position_embeddings=128, **sizes)
    >>> async def main():
    ...     async with AsyncLLMEngine(LlamaForCausalLM(config).eval()) as engine:
    ...         async for output in engine.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)):
    ...             last = output
    ...     return len(last.outputs[0].token_ids)
    >>> asyncio.run(main())
    3
    """

    def __init__(
        self,
        model: PreTrainedModel | str | PathLike[str],
        tokenizer: Any = None,
        dtype: str | torch.dtype = "auto",
        *,
        max_queued_requests: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if max_queued_requests is not None and max_queued_requests < 0:
            raise InvalidArgumentError(f"max_queued_requests: expected at least 0, found {max_queued_requests}")
        self._engine = LLMEngine(model, tokenizer, dtype, **options)
        self._max_queued_requests = max_queued_requests
        self._names = itertools.count()
        self._streams: dict[str, Stream] = {}
        self._commands: list[Callable[[], None]] = []
        # Requests that run and wait as the last step left them, and those that no step has considered yet.
        self._num_running = self._num_waiting = self._num_fresh = 0
        self._wake = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pagedkv-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)

    @property
    def engine(self) -> LLMEngine:
        """The engine behind it: its scheduler, limits, statistics and text may be looked at from any thread."""
        return self._engine

    @property
    def errored(self) -> bool:
        """Whether a step failed, so that no request runs any more."""
        return self._error is not None

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return not (self._is_closed or self.errored)

    @property
    def num_queued_requests(self) -> int:
        """Requests that wait to run, for the first time or again."""
        with self._wake:
            return self._num_waiting + self._num_fresh

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests were taken and have not ended."""
        return len(self._streams)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if requests are not taken any more."""
        self._check_running()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Run a request.

        Parameters
        ----------
        prompt, sampling_params
            As for `LLMEngine.add_request`.
        request_id : str, optional
            Its name; by default one that is free.
        **options
            The keywords of `LLMEngine.add_request`: `priority`, `tenant`, `lora_request`.

        Yields
        ------
        RequestOutput
            By the `output_kind` of the parameters. Where the caller is slower than the engine, several steps are told
            as one.

        Raises
        ------
        InvalidArgumentError, NeverFitsError
            If the request can never run.
        QueueFullError
            If too many requests wait.
        EngineDeadError
            If a step failed.

        Notes
        -----
        When the task is cancelled or the iterator closed, the request is aborted: its blocks are free when the step in
        flight has ended.
        """
        stream = self.add_request(prompt, sampling_params, request_id, **options)
        async for output in self.follow(stream):
            yield output

    async def follow(self, stream: Stream) -> AsyncIterator[RequestOutput]:
        """Read the stream of a request to its end; leaving it early, in whatever way, aborts the request."""
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self.discard(stream)

    def discard(self, stream: Stream) -> None:
        """Abort a request that nobody reads any more, if it has not ended."""
        if not stream.has_ended:
            self._forget(stream)

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Hand a request over; `generate` is this and the reading of the stream. Called in a running event loop."""
        self._check_running()
        self._check_queue()
        request_id = f"request-{next(self._names)}" if request_id is None else request_id
        if request_id in self._streams:
            raise InvalidArgumentError(f"request_id: expected a new one, found {request_id!r}, which has not ended")
        params = SamplingParams() if sampling_params is None else sampling_params
        read = read_prompt(prompt, self._engine.get_tokenizer())
        is_delta = getattr(params, "output_kind", None) == RequestOutputKind.DELTA
        stream = Stream(request_id, asyncio.get_running_loop(), read, is_delta=is_delta)
        self._streams[request_id] = stream

        def add() -> None:
            if stream.has_ended:
                return
            try:
                self._engine.add_request(request_id, read, params, **options)
                _call(stream.loop, stream.accept)
            except Exception as error:
                self._tell(stream, error)

        self._command(add, is_request=True)
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gives a last output with the finish reason "abort".

        Parameters
        ----------
        request_id : str
            Its name. One that has ended is passed over.
        """
        stream = self._streams.get(request_id)
        if stream is not None:
            self._forget(stream)
            stream.put(stream.aborted())

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Abort what runs, end the thread and give the memory back; doing so again changes nothing."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._fail_all(EngineDeadError("the engine is closed"))
        self._engine.close()

    def _check_running(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"the engine is dead: {self._error}") from self._error
        if self._is_closed:
            raise EngineDeadError("the engine is closed")

    def _check_queue(self) -> None:
        most = self._max_queued_requests
        if most is None:
            return
        with self._wake:
            # Seats are for new requests only where nobody waits for blocks.
            num_seats = 0 if self._num_waiting else self._engine.limits.max_num_seqs - self._num_running
            num_queued = self._num_waiting + self._num_fresh
        if num_queued >= most + max(num_seats, 0):
            raise QueueFullError(f"expected fewer than {most} waiting requests, found {num_queued}")

    def _command(self, command: Callable[[], None], *, is_request: bool = False) -> None:
        with self._wake:
            self._commands.append(command)
            self._num_fresh += is_request
            self._wake.notify()

    def _forget(self, stream: Stream) -> None:
        stream.has_ended = True
        self._streams.pop(stream.request_id, None)
        # A request that uses the name again is handed over after this.
        self._command(lambda: self._abort(stream.request_id))

    def _abort(self, request_id: str) -> None:
        self._engine.abort_request(request_id)

    def _run(self) -> None:
        try:
            while (num_new := self._wait_for_work()) is not None:
                if self._engine.has_unfinished_requests():
                    self._deliver(self._engine.step())
                with self._wake:
                    self._num_running, self._num_waiting = self._engine.scheduler.num_requests()
                    self._num_fresh -= num_new
        except BaseException as error:
            logger.exception("a step failed; the engine runs no requests any more")
            self._error = error
            dead = EngineDeadError(f"the engine is dead: {error}")
            dead.__cause__ = error
            self._fail_all(dead)

    def _wait_for_work(self) -> int | None:
        """Take up what was handed over; return how many requests it may have been, None to stop."""
        with self._wake:
            while not (self._commands or self._is_closed or self._engine.has_unfinished_requests()):
                self._wake.wait()
            commands, self._commands = self._commands, []
            num_new = self._num_fresh
        if self._is_closed:
            self._engine.abort_request(self._engine.unfinished_request_ids())
            return None
        for command in commands:
            command()
        return num_new

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Tell each event loop once what its streams got."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                by_loop[stream.loop].append((stream, output))
                if output.finished:
                    del self._streams[output.request_id]
        for loop, told in by_loop.items():
            _call(loop, _put_all, told)

    def _tell(self, stream: Stream, error: Exception) -> None:
        self._streams.pop(stream.request_id, None)
        _call(stream.loop, stream.fail, error)

    def _fail_all(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            self._tell(stream, error)


def _put_all(told: list[tuple[Stream, RequestOutput]]) -> None:
    for stream, output in told:
        stream.put(output)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        # The loop was closed with its request still running: there is nobody to tell.
        logger.debug("an event loop ended before its request did")
