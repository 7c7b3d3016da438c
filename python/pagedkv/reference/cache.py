"""Cache operations, one token or one block at a time."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def append_kv(k: Array, v: Array, k_cache: Array, v_cache: Array, slot_mapping: Array) -> None:
    """Write keys and values of new tokens into their slots.

    Parameters
    ----------
    k, v : ndarray, shape (num_tokens, num_kv_heads, head_dim)
        One row per token.
    k_cache, v_cache : ndarray, shape (num_blocks, num_kv_heads, block_size, head_dim)
        One layer of the cache; modified.
    slot_mapping : ndarray, shape (num_tokens,)
        ``block * block_size + offset`` of each token; -1 is skipped.

    Examples
    --------
    >>> k, cache = np.ones((2, 1, 8)), np.zeros((3, 1, 4, 8))
    >>> append_kv(k, k, cache, cache, np.array([5, -1]))
    >>> np.argwhere(cache[:, 0, :, 0]).tolist()
    [[1, 1]]
    """
    block_size = k_cache.shape[2]
    for token, slot in enumerate(slot_mapping):
        if slot == -1:
            continue
        block, offset = divmod(int(slot), block_size)
        k_cache[block, :, offset] = k[token]
        v_cache[block, :, offset] = v[token]


def copy_blocks(pool: Array, pairs: Array) -> None:
    """Copy whole blocks over all layers.

    Parameters
    ----------
    pool : ndarray, shape (num_blocks, ...)
        The pool; modified.
    pairs : ndarray, shape (k, 2)
        Source and destination blocks.

    Examples
    --------
    >>> pool = np.arange(4.0)
    >>> copy_blocks(pool, np.array([[3, 0]]))
    >>> pool.tolist()
    [3.0, 1.0, 2.0, 3.0]
    """
    for source, destination in pairs:
        pool[destination] = pool[source]


def move_kv(pool: Array, slot_moves: Array, group: int = 0) -> None:
    """Move single tokens over all layers; all sources are read before any destination is written.

    Parameters
    ----------
    pool : ndarray, shape (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        The pool; modified.
    slot_moves : ndarray, shape (k, 3)
        Cache group, source slot and destination slot.
    group : int
        Moves of other groups are passed over.

    Examples
    --------
    >>> pool = np.arange(4.0).reshape(2, 1, 1, 1, 2, 1)
    >>> move_kv(pool, np.array([[0, 2, 1], [0, 3, 2], [1, 0, 3]]))
    >>> pool.ravel().tolist()
    [0.0, 2.0, 3.0, 3.0]
    """
    block_size = pool.shape[4]
    moves = [(source, destination) for of, source, destination in slot_moves if of == group]
    read = [pool[source // block_size, ..., source % block_size, :].copy() for source, _ in moves]
    for (_, destination), token in zip(moves, read, strict=True):
        pool[destination // block_size, ..., destination % block_size, :] = token


def swap_blocks(source: Array, destination: Array, pairs: Array) -> None:
    """Copy whole blocks over all layers from one pool to another.

    Parameters
    ----------
    source, destination : ndarray, shape (num_blocks, ...)
        The pools; the destination is modified.
    pairs : ndarray, shape (k, 2)
        Source and destination blocks.

    Examples
    --------
    >>> device, host = np.arange(4.0), np.zeros(2)
    >>> swap_blocks(device, host, np.array([[3, 0]]))
    >>> host.tolist()
    [3.0, 0.0]
    """
    for block, target in pairs:
        destination[target] = source[block]


def gather_kv(
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    rows: Array | None = None,
    *,
    k_scale: Array | float = 1.0,
    v_scale: Array | float = 1.0,
) -> tuple[Array, Array]:
    """Collect the keys and values of whole sequences, one sequence after another.

    Parameters
    ----------
    k_cache, v_cache : ndarray, shape (num_blocks, num_kv_heads, block_size, head_dim)
        One layer of the cache.
    block_table : ndarray, shape (num_rows, max_blocks_per_seq)
        Block ids.
    seq_lens : ndarray, shape (num_seqs,)
        How many tokens of each sequence.
    rows : ndarray, shape (num_seqs,), optional
        The row of the table of each sequence; by default sequence ``s`` has row ``s``.
    k_scale, v_scale : float or ndarray, shape (1,) or (num_kv_heads,)
        What stored keys and values are multiplied by, for all KV heads or each.

    Returns
    -------
    k, v : ndarray, shape (sum(seq_lens), num_kv_heads, head_dim)
        Copies.

    Examples
    --------
    >>> cache = np.arange(6.0).reshape(3, 1, 2, 1)
    >>> gather_kv(cache, cache, np.array([[2, 1]]), np.array([3]))[0].ravel().tolist()
    [4.0, 5.0, 2.0]
    """
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    k = np.empty((int(np.sum(seq_lens)), num_kv_heads, head_dim), k_cache.dtype)
    v = np.empty_like(k, dtype=v_cache.dtype)
    token = 0
    for sequence, length in enumerate(seq_lens):
        row = block_table[sequence if rows is None else rows[sequence]]
        for position in range(int(length)):
            block, offset = row[position // block_size], position % block_size
            k[token] = k_cache[block, :, offset]
            v[token] = v_cache[block, :, offset]
            token += 1
    return k * _of_heads(k_scale, k.dtype), v * _of_heads(v_scale, v.dtype)


def _of_heads(scale: Array | float, dtype: Any) -> Array:
    return np.reshape(np.asarray(scale, dtype), (-1, 1))
