"""Attention on the CPU: makes the outputs and calls `_core`, which checks every argument."""

import sys
from typing import Any

import numpy as np

from pagedkv import _core


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    rows: Any,
    *,
    softmax_scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    out: Any,
    return_lse: bool,
) -> Any:
    """Compute attention; see `pagedkv.paged_attention`."""
    if out is None:
        out = _like(q)
    lse = _lse_like(q) if return_lse else None
    _core.paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        rows=rows,
        lse=lse,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    return (out, lse) if return_lse else out


def _like(q: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if isinstance(q, np.ndarray):
        return np.empty(q.shape, q.dtype)
    raise TypeError(f"out: expected an array, because q is neither torch's nor NumPy's, found None and {type(q)}")


def _lse_like(q: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return np.empty(q.shape[:2], np.float32)
