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


class KernelNotCompiledError(StateError):
    """A kernel for a GPU is not there yet, and must not be compiled or loaded now; `pagedkv warmup` compiles them."""


class QueueFullError(StateError):
    """More requests wait than an engine was told to keep."""


__all__ = [
    "EngineDeadError",
    "InternalError",
    "InvalidArgumentError",
    "KernelNotCompiledError",
    "NeverFitsError",
    "NotHeldError",
    "PagedKVError",
    "QueueFullError",
    "StateError",
    "UnknownIdError",
    "UnsupportedError",
]
