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

__all__ = [
    "InternalError",
    "InvalidArgumentError",
    "NeverFitsError",
    "NotHeldError",
    "PagedKVError",
    "StateError",
    "UnknownIdError",
    "UnsupportedError",
]
