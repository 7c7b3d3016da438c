"""Launches `copy_blocks`: copies whole blocks within a pool."""

import functools
import math
from typing import TYPE_CHECKING

from pagedkv.exceptions import UnsupportedError
from pagedkv.kernels import variants
from pagedkv.kernels.checked import Parameters
from pagedkv.kernels.dims import strides
from pagedkv.kernels.launch import launcher_of, run

if TYPE_CHECKING:
    import torch

_WRITTEN = frozenset({"cache"})
_LOADS = 8  # of a thread, as in the kernel
_copying = functools.cache(variants.copying)


def copy_blocks(pool: "torch.Tensor", copies: "torch.Tensor") -> None:
    """Copy whole blocks over all layers.

    Parameters
    ----------
    pool : torch.Tensor, shape (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        The pool; modified. A block is one span of memory, or one per layer.
    copies : torch.Tensor, shape (num_copies, 2), int32, contiguous
        Source and destination, on the pool's device; not looked at. A destination comes once and is no source.

    Raises
    ------
    UnsupportedError
        If what a layer has of a block is not one span.
    """
    num_copies = len(copies)
    if num_copies == 0 or pool.numel() == 0:
        return
    num_spans, span_size = _spans(pool)
    element_bytes = pool.element_size()
    block_stride, span_stride = strides(pool)[:2]
    whole = (16, pool.data_ptr(), *(size * element_bytes for size in (span_size, block_stride, span_stride)))
    variant = _copying("copy_blocks", variants.widest_vector(math.gcd(*whole), element_bytes))
    chunk_bytes = variant.threads * _LOADS * int(variant.macros["PKV_VECTOR_BYTES"])
    chunks = -(-span_size * element_bytes // chunk_bytes)
    values = {
        "span_size": span_size,
        "num_copies": num_copies,
        "num_spans": num_spans,
        "block_stride": block_stride,
        "span_stride": span_stride,
        "element_bytes": element_bytes,
        "unused": 0,
    }
    arrays = {"cache": pool, "copies": copies}
    params = Parameters("copy_blocks", values, [], [])
    run(launcher_of(pool.device), variant, params, arrays, _WRITTEN, num_copies * num_spans * chunks)


def _spans(pool: "torch.Tensor") -> tuple[int, int]:
    """Return how many spans a block has, and the elements of one."""
    if pool[0].is_contiguous():
        return 1, pool[0].numel()
    if pool[0, 0].is_contiguous():
        return pool.shape[1], pool[0, 0].numel()
    raise UnsupportedError(
        f"pool: expected blocks whose layers are one span of memory each on a GPU, found strides {pool.stride()}"
    )
