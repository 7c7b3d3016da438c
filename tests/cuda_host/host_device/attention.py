"""Attention of the package, launched on the host: as the package cuts a batch, or as a test wants it cut."""

import math

import numpy as np
import torch

import pagedkv.attention
from host_device.plans import plan_for_kernel
from pagedkv.attention import PagedAttention
from pagedkv.kernels.paged_attention import LayerOptions, WorkLists, attend, rows_per_item

OF_PLAN = ("tree_mask", "tree_mask_start_loc")


def paged_attention(device, *arrays, kernel=None, piece=None, spare_items=1, out=None, return_lse=False, **options):
    """Compute attention of a batch as the package cuts it, its keys at multiples of `piece`; or by one kernel.

    Then launches have blocks for `spare_items` more than there are, as a graph that was captured for a larger batch.
    """
    q = arrays[0]
    out = torch.full_like(q, math.nan) if out is None else out
    with device.in_place_of_gpu():
        if kernel is not None:
            lse = torch.full(q.shape[:2], math.nan, device=q.device) if return_lse else None
            _by_kernel(kernel, arrays, out, lse, piece, spare_items, options)
            return (out, lse) if return_lse else out
        if piece is None:
            return pagedkv.attention.paged_attention(*arrays, out=out, return_lse=return_lse, **options)
        _, num_kv_heads, block_size, head_dim = arrays[1].shape
        sizes = (q.shape[1], num_kv_heads, head_dim, block_size)
        attention = PagedAttention(*sizes, sliding_window=options.pop("sliding_window", None), split_keys=piece)
        attention.plan(*arrays[3:], **{name: options.pop(name) for name in OF_PLAN if name in options})
        return attention.run(*arrays[:3], out=out, return_lse=return_lse, **options)


def _by_kernel(kernel, arrays, out, lse, piece, spare_items, options):
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, *rows = arrays
    rows = rows[0] if rows and rows[0] is not None else torch.arange(len(seq_lens), dtype=torch.int32)
    trees = tuple(options.pop(name, None) for name in OF_PLAN)
    plan = plan_for_kernel(
        kernel,
        (seq_lens, query_start_loc, rows),
        trees,
        group=q.shape[1] // k_cache.shape[1],
        max_rows=rows_of_item(kernel, q.shape[2]),
        piece=piece,
        window=options.get("sliding_window"),
        spare_items=spare_items,
    )
    nothing = np.zeros(4, np.int32)
    lists = [plan.lists[name] if name == kernel else nothing for name in KERNELS] + [plan.merges]
    counts = [int(words[0]) + (spare_items if int(words[0]) else 0) for words in lists]
    of_trees = [None, None] if trees[0] is None else [plan.tree_mask, plan.tree_depths]
    lists, of_trees = (
        [None if words is None else torch.from_numpy(words).to(q.device) for words in part]
        for part in (lists, of_trees)
    )
    lists = WorkLists(*lists, *counts, *of_trees, plan.num_partial_rows)
    attend(lists, q, k_cache, v_cache, block_table, out, lse, LayerOptions(**options))


KERNELS = ("paged_decode", "paged_prefill")


def rows_of_item(kernel, head_dim):
    """Return the query rows of a work item."""
    return dict(zip(KERNELS, rows_per_item(head_dim), strict=True))[kernel]


def merge_states(device, *states):
    """Join the results of two attentions of the same queries over different keys."""
    with device.in_place_of_gpu():
        return pagedkv.attention.merge_states(*states)
