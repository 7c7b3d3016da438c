"""Errors in OpenAI's form: what is wrong, of which kind, and in which field."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from pagedkv.exceptions import EngineDeadError, InvalidArgumentError, QueueFullError, UnsupportedError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
# Messages of the engine begin with the argument that they are about.
_ARGUMENT = re.compile(r"^([a-z_]\w*)(?:\[\d+\])*: ")


class APIError(Exception):
    """A request that can't be answered.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
        What is wrong.
    param : str, optional
        The field that it is about.
    headers : dict, optional
        Headers of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.body, self.status, self.headers)


def from_validation(error: ValidationError) -> APIError:
    """Return what a body that is not what was expected is answered with; the first mistake is told.

    Parameters
    ----------
    error : pydantic.ValidationError
        What is wrong with it.
    """
    first = error.errors(include_url=False)[0]
    # Choices of a union are in the path as names of types, which no request has.
    path = [part for part in first["loc"] if isinstance(part, int) or re.fullmatch(r"[a-z_]\w*", part)]
    path = [part for part in path if part not in ("str", "int", "list", "function-after")]
    param = ".".join(map(str, path)) or None
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is no JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        return APIError(400, f"{param}: expected nothing of that name, found {short(first['input'])}", param)
    message = first["msg"].removeprefix("Value error, ")
    return APIError(400, f"{param or 'body'}: {message}, found {short(first['input'])}", param)


def from_engine(error: Exception, names: dict[str, str] | None = None) -> APIError:
    """Return what a request that the engine refused is answered with.

    Parameters
    ----------
    error : Exception
        What the engine raised.
    names : dict, optional
        What the engine's arguments are called in the request.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return APIError(429, f"too many requests wait: {error}", headers={"Retry-After": "1"})
    if isinstance(error, EngineDeadError):
        return APIError(503, str(error))
    if isinstance(error, InvalidArgumentError | UnsupportedError):
        message = str(error)
        found = _ARGUMENT.match(message)
        argument = found[1] if found else None
        return APIError(400, message, (names or {}).get(argument or "", argument))
    return APIError(500, "the server failed; its log says more")


def short(found: Any) -> str:
    """Return what was found as an error shows it."""
    text = repr(found)
    return text if len(text) <= 80 else f"{text[:77]}..."
