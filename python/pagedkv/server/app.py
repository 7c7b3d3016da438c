"""The routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from pagedkv.server.chat import ChatCompletion
from pagedkv.server.clients import Clients
from pagedkv.server.completions import Completion
from pagedkv.server.errors import APIError, from_engine
from pagedkv.server.generation import ClientGoneError, Generator, in_thread_if_long
from pagedkv.server.metrics import EngineCollector
from pagedkv.server.page import PAGE
from pagedkv.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    check_request_id,
)
from pagedkv.server.state import engine_state
from pagedkv.server.step_counts import StepCounts
from pagedkv.server.streaming import EventStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from pagedkv.engine import AsyncLLMEngine

logger = logging.getLogger(__name__)

# What nginx answers when the client has closed the connection; nobody reads it.
_CLIENT_GONE = 499
# The page has no data of its own; it asks for a key before it reads some.
_OPEN_PATHS = frozenset({"/health", "/ping", "/"})
_Handler = Callable[["Request"], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the server is told beside its engine.

    Parameters
    ----------
    model_name : str
        What requests call the model.
    api_keys : sequence of str
        Keys of which a request must bring one; none to let everybody in.
    max_body_bytes : int
        Longest body of a request.
    vllm_metrics : bool
        Whether `/metrics` has vLLM's names beside ours.
    version : str
        What `/version` says.
    debug_routes : bool
        Whether there is the page at `/` and `/debug/state`.
    """

    model_name: str
    api_keys: Sequence[str] = ()
    max_body_bytes: int = 4 << 20
    vllm_metrics: bool = False
    version: str = "unknown"
    debug_routes: bool = True


