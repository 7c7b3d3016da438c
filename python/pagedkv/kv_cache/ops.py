"""Cache operations on arrays of any origin; `_core` checks every argument before it writes."""

from typing import Any

from pagedkv import _core
from pagedkv.kv_cache import cuda
from pagedkv.kv_cache.device import runs_kernels
from pagedkv.kv_cache.memory import make_like


def append_kv(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *, k_scale: Any = None, v_scale: Any = None
) -> None:
    """Write keys and values of new tokens into their slots.

    Parameters
    ----------
    k, v : array, shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
        One row per token; converted where the cache is of another type.
    k_cache, v_cache : array, shape (num_blocks, num_kv_heads, block_size, head_dim)
        One layer of the cache, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; modified.
    slot_mapping : array, shape (num_tokens,), int64
        ``block * block_size + offset`` of each token; -1 is skipped. Where a slot comes twice, the later token wins.
        Slots that lie on a GPU are not looked at: one outside the cache writes anywhere, and of tokens that share one
        any wins.
    k_scale, v_scale : array, shape (1,) or (num_kv_heads,), float32, optional
        What keys and values are divided by before they are rounded to FP8, for all KV heads or each; 1 by default.
        What is too large then becomes the largest number of the type.

    Raises
    ------
    TypeError, InvalidArgumentError
        If shapes disagree, types are not supported, inputs overlap a cache, or a slot is outside it. Nothing is
        written then.

    Examples
    --------
    >>> import numpy as np
    >>> k, cache = np.ones((2, 1, 8), np.float32), np.zeros((2, 3, 1, 4, 8), np.float16)
    >>> append_kv(k, 2 * k, cache[0], cache[1], np.array([5, -1]))
    >>> np.argwhere(cache[1, :, 0, :, 0]).tolist()
    [[1, 1]]
    """
    backend = cuda if runs_kernels(k_cache) else _core
    backend.append_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def update_block_table(block_table: Any, table_updates: Any, num_blocks: int) -> None:
    """Write cells of a block table, as a plan asks for.

    Parameters
    ----------
    block_table : array, shape (num_groups, num_rows, max_blocks_per_seq), int32
        The table; modified.
    table_updates : array, shape (k, 4), int32
        Cache group, row, column and block. Where a cell comes twice, the later block stays.
    num_blocks : int
        Blocks of the pool.

    Raises
    ------
    TypeError, InvalidArgumentError
        If a cell is outside the table, or a block outside the pool. Nothing is written then.
    """
    backend = cuda if runs_kernels(block_table) else _core
    backend.update_block_table(block_table, table_updates, num_blocks)


def copy_blocks(pool: Any, pairs: Any) -> None:
    """Copy whole blocks over all layers.

    Parameters
    ----------
    pool : array, shape (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        The pool; modified.
    pairs : array, shape (k, 2), int32
        Source and destination blocks. A destination comes once and is no source.

    Raises
    ------
    TypeError, InvalidArgumentError
        If a block is outside the pool, or the outcome would depend on the order. Nothing is written then.

    Examples
    --------
    >>> import numpy as np
    >>> pool = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1, 1, 1).repeat(2, axis=2)
    >>> copy_blocks(pool, np.array([[3, 0]], np.int32))
    >>> pool[:, 0, 1, 0, 0, 0].tolist()
    [3.0, 1.0, 2.0, 3.0]
    """
    backend = cuda if runs_kernels(pool) else _core
    backend.copy_blocks(pool, pairs)


def move_kv(pool: Any, slot_moves: Any, group: int = 0) -> None:
    """Move single tokens over all layers, as the accepted path of a draft tree asks for.

    Parameters
    ----------
    pool : array, shape (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        The pool, or a cache group's view of it; modified.
    slot_moves : array, shape (k, 3), int64
        Cache group, source slot and destination slot, as `StepPlan.slot_moves` has them; a slot is
        ``block * block_size + offset``. A destination comes once. All sources are read before any destination is
        written.
    group : int
        The cache group to which the pool belongs; moves of others are passed over.

    Raises
    ------
    TypeError, InvalidArgumentError
        If a slot is outside the pool, or a destination comes twice. Nothing is written then.

    Examples
    --------
    >>> import numpy as np
    >>> pool = np.arange(4, dtype=np.float32).reshape(2, 1, 1, 1, 2, 1).repeat(2, axis=2)
    >>> move_kv(pool, np.array([[0, 2, 1], [0, 3, 2]]))
    >>> pool[:, 0, 1, 0, :, 0].ravel().tolist()
    [0.0, 2.0, 3.0, 3.0]
    """
    backend = cuda if runs_kernels(pool) else _core
    backend.move_kv(pool, slot_moves, group)


