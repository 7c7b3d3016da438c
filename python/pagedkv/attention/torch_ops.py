"""Operations for `torch.compile`: they take the whole pool and a layer's number, and slice inside.

Importing this module registers them as ``torch.ops.pagedkv.append_kv`` and ``torch.ops.pagedkv.paged_attention``. A
compiler that is handed views of single layers copies the cache to be safe; handed the pool, which `append_kv` declares
to change, it copies nothing.
"""

from typing import Any

import torch

from pagedkv import _core
from pagedkv.attention import cuda
from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kv_cache.device import runs_kernels
from pagedkv.kv_cache.ops import append_kv as append_to_layer

_POOL_SHAPE = "(num_blocks, num_layer_slots, 2, num_kv_heads, block_size, head_dim)"


@torch.library.custom_op("pagedkv::append_kv", mutates_args=("pool",), device_types=("cpu", "cuda"))
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write keys and values of new tokens into their slots of one layer.

    Parameters
    ----------
    k, v : torch.Tensor, shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
        One row per token; converted where the pool is of another type.
    pool : torch.Tensor, shape (num_blocks, num_layer_slots, 2, num_kv_heads, block_size, head_dim)
        All layers, `KVCache.pool`; modified.
    layer : int
        The layer's place in a block, from 0: its number where all layers are in one cache group.
    slot_mapping : torch.Tensor, shape (num_tokens,), int64
        ``block * block_size + offset`` of each token; -1 is skipped.
    k_scale, v_scale : torch.Tensor, shape (1,) or (num_kv_heads,), float32, optional
        What keys and values are divided by before they are rounded to FP8.

    Raises
    ------
    TypeError, InvalidArgumentError
        If there is no such layer, or as `pagedkv.kv_cache.append_kv`. Nothing is written then.
    """
    scales = {"k_scale": _plain(k_scale), "v_scale": _plain(v_scale)}
    append_to_layer(k, v, *_layer(pool, layer), slot_mapping, **scales)


@append_kv.register_fake
def _(*_args: Any, **_options: Any) -> None:
    return None


@torch.library.custom_op("pagedkv::paged_attention", mutates_args=(), device_types=("cpu", "cuda"))
def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: torch.Tensor,
    softmax_scale: float | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the attention of one layer of a planned batch.

    Parameters
    ----------
    q : torch.Tensor, shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
        Queries, sequence after sequence; those behind the last sequence belong to none and give 0.
    pool : torch.Tensor, shape (num_blocks, num_layer_slots, 2, num_kv_heads, block_size, head_dim)
        All layers, `KVCache.pool`.
    layer : int
        The layer's place in a block, from 0: its number where all layers are in one cache group.
    plan : torch.Tensor, shape (num_words,), int32
        The batch, as `PagedAttention.pack` returns it.
    softmax_scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale
        As for `pagedkv.paged_attention`.

    Returns
    -------
    torch.Tensor, shape (num_tokens, num_q_heads, head_dim)
        The result, contiguous and of the type of `q`.

    Raises
    ------
    TypeError, InvalidArgumentError
        If there is no such layer, `plan` is no plan or one for other shapes, or as `PagedAttention.run`.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_cache, v_cache = _layer(pool, layer)
    queries: Any = q
    planned: Any
    if runs_kernels(q):
        planned = cuda.unpack(plan)
    else:
        queries = _core.from_dlpack(q, argument="q")
        planned = _core.AttentionPlan.unpack(plan, queries, k_cache)
    planned.run(
        queries,
        k_cache,
        v_cache,
        out,
        softmax_scale=softmax_scale,
        soft_cap=soft_cap,
        alibi_slopes=_plain(alibi_slopes),
        sinks=_plain(sinks),
        k_scale=_plain(k_scale),
        v_scale=_plain(v_scale),
    )
    return out


@paged_attention.register_fake
def _(q: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _layer(pool: torch.Tensor, layer: int) -> tuple[Any, Any]:
    if pool.ndim != _POOL_SHAPE.count(",") + 1 or pool.shape[2] != 2:
        raise InvalidArgumentError(f"pool: expected shape {_POOL_SHAPE}, found {tuple(pool.shape)}")
    if not 0 <= layer < pool.shape[1]:
        raise InvalidArgumentError(f"layer: expected 0 to {pool.shape[1] - 1}, found {layer}")
    if runs_kernels(pool):
        return pool[:, layer, 0], pool[:, layer, 1]
    both = _core.from_dlpack(pool, argument="pool").select(1, layer)
    return both.select(1, 0), both.select(1, 1)


def _plain(values: torch.Tensor | None) -> torch.Tensor | None:
    """Return values without a gradient: a learned parameter keeps its flag in inference mode."""
    return None if values is None else values.detach()
