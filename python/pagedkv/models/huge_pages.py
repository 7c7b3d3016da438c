"""Weights in huge pages: a product that reads hundreds of small ones spends half of its time on their addresses."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

_HUGE_PAGE = 1 << 21
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1; Python's mmap does not name it


def use_huge_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Ask the kernel to back memory with huge pages, at once where it can do that.

    What is there stays. Where the kernel has no huge pages, or none left, nothing happens.

    Parameters
    ----------
    spans : iterable of (address, number of bytes)
        Memory of this process; pages that they only begin or end in are asked for as well.
    """
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    pages = {page for start, size in spans for page in range(start // _HUGE_PAGE, -(-(start + size) // _HUGE_PAGE))}
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):
        for page in sorted(pages):
            madvise(page * _HUGE_PAGE, _HUGE_PAGE, advice)