def swap_blocks(source: Any, destination: Any, pairs: Any) -> None:
    """Copy whole blocks over all layers from one pool to another, as to a host tier and back.

    Parameters
    ----------
    source, destination : array, shape (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        The pools, which share no memory; the destination is modified. They may differ in their number of blocks and in
        their strides.
    pairs : array, shape (k, 2), int32
        Source and destination blocks. A destination comes once.

    Raises
    ------
    TypeError, InvalidArgumentError
        If the pools differ in element type or in the shape of a block, keys are packed in one of the two, or a block is
        outside its pool. Nothing is written then.

    Notes
    -----
    With a GPU copies are made in the order of the current stream; the host need not wait for them where its memory is
    page-locked.

    Examples
    --------
    >>> import numpy as np
    >>> device = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1, 1, 1).repeat(2, axis=2)
    >>> host = np.zeros_like(device[:2])
    >>> swap_blocks(device, host, np.array([[3, 0]], np.int32))
    >>> host[:, 0, 1, 0, 0, 0].tolist()
    [3.0, 0.0]
    """
    backend = cuda if runs_kernels(source) or runs_kernels(destination) else _core
    backend.swap_blocks(source, destination, pairs)


def gather_kv(
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    rows: Any = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """Collect the keys and values of whole sequences, one sequence after another.

    Parameters
    ----------
    k_cache, v_cache : array, shape (num_blocks, num_kv_heads, block_size, head_dim)
        One layer of the cache: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
    block_table : array, shape (num_rows, max_blocks_per_seq), int32
        Block ids; entries beyond a sequence's length are never read.
    seq_lens : array, shape (num_seqs,), int32
        How many tokens of each sequence.
    rows : array, shape (num_seqs,), int32, optional
        The row of the table of each sequence; by default sequence ``s`` has row ``s``.
    k_scale, v_scale : array, shape (1,) or (num_kv_heads,), float32, optional
        What stored FP8 keys and values are multiplied by, for all KV heads or each; 1 by default. Not where `out` is
        FP8.
    out : pair of arrays, shape (sum(seq_lens), num_kv_heads, head_dim), optional
        Where to write; converted where it is of another type. FP8 takes what FP8 of the same type holds, as it is. By
        default arrays like the caches are made.

    Returns
    -------
    k, v : array, shape (sum(seq_lens), num_kv_heads, head_dim)
        The copies.

    Raises
    ------
    TypeError, InvalidArgumentError
        If shapes disagree, types are not supported, a scale has no FP8 to turn into numbers, or a length or block
        points outside. Nothing is written then.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.arange(6, dtype=np.float32).reshape(3, 1, 2, 1)
    >>> k, v = gather_kv(cache, cache, np.array([[2, 1]], np.int32), np.array([3], np.int32))
    >>> k.ravel().tolist()
    [4.0, 5.0, 2.0]
    """
    if runs_kernels(k_cache):
        return cuda.gather_kv(k_cache, v_cache, block_table, seq_lens, rows, k_scale=k_scale, v_scale=v_scale, out=out)
    if out is None:
        num_tokens = _core.num_gathered_tokens(k_cache, block_table, seq_lens, rows)
        shape = (num_tokens, *_core.from_dlpack(k_cache, argument="k_cache").shape[1::2])
        out = (make_like("out", k_cache, shape), make_like("out", v_cache, shape))
    k_out, v_out = out
    _core.gather_kv(k_cache, v_cache, block_table, seq_lens, k_out, v_out, rows, k_scale=k_scale, v_scale=v_scale)
    return k_out, v_out
