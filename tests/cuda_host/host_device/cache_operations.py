"""The cache operations of the package, computed by the kernels of `cuda/`."""

import math

import torch

from host_device.device import widest_vector
from pagedkv.kernels import variants

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}


def layout(cache):
    """Return the strides of one layer's keys or values: of a block, a head and a slot."""
    block, head, slot, _ = cache.stride()
    return block, head, slot


def row_variant(kernel, *tensors):
    """Return the variant that moves rows of head_dim elements: as they are where all tensors have one type."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return variants.copying(kernel, widest_vector(*tensors))
    elements = math.gcd(*(size for tensor in tensors for size in (*tensor.stride()[:-1], tensor.shape[-1])))
    aligned = all(tensor.data_ptr() % min(16, 8 * tensor.element_size()) == 0 for tensor in tensors)
    return variants.converting(kernel, 8 if elements % 8 == 0 and aligned else 1)


def scales_of(k_scale, v_scale):
    """Return the strides of scales: 0 where one serves all heads."""
    strides = [int(scale is not None and len(scale) > 1) for scale in (k_scale, v_scale)]
    return dict(zip(("k_scale_stride", "v_scale_stride"), strides, strict=True))


def _cache_values(k_cache, v_cache, k_scale, v_scale):
    """Return the parameters that say what caches are like."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    return scales_of(k_scale, v_scale) | {
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "cache_type": TYPES[k_cache.dtype],
        "k_layout": layout(k_cache),
        "v_layout": layout(v_cache),
    }


def append_kv(device, k, v, k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None):
    """Write keys and values of new tokens into their slots."""
    num_tokens = len(k)
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "key": k, "value": v, "slot_mapping": slot_mapping}
    device.run(
        row_variant("append_kv", k_cache, v_cache, k, v),
        tensors | {"k_scale": k_scale, "v_scale": v_scale},
        {
            **_cache_values(k_cache, v_cache, k_scale, v_scale),
            "num_tokens": num_tokens,
            "input_type": TYPES[k.dtype],
            "key_token_stride": k.stride(0),
            "key_head_stride": k.stride(1),
            "value_token_stride": v.stride(0),
            "value_head_stride": v.stride(1),
        },
        writable={"k_cache", "v_cache"},
        grid=max(num_tokens, 1),
    )


def gather_kv(device, k_cache, v_cache, block_table, seq_lens, rows=None, *, k_scale=None, v_scale=None, out=None):
    """Collect the keys and values of whole sequences."""
    _, num_kv_heads, _, head_dim = k_cache.shape
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), seq_lens.cumsum(0, dtype=torch.int32)])
    num_tokens = int(starts[-1])
    if out is None:
        out = [torch.empty(num_tokens, num_kv_heads, head_dim, dtype=k_cache.dtype) for _ in range(2)]
    k_out, v_out = out
    tensors = {"k_out": k_out, "v_out": v_out, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
    device.run(
        row_variant("gather_kv", k_out, v_out, k_cache, v_cache),
        tensors | {"token_starts": starts, "rows": rows, "k_scale": k_scale, "v_scale": v_scale},
        {
            **_cache_values(k_cache, v_cache, k_scale, v_scale),
            "num_tokens": num_tokens,
            "num_seqs": len(seq_lens),
            "out_type": TYPES[k_out.dtype],
            "unused": 0,
            "k_token_stride": k_out.stride(0),
            "k_head_stride": k_out.stride(1),
            "v_token_stride": v_out.stride(0),
            "v_head_stride": v_out.stride(1),
            "table_row_stride": block_table.stride(0),
        },
        writable={"k_out", "v_out"},
        grid=max(num_tokens, 1),
    )
    return k_out, v_out


def copy_blocks(device, pool, pairs):
    """Copy whole blocks over all layers of a pool whose blocks are one span, or one per layer."""
    num_layers = pool.shape[1]
    whole = pool[0].is_contiguous()
    span_size = pool[0].numel() if whole else pool[0, 0].numel()
    num_spans = 1 if whole else num_layers
    width = variants.widest_vector(span_size * pool.element_size(), pool.element_size())
    chunks = -(-span_size * pool.element_size() // (width * 256 * 8))
    device.run(
        variants.copying("copy_blocks", width),
        {"cache": pool, "copies": pairs},
        {
            "span_size": span_size,
            "num_copies": len(pairs),
            "num_spans": num_spans,
            "block_stride": pool.stride(0),
            "span_stride": pool.stride(1),
            "element_bytes": pool.element_size(),
            "unused": 0,
        },
        writable={"cache"},
        grid=max(len(pairs) * num_spans * chunks, 1),
    )


def move_kv(device, pool, slot_moves, group=0):
    """Move single tokens over all layers."""
    _, num_layers, sides, num_kv_heads, block_size, head_dim = pool.shape
    width = widest_vector(pool)
    vectors = num_layers * sides * num_kv_heads * head_dim * pool.element_size() // width
    device.run(
        variants.copying("move_kv", width),
        {"cache": pool, "slot_moves": slot_moves},
        {
            "num_moves": len(slot_moves),
            "group": group,
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "block_size": block_size,
            "head_dim": head_dim,
            "layout": layout(pool[:, 0, 0]),
            "layer_stride": pool.stride(1),
            "side_stride": pool.stride(2),
            "element_bytes": pool.element_size(),
            "unused": 0,
        },
        writable={"cache"},
        grid=-(-vectors // 128),
    )