class Server:
    """Answers requests from an engine.

    Parameters
    ----------
    engine : AsyncLLMEngine
        The engine; it is shut down with the application.
    options : ServerOptions
        What the server is told beside.
    """

    def __init__(self, engine: AsyncLLMEngine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._generator = Generator(engine)
        self._clients = Clients(options.api_keys, options.max_body_bytes)
        self._counts = StepCounts(engine.engine)
        engine.engine.step_hooks.append(self._counts)
        self._created = int(time.time())
        self._num_open = 0

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            self._route("/v1/models", self.models, "GET"),
            self._route("/v1/models/{model:path}", self.model, "GET"),
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat_completions, "POST"),
            self._route("/tokenize", self.tokenize, "POST"),
            self._route("/detokenize", self.detokenize, "POST"),
            self._route("/health", self.health, "GET"),
            self._route("/ping", self.health, "GET", "POST"),
            self._route("/load", self.load, "GET"),
            self._route("/version", self.version, "GET"),
            self._route("/metrics", self.metrics, "GET"),
        ]
        if self._options.debug_routes:
            routes += [self._route("/", self.page, "GET"), self._route("/debug/state", self.state, "GET")]
        handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _failure}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    async def models(self, request: Request) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_card())

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        body = await self._clients.read(request, CompletionRequest)
        self._check_model(body.model)
        prompts = await self._generator.completion_prompts(body)
        completion = Completion(self._generator, body, prompts, self._options.model_name, _name("cmpl", request, body))
        return await self._answer(request, body, prompts, completion)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._clients.read(request, ChatCompletionRequest)
        self._check_model(body.model)
        prompt = await self._generator.chat_prompt(body)
        name = _name("chatcmpl", request, body)
        completion = ChatCompletion(self._generator, body, prompt, self._options.model_name, name)
        return await self._answer(request, body, [prompt], completion)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or a conversation."""
        body = await self._clients.read(request, TokenizeRequest)
        self._check_model(body.model)
        text = await self._generator.render(body) if body.prompt is None else body.prompt
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        [tokens] = await self._generator.tokenize([text], add_special_tokens=special)
        answer: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": self._generator.max_model_len,
        }
        if body.return_token_strs:
            texts = partial(map, self._engine.engine.text.token_text, tokens)
            answer["token_strs"] = await in_thread_if_long(len(tokens), lambda: list(texts()))
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        body = await self._clients.read(request, DetokenizeRequest)
        self._check_model(body.model)
        decode = self._engine.engine.text.decode(skip_special_tokens=False)
        if decode is None:
            raise APIError(400, "tokens: expected nothing, because the server has no tokenizer", "tokens")
        vocab_size = self._engine.engine.vocab_size
        if wrong := [token for token in body.tokens if token >= vocab_size]:
            raise APIError(400, f"tokens: expected ids of 0 to {vocab_size - 1}, found {wrong[0]}", "tokens")
        text = await in_thread_if_long(len(body.tokens), partial(decode, body.tokens)) if body.tokens else ""
        return JSONResponse({"prompt": text})

    async def health(self, request: Request) -> Response:
        """Say whether requests are taken."""
        try:
            await self._engine.check_health()
        except Exception as error:
            raise from_engine(error) from error
        return Response(status_code=200)

    async def load(self, request: Request) -> Response:
        """Say how many completions are being answered."""
        return JSONResponse({"server_load": self._num_open})

    async def version(self, request: Request) -> Response:
        """Say which version runs."""
        return JSONResponse({"version": self._options.version})

    async def metrics(self, request: Request) -> Response:
        """Give statistics for Prometheus; ``?names=vllm`` gives them under vLLM's names."""
        registry = CollectorRegistry()
        names = request.query_params.get("names")
        if names not in (None, "pagedkv", "vllm"):
            raise APIError(400, f"names: expected pagedkv or vllm, found {names!r}", "names")
        for vllm_names in (False, True):
            if (names == "vllm") == vllm_names if names is not None else not vllm_names or self._options.vllm_metrics:
                registry.register(self._collector(vllm_names=vllm_names))
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    async def state(self, request: Request) -> Response:
        """Give a snapshot of the engine."""
        # A large pool has many blocks to write down.
        found = await asyncio.to_thread(engine_state, self._engine.engine, self._options.model_name, self._counts)
        return JSONResponse(found)

    async def page(self, request: Request) -> Response:
        """Show the snapshot, live."""
        return HTMLResponse(PAGE)

    async def _answer(self, request: Request, body: Any, prompts: Any, completion: Any) -> Response:
        params = completion.params
        tenant = self._clients.tenant(request)
        name: str = completion.name
        streams = await self._generator.start(body, prompts, params, name, tenant)
        headers = {"X-Request-Id": name}
        if body.stream:
            chunks = self._counted(completion.chunks(streams))
            return EventStream(chunks, partial(self._generator.discard, streams), headers)
        self._num_open += 1
        try:
            outputs = await self._generator.finish(request, streams)
        finally:
            self._num_open -= 1
        return JSONResponse(completion.answer(outputs), headers=headers)

    async def _counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self._num_open += 1
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            self._num_open -= 1
            await chunks.aclose()  # type: ignore[attr-defined]

    def _route(self, path: str, handler: _Handler, *methods: str) -> Route:
        async def answer(request: Request) -> Response:
            try:
                if path not in _OPEN_PATHS:
                    self._clients.check_key(request)
                return await handler(request)
            except APIError as error:
                return error.response()
            except (ClientGoneError, ClientDisconnect):
                return Response(status_code=_CLIENT_GONE)
            except Exception as error:
                found = from_engine(error)
                if found.status == 500:
                    logger.exception("%s failed", path)
                return found.response()

        return Route(path, answer, methods=list(methods))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._options.model_name:
            raise APIError(404, f"The model `{name}` does not exist.", "model")

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._options.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pagedkv",
            "max_model_len": self._generator.max_model_len,
        }

    def _collector(self, *, vllm_names: bool) -> EngineCollector:
        return EngineCollector(self._engine.engine, self._options.model_name, self._counts, vllm_names=vllm_names)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(self._engine.shutdown)


def _name(kind: str, request: Request, body: Any) -> str:
    own = body.request_id
    if own is None and (own := request.headers.get("x-request-id")):
        check_request_id("x-request-id", own)
    own = own or uuid.uuid4().hex
    return f"{kind}-{own}"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: f"there is no {request.url.path}", 405: f"{request.url.path} takes no {request.method}"}
    message = known.get(error.status_code, str(error.detail))
    return APIError(error.status_code, message, headers=dict(error.headers or {})).response()


async def _failure(request: Request, error: Exception) -> Response:
    return from_engine(error).response()
