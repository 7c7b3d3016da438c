"""From the body of a completion to requests of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pagedkv.engine import RequestOutputKind, SamplingParams
from pagedkv.exceptions import InvalidArgumentError, NeverFitsError, UnsupportedError
from pagedkv.server.errors import APIError, from_engine

if TYPE_CHECKING:
    from starlette.requests import Request

    from pagedkv.engine import AsyncLLMEngine, RequestOutput
    from pagedkv.engine.stream import Stream
    from pagedkv.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, TokenizeRequest

# Characters and tokens from which work on a text takes so long that it goes to a thread, lest others wait.
_LONG_TEXT = 20_000
_MAX_PROMPTS = 256

_Result = TypeVar("_Result")


class ClientGoneError(Exception):
    """The client went away before its answer was ready."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the request, as text if it came so, and its tokens."""

    text: str | None
    token_ids: list[int]


async def in_thread_if_long(size: int, work: Callable[[], _Result]) -> _Result:
    """Return the result of work on a text; on a long one it is done in a thread.

    Parameters
    ----------
    size : int
        Characters or tokens of the text.
    work : callable
        What is to be done.
    """
    return work() if size < _LONG_TEXT else await asyncio.to_thread(work)


class Generator:
    """Runs completions on an engine.

    Parameters
    ----------
    engine : AsyncLLMEngine
        The engine.
    """

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self.engine = engine
        self._numbers = itertools.count()

    @property
    def max_model_len(self) -> int:
        """The longest sequence."""
        return self.engine.engine.limits.max_model_len

    async def completion_prompts(self, body: CompletionRequest) -> list[Prompt]:
        """Return the prompts of a completion."""
        prompt: Any = body.prompt
        several = prompt if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)) else [prompt]
        if not several:
            raise APIError(400, "prompt: expected at least one, found none", "prompt")
        if len(several) > _MAX_PROMPTS:
            raise APIError(400, f"prompt: expected at most {_MAX_PROMPTS}, found {len(several)}", "prompt")
        if not isinstance(several[0], str):
            return [Prompt(None, token_ids) for token_ids in several]
        token_ids = await self.tokenize(several, add_special_tokens=body.add_special_tokens)
        return list(map(Prompt, several, token_ids))

    async def chat_prompt(self, body: ChatCompletionRequest) -> Prompt:
        """Return the prompt that a conversation is."""
        text = await self.render(body)
        [token_ids] = await self.tokenize([text], add_special_tokens=False)
        return Prompt(text, token_ids)

    async def render(self, body: ChatCompletionRequest | TokenizeRequest) -> str:
        """Return a conversation as the chat template writes it."""
        messages = [message.as_dict() for message in body.messages or ()]
        size = sum(len(message["content"]) for message in messages)
        return await in_thread_if_long(size, partial(self._render, body, messages))

    def _render(self, body: ChatCompletionRequest | TokenizeRequest, messages: list[dict[str, str]]) -> str:
        variables = body.chat_template_kwargs
        render = partial(
            self.engine.engine.text.render_chat,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        try:
            return render(**variables)
        except InvalidArgumentError as error:
            field, message = "messages", str(error)
            if variables:
                # The template's variables are at fault where it takes the messages without them.
                with contextlib.suppress(InvalidArgumentError):
                    render()
                    field = "chat_template_kwargs"
                    message = f"{field}: {message.removeprefix('messages: ')}"
            raise APIError(400, message, field) from error

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the tokens of texts."""
        tokenizer = self.engine.engine.get_tokenizer()
        if tokenizer is None:
            raise APIError(400, "prompt: expected token ids, because the server has no tokenizer", "prompt")

        def encode() -> list[list[int]]:
            return [list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids) for text in texts]

        return await in_thread_if_long(sum(map(len, texts)), encode)

    def params(
        self, body: GenerationRequest, prompts: Sequence[Prompt], max_tokens: int | None, **more: Any
    ) -> SamplingParams:
        """Return the sampling parameters of a body, or say which field is wrong."""
        self._check_lengths(body, prompts, max_tokens)
        kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        try:
            return SamplingParams(max_tokens=max_tokens, output_kind=kind, **{**body.sampling_fields(), **more})
        except (InvalidArgumentError, UnsupportedError) as error:
            raise from_engine(error, {"max_tokens": body.length_field}) from error

    def _check_lengths(self, body: GenerationRequest, prompts: Sequence[Prompt], max_tokens: int | None) -> None:
        longest, prompt_field, length_field = self.max_model_len, body.prompt_field, body.length_field
        for prompt in prompts:
            if not prompt.token_ids:
                raise APIError(400, f"{prompt_field}: expected at least one token, found none", prompt_field)
            length = len(prompt.token_ids)
            if body.truncate_prompt_tokens is not None:
                kept = body.truncate_prompt_tokens
                length = min(length, longest - (max_tokens or 1) if kept < 0 else kept)
            if length >= longest:
                raise APIError(
                    400,
                    f"{prompt_field}: the maximum context length is {longest} tokens, found a prompt of {length},"
                    " which leaves no room for output",
                    prompt_field,
                )
            if max_tokens is not None and length + max_tokens > longest:
                raise APIError(
                    400,
                    f"{length_field}: the maximum context length is {longest} tokens, found {length + max_tokens}:"
                    f" {length} of the prompt and {max_tokens} of output",
                    length_field,
                )

    async def start(
        self,
        body: GenerationRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        name: str,
        tenant: str | None,
    ) -> list[Stream]:
        """Hand requests over, one per prompt; all are taken, or none."""
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                given = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids, "cache_salt": body.cache_salt}
                own = f"{name}-{next(self._numbers)}"
                streams.append(self.engine.add_request(given, params, own, priority=body.priority, tenant=tenant))
            for stream in streams:
                await stream.accepted()
        except BaseException as error:
            self.discard(streams)
            if isinstance(error, NeverFitsError):
                # It is about the samples together, each with its longest output.
                raise APIError(400, f"{body.length_field}: {error}", body.length_field) from error
            if isinstance(error, Exception):
                raise from_engine(error, {"prompt_token_ids": body.prompt_field}) from error
            raise
        return streams

    def discard(self, streams: Sequence[Stream]) -> None:
        """Abort requests that nobody reads any more."""
        for stream in streams:
            self.engine.discard(stream)

    async def finish(self, request: Request, streams: Sequence[Stream]) -> list[RequestOutput]:
        """Wait for the outputs of requests, or for the client to go away."""
        work = asyncio.ensure_future(asyncio.gather(*(self._last(stream) for stream in streams)))
        gone = asyncio.ensure_future(_until_gone(request))
        try:
            tasks: set[asyncio.Future[Any]] = {work, gone}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGoneError
            return await work
        finally:
            for task in (work, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work
            self.discard(streams)

    async def _last(self, stream: Stream) -> RequestOutput:
        found = None
        async for output in self.engine.follow(stream):
            found = output
        assert found is not None
        return found

    async def outputs(self, streams: Sequence[Stream]) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield the outputs of several requests as they come, with the number of the request."""
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=1)

        async def read(number: int, stream: Stream) -> None:
            try:
                async for output in self.engine.follow(stream):
                    await queue.put((number, output))
                await queue.put((number, None))
            except Exception as error:
                await queue.put((number, error))

        readers = [asyncio.create_task(read(*pair)) for pair in enumerate(streams)]
        try:
            num_left = len(readers)
            while num_left:
                number, output = await queue.get()
                if output is None:
                    num_left -= 1
                elif isinstance(output, Exception):
                    raise output
                else:
                    yield number, output
        finally:
            for reader in readers:
                reader.cancel()
            self.discard(streams)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
