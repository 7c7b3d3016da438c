"""Server-sent events: the deltas of a completion, its usage, and what went wrong on the way."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse

from pagedkv.server.answers import usage
from pagedkv.server.errors import from_engine

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from pagedkv.engine import RequestOutput
    from pagedkv.engine.stream import Stream
    from pagedkv.server.generation import Generator

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_Deltas = Callable[[int, "RequestOutput", dict[int, int]], list[dict[str, Any]]]


class EventStream(StreamingResponse):
    """An answer of events, after which nothing of its requests goes on.

    Parameters
    ----------
    chunks : async iterator of bytes
        The events.
    discard : callable
        Aborts what goes on. The iterator does so itself, but not where the client has gone before it begins.
    headers : dict
        Headers of the answer.
    """

    def __init__(self, chunks: AsyncIterator[bytes], discard: Callable[[], object], headers: dict[str, str]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={**headers, "Cache-Control": "no-cache"})
        self._discard = discard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._discard()


def event(data: dict[str, Any]) -> bytes:
    """Return one event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def stream_chunks(
    generator: Generator, streams: Sequence[Stream], body: Any, head: dict[str, Any], deltas: _Deltas
) -> AsyncGenerator[bytes, None]:
    """Yield the events of requests, a chunk per choice and step, then their usage if it was asked for.

    Parameters
    ----------
    generator : Generator
        Runs the requests.
    streams : sequence of Stream
        One per prompt.
    body : CompletionRequest or ChatCompletionRequest
        What was asked for.
    head : dict
        What every chunk begins with.
    deltas : callable
        Turns an output into choices; takes the number of the prompt, the output, and the length of each choice's text.
    """
    options = body.stream_options
    with_usage = options is not None and options.include_usage
    with_each = options is not None and options.continuous_usage_stats
    latest: dict[int, RequestOutput] = {}
    offsets: dict[int, int] = {}
    num_tokens = 0
    outputs = generator.outputs(streams)
    try:
        async for number, output in outputs:
            latest[number] = output
            num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
            for choice in deltas(number, output, offsets):
                chunk = {**head, "choices": [choice]}
                if with_each:
                    chunk["usage"] = usage(latest.values(), num_tokens)
                elif with_usage:
                    chunk["usage"] = None
                yield event(chunk)
        if with_usage:
            yield event({**head, "choices": [], "usage": usage(latest.values(), num_tokens)})
    except Exception as error:
        # The status was sent; the error can only be an event.
        found = from_engine(error)
        logger.warning("a stream ended early: %s", error, exc_info=found.status == 500)
        yield event(found.body)
    finally:
        await outputs.aclose()  # type: ignore[attr-defined]
    yield DONE
