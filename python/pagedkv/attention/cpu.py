"""Attention on the CPU: makes the outputs and calls `_core`, which checks every argument."""

from typing import Any

from pagedkv import _core
from pagedkv.kv_cache.memory import make_like


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
    sinks: Any,
    tree_mask: Any,
    tree_mask_start_loc: Any,
    out: Any,
    return_lse: bool,
) -> Any:
    """Compute attention; see `pagedkv.paged_attention`."""
    if out is None:
        out = make_like("out", q)
    lse = make_like("lse", out, out.shape[:2], "float32") if return_lse else None
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
        sinks=sinks,
        tree_mask=tree_mask,
        tree_mask_start_loc=tree_mask_start_loc,
    )
    return (out, lse) if return_lse else out
