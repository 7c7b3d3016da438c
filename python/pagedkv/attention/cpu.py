"""Attention on the CPU: makes the outputs and calls `_core`, which checks every argument."""

from typing import Any

from pagedkv import _core
from pagedkv.kv_cache.memory import make_like


def instruction_sets() -> list[str]:
    """Return the names of the instruction sets that this processor has and attention can use, the best one last.

    The environment variable `PAGEDKV_CPU_ISA` forces one of them.

    Returns
    -------
    list of str
        Of ``scalar``, ``avx2``, ``avx512`` and ``avx512_bf16``.

    Examples
    --------
    >>> instruction_sets()[0]
    'scalar'
    """
    return _core.instruction_sets()


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
    alibi_slopes: Any,
    sinks: Any,
    k_scale: Any,
    v_scale: Any,
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
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=tree_mask,
        tree_mask_start_loc=tree_mask_start_loc,
    )
    return (out, lse) if return_lse else out


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    """Join two results; see `pagedkv.attention.merge_states`."""
    out = make_like("out_a", out_a)
    lse = make_like("lse_a", lse_a)
    _core.merge_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse
