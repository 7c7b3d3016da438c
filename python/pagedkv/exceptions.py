"""Every exception of the package. "No room now" is none of them: that is a return value."""

from pagedkv._core import (
    InternalError,
    InvalidArgumentError,
    NeverFitsError,
    NotHeldError,
    PagedKVError,
    StateError,
    UnknownIdError,
    UnsupportedError,
)


class EngineDeadError(StateError):
    """A step of an engine failed, and it runs no requests any more; the cause is chained."""


class QueueFullError(StateError):
    """More requests wait than an engine was told to keep."""


__all__ = [
    "EngineDeadError",
    "InternalError",
    "InvalidArgumentError",
    "NeverFitsError",
    "NotHeldError",
    "PagedKVError",
    "QueueFullError",
    "StateError",
    "UnknownIdError",
    "UnsupportedError",
]
