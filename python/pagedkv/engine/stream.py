"""What a request tells the task that waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pagedkv.engine.outputs import CompletionOutput, RequestOutput, merged

if TYPE_CHECKING:
    from pagedkv.engine.prompts import Prompt


class Stream:
    """Outputs of one request, of which a slow reader gets several as one; all methods belong to its event loop.

    Parameters
    ----------
    request_id : str
        Name of the request.
    loop : asyncio.AbstractEventLoop
        The loop of the task that reads.
    prompt : Prompt
        The prompt.
    is_delta : bool
        Whether outputs tell what is new, so that two are told as their sum.

    Attributes
    ----------
    has_ended : bool
        Whether nothing comes any more.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, prompt: Prompt, *, is_delta: bool) -> None:
        self.request_id = request_id
        self.loop = loop
        self.has_ended = False
        self._prompt = prompt
        self._is_delta = is_delta
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        self._is_settled = asyncio.Event()

    def accept(self) -> None:
        """Tell that the engine has taken the request."""
        self._is_settled.set()

    async def accepted(self) -> None:
        """Wait until the engine has taken the request; raise why it did not."""
        await self._is_settled.wait()
        if self._error is not None:
            raise self._error

    def put(self, output: RequestOutput) -> None:
        """Tell an output."""
        if self._output is not None and self._is_delta:
            output = merged(self._output, output)
        self._output = output
        self.has_ended = self.has_ended or output.finished
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Tell that no output will come any more, and why."""
        self._error = error
        self.has_ended = True
        self._has_news.set()
        self._is_settled.set()

    async def get(self) -> RequestOutput:
        """Wait for an output; raise what the request failed with."""
        while self._output is None and self._error is None:
            self._has_news.clear()
            await self._has_news.wait()
        if self._output is None:
            assert self._error is not None
            raise self._error
        output, self._output = self._output, None
        return output

    def aborted(self) -> RequestOutput:
        """Return the last output of a request that was aborted."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort")],
            finished=True,
            num_cached_tokens=0,
        )
