"""Attention as the package has it, computed by the kernels of `cuda/`."""

import math

import numpy as np
import torch

from host_device.cache_operations import TYPES, layout
from host_device.plans import make_trees, make_work
from pagedkv.kernels import variants


def paged_attention(
    device,
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    query_start_loc,
    rows=None,
    *,
    softmax_scale=None,
    sliding_window=None,
    soft_cap=None,
    alibi_slopes=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
    tree_mask=None,
    tree_mask_start_loc=None,
    out=None,
    return_lse=False,
    kernel="paged_decode",
    piece=None,
    all_features=None,
    spare_items=1,
):
    """Compute attention of a batch by one kernel, its keys cut into pieces of `piece` where that is given.

    The launch has blocks for `spare_items` more than there are, as a graph has that was captured for a larger batch.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    rows = torch.arange(len(seq_lens), dtype=torch.int32) if rows is None else rows
    trees = None if tree_mask is None else make_trees(tree_mask, tree_mask_start_loc, query_start_loc)
    features = (sliding_window, soft_cap, alibi_slopes, sinks, trees)
    if all_features is None:
        all_features = any(feature is not None for feature in features)
    variant = KERNELS[kernel](name(q.dtype), name(k_cache.dtype), head_dim, features=all_features)
    work = make_work(
        (seq_lens, query_start_loc, rows),
        group=group,
        max_rows=variant.rows,
        piece=piece,
        trees=trees,
        window=sliding_window,
        spare_items=spare_items,
    )
    out = torch.full_like(q, math.nan) if out is None else out
    lse = torch.full((num_tokens, num_q_heads), math.nan)
    partial_out = torch.full((work.num_partial_rows, num_kv_heads, head_dim), math.nan)
    partial_lse = torch.full((work.num_partial_rows, num_kv_heads), math.nan)
    tensors = {
        "out": out,
        "lse": lse if return_lse else None,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "work": torch.from_numpy(work.work),
        "merges": torch.from_numpy(work.merges),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "tree_mask": None if trees is None else torch.from_numpy(trees.words.view(np.int32)),
        "tree_depths": None if trees is None else torch.from_numpy(trees.depths),
    }
    values = {
        "k_layout": layout(k_cache),
        "v_layout": layout(v_cache),
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "lse_token_stride": lse.stride(0),
        "table_row_stride": block_table.stride(0),
        "num_kv_heads": num_kv_heads,
        "group": group,
        "head_dim": head_dim,
        "block_size": block_size,
        "k_scale_stride": int(k_scale is not None and len(k_scale) > 1),
        "v_scale_stride": int(v_scale is not None and len(v_scale) > 1),
        "slopes_type": 0 if alibi_slopes is None else TYPES[alibi_slopes.dtype],
        "sinks_type": 0 if sinks is None else TYPES[sinks.dtype],
        "sliding_window": sliding_window or 0,
        "copy_bytes": copy_bytes(k_cache, v_cache),
        "softmax_scale": head_dim**-0.5 if softmax_scale is None else softmax_scale,
        "soft_cap": soft_cap or 0.0,
    }
    writable = {"out", "lse", "partial_out", "partial_lse"}
    device.run(variant, tensors, values, writable, (work.num_items + spare_items) * num_kv_heads)
    if work.num_merges:
        variant = variants.merge_partials(name(q.dtype))
        device.run(
            variant, tensors, values, {"out", "lse"}, (work.num_merges + spare_items) * num_kv_heads
        )
    return (out, lse) if return_lse else out


def copy_bytes(*caches):
    """Return the bytes, 16 or 8, that divide all addresses and strides of the caches."""
    whole = [cache.data_ptr() for cache in caches]
    whole += [stride * cache.element_size() for cache in caches for stride in cache.stride()[:-1]]
    return 16 if math.gcd(*whole) % 16 == 0 else 8


def name(dtype):
    """Return the name of a torch element type."""
    return str(dtype).removeprefix("torch.")


KERNELS = {"paged_decode": variants.paged_decode, "paged_prefill": variants.paged_prefill}


def rows_of_item(kernel, head_dim):
    """Return the query rows of a work item."""
    return KERNELS[kernel]("float16", "float16", head_dim, features=False).rows


def merge_states(device, out_a, lse_a, out_b, lse_b):
    """Join the results of two attentions of the same queries over different keys."""
    num_tokens, num_q_heads, head_dim = out_a.shape
    out, lse = torch.full_like(out_a, math.nan), torch.full_like(lse_a, math.nan)
    tensors = {"out": out, "lse": lse, "out_a": out_a, "out_b": out_b, "lse_a": lse_a, "lse_b": lse_b}
    values = {"num_tokens": num_tokens, "num_q_heads": num_q_heads, "head_dim": head_dim}
    values["type"] = TYPES[out_a.dtype]
    for prefix, of in (("out", out), ("a", out_a), ("b", out_b)):
        values |= {f"{prefix}_token_stride": of.stride(0), f"{prefix}_head_stride": of.stride(1)}
    for prefix, of in (("lse", lse), ("lse_a", lse_a), ("lse_b", lse_b)):
        values[f"{prefix}_token_stride"] = of.stride(0)
    blocks = num_tokens * -(-num_q_heads * head_dim // 8 // 128)
    device.run(variants.merge_states(), tensors, values, {"out", "lse"}, max(blocks, 1))
    return out, lse
