"""Who asks, and how much they may send."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from pagedkv.server.errors import APIError, from_validation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

_Body = TypeVar("_Body", bound=BaseModel)


class Clients:
    """Checks keys and sizes, and tells clients apart.

    Parameters
    ----------
    api_keys : sequence of str
        Keys of which a request must bring one; none to let everybody in.
    max_body_bytes : int
        Longest body.
    """

    def __init__(self, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._api_keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    def check_key(self, request: Request) -> None:
        """Refuse a request without a key."""
        if self._api_keys and self._key_number(request) is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            raise APIError(401, "expected an API key as 'Authorization: Bearer KEY'", "authorization", challenge)

    def tenant(self, request: Request) -> str:
        """Return on whose share a request runs: its key's where there are several, else its host's."""
        number = self._key_number(request)
        if number is not None and len(self._api_keys) > 1:
            return f"key {number}"
        return "unknown host" if request.client is None else request.client.host

    async def read(self, request: Request, kind: type[_Body]) -> _Body:
        """Return the body of a request, or say what is wrong with it."""
        content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise APIError(415, f"content-type: expected application/json, found {content_type}", "content-type")
        try:
            return kind.model_validate_json(await self._bytes(request))
        except ValidationError as error:
            raise from_validation(error) from error

    async def _bytes(self, request: Request) -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                raise APIError(413, f"body: expected at most {self._max_body_bytes} bytes, found more", "body")
        return bytes(body)

    def _key_number(self, request: Request) -> int | None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        # All keys are compared, in a time that does not depend on them.
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._api_keys]
        return matches.index(True) if any(matches) else None
