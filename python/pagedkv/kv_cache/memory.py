"""Makes arrays by the library that the caller uses, without importing one that it does not."""

import contextlib
import math
import mmap
import sys
from typing import Any

import numpy as np

# What a cache may hold, and the bytes of an element.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# NumPy has neither bfloat16 nor FP8; their bits travel as unsigned integers.
_NUMPY_DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
}

_HUGE_PAGE_BYTES = 2 << 20


def make_blocks(
    backend: str, shape: tuple[int, ...], dtype: str, device: str = "cpu", *, page_locked: bool = False
) -> Any:
    """Make memory for keys and values; what it holds is left to chance."""
    if backend == "numpy":
        return np.empty(shape, _NUMPY_DTYPES[dtype])
    import torch

    if device != "cpu" or page_locked:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device, pin_memory=page_locked)
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(_map_huge_pages(num_bytes), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)


def _map_huge_pages(num_bytes: int) -> mmap.mmap:
    """Map memory for which the kernel is asked to use huge pages: NumPy asks by itself, torch does not.

    Blocks lie anywhere, so with small pages nearly every block that attention reads misses the address cache.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel built without them refuses: small pages do the same, slower.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def make_pool(
    backend: str, shape: tuple[int, ...], dtype: str, layout: str, device: str = "cpu", *, page_locked: bool = False
) -> Any:
    """Make memory for blocks, with the layers outermost if the layout says so."""
    if layout == "block":
        return make_blocks(backend, shape, dtype, device, page_locked=page_locked)
    num_blocks, num_layer_slots, *rest = shape
    by_layer = (num_layer_slots, num_blocks, *rest)
    return make_blocks(backend, by_layer, dtype, device, page_locked=page_locked).swapaxes(0, 1)


def make_table(backend: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
    """Make a block table in which every entry is the null block."""
    if backend == "numpy":
        return np.zeros(shape, np.int32)
    import torch

    return torch.zeros(shape, dtype=torch.int32, device=device)


def make_like(argument: str, array: Any, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> Any:
    """Make an output in the library of an input, of its shape and element type where none are given."""
    torch = _torch()
    if torch is not None and isinstance(array, torch.Tensor):
        torch_dtype = array.dtype if dtype is None else getattr(torch, dtype)
        return torch.empty(array.shape if shape is None else shape, dtype=torch_dtype, device=array.device)
    if isinstance(array, np.ndarray):
        return np.empty(array.shape if shape is None else shape, array.dtype if dtype is None else dtype)
    raise TypeError(f"{argument}: expected an array to write to, as none is made like a {type(array).__name__}")


def reinterpret(array: Any, sizes: tuple[int, ...], dtype: str) -> Any:
    """Return a view of an array of torch or NumPy whose dimensions from the third on, one span, have other sizes."""
    outer = tuple(array.shape[:2])
    if isinstance(array, np.ndarray):
        return array.reshape((*outer, -1)).view(_NUMPY_DTYPES[dtype]).reshape((*outer, *sizes))
    import torch

    return array.view(*outer, -1).view(getattr(torch, dtype)).view(*outer, *sizes)


def is_sliceable(array: Any) -> bool:
    """Whether views of an array are made by indexing it."""
    torch = _torch()
    return isinstance(array, np.ndarray) or (torch is not None and isinstance(array, torch.Tensor))


def _torch() -> Any:
    return sys.modules.get("torch")
