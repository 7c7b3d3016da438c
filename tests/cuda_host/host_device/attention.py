"""Attention as the package has it, computed by the kernels of `cuda/`."""

import math

import torch

from host_device.cache_operations import TYPES, layout, scales_of
from host_device.plans import plan_by_package, plan_for_kernel
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
    kernel=None,
    piece=None,
    all_features=None,
    spare_items=1,
):
    """Compute attention of a batch by one kernel, or by both, as the package cuts it, its keys at multiples of `piece`.

    The launches have blocks for `spare_items` more than there are, as a graph has that was captured for a larger batch.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    rows = torch.arange(len(seq_lens), dtype=torch.int32) if rows is None else rows
    features = (sliding_window, soft_cap, alibi_slopes, sinks, tree_mask)
    if all_features is None:
        all_features = any(feature is not None for feature in features)
    of_kernel = {
        name_of: make(name(q.dtype), name(k_cache.dtype), head_dim, features=all_features)
        for name_of, make in KERNELS.items()
    }
    batch_arrays, trees = (seq_lens, query_start_loc, rows), (tree_mask, tree_mask_start_loc)
    cut = {"group": group, "window": sliding_window, "piece": piece, "spare_items": spare_items}
    if kernel is None:
        table = (block_table.shape[0], block_table.shape[1] * block_size)
        sizes = {"num_tokens": num_tokens, "table": table, "num_kv_heads": num_kv_heads}
        max_rows = {name_of: variant.rows for name_of, variant in of_kernel.items()}
        plan = plan_by_package(batch_arrays, trees, **sizes, max_rows=max_rows, **cut)
    else:
        plan = plan_for_kernel(kernel, batch_arrays, trees, max_rows=of_kernel[kernel].rows, **cut)
    out = torch.full_like(q, math.nan) if out is None else out
    lse = torch.full((num_tokens, num_q_heads), math.nan)
    partial_out = torch.full((plan.num_partial_rows, num_kv_heads, head_dim), math.nan)
    partial_lse = torch.full((plan.num_partial_rows, num_kv_heads), math.nan)
    tensors = {
        "out": out,
        "lse": lse if return_lse else None,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "work": None,
        "merges": torch.from_numpy(plan.merges),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "tree_mask": None if tree_mask is None else torch.from_numpy(plan.tree_mask),
        "tree_depths": None if tree_mask is None else torch.from_numpy(plan.tree_depths),
    }
    options = {
        "sliding_window": sliding_window or 0,
        "softmax_scale": head_dim**-0.5 if softmax_scale is None else softmax_scale,
        "soft_cap": soft_cap or 0.0,
    }
    values = options | {"lse_token_stride": lse.stride(0)} | _shapes(tensors) | _types(tensors)
    writable = {"out", "lse", "partial_out", "partial_lse"}
    for name_of, words in plan.lists.items():
        grid = (int(words[0]) + spare_items) * num_kv_heads
        device.run(of_kernel[name_of], tensors | {"work": torch.from_numpy(words)}, values, writable, grid)
    if num_merges := int(plan.merges[0]):
        variant = variants.merge_partials(name(q.dtype))
        device.run(variant, tensors, values, {"out", "lse"}, (num_merges + spare_items) * num_kv_heads)
    return (out, lse) if return_lse else out


def _shapes(tensors):
    """Return the parameters that say where rows lie."""
    q, out, k_cache, v_cache = (tensors[array] for array in ("q", "out", "k_cache", "v_cache"))
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    return {
        "k_layout": layout(k_cache),
        "v_layout": layout(v_cache),
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "table_row_stride": tensors["block_table"].stride(0),
        "num_kv_heads": num_kv_heads,
        "group": q.shape[1] // num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "copy_bytes": copy_bytes(k_cache, v_cache),
    }


def _types(tensors):
    """Return the parameters that say what vectors of one number per head are."""
    vectors = {"slopes_type": tensors["alibi_slopes"], "sinks_type": tensors["sinks"]}
    types = {field: 0 if vector is None else TYPES[vector.dtype] for field, vector in vectors.items()}
    return scales_of(tensors["k_scale"], tensors["v_scale"]) | types


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
