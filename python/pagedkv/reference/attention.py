"""Attention over blocks, one query token at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv.reference.cache import gather_kv

Array = np.ndarray[Any, Any]

_SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    query_start_loc: Array,
    rows: Array | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    tree_mask: Array | None = None,
    tree_mask_start_loc: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute causal attention of a ragged batch in float64.

    Parameters
    ----------
    q : ndarray, shape (num_tokens, num_q_heads, head_dim)
        Queries, sequence after sequence.
    k_cache, v_cache : ndarray, shape (num_blocks, num_kv_heads, block_size, head_dim)
        One layer of the cache.
    block_table : ndarray, shape (num_rows, max_blocks_per_seq)
        Block ids.
    seq_lens : ndarray, shape (num_seqs,)
        Tokens of each sequence, those of this step included.
    query_start_loc : ndarray, shape (num_seqs + 1,)
        Where each sequence's queries start in `q`.
    rows : ndarray, shape (num_seqs,), optional
        The row of the table of each sequence; by default sequence ``s`` has row ``s``.
    softmax_scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` by default.
    sliding_window : int, optional
        A query at position ``p`` sees keys at positions above ``p - sliding_window``.
    soft_cap : float, optional
        Scores ``s`` become ``soft_cap * tanh(s / soft_cap)``, after the scale.
    alibi_slopes : ndarray, shape (num_q_heads,), optional
        ``slope * (key position - query position)`` is added to the scores, after the cap. A token of a draft tree
        stands as far behind the context as it sees other tokens of the tree.
    sinks : ndarray, shape (num_q_heads,), optional
        A further score of each query head, neither scaled nor capped, with the value 0; not in a row without keys.
    k_scale, v_scale : ndarray, shape (1,) or (num_kv_heads,), optional
        What stored keys and values must be multiplied by.
    tree_mask : ndarray, uint8, optional
        What queries see of their own step, for sequences that have rows there: one row of packed bits per query, lowest
        bit first, in whole 64-bit words. The seen tokens of the step stand at successive positions.
    tree_mask_start_loc : ndarray, shape (num_seqs + 1,), optional
        Where the rows of each sequence start, in bytes.
    return_lse : bool
        Whether to return the logarithm of the sum of exponentials too.

    Returns
    -------
    out : ndarray, shape (num_tokens, num_q_heads, head_dim), float64
        The result; 0 where a query sees no key.
    lse : ndarray, shape (num_tokens, num_q_heads), float64
        Natural logarithm of the sum of exponentials, minus infinity where no key is seen; only with `return_lse`.

    Examples
    --------
    >>> cache = np.ones((2, 1, 4, 8))
    >>> out, lse = paged_attention(
    ...     np.zeros((1, 1, 8)), cache, cache, np.array([[1]]), np.array([3]), np.array([0, 1]), return_lse=True
    ... )
    >>> float(out.max()), round(float(lse[0, 0]), 6)  # the logarithm of 3
    (1.0, 1.098612)
    """
    batch = (q, k_cache, v_cache, block_table, seq_lens, query_start_loc, rows)
    per_head = (alibi_slopes, sinks, k_scale, v_scale)
    options = (softmax_scale, sliding_window, soft_cap, per_head, (tree_mask, tree_mask_start_loc))
    out, lse = _attention(batch, options, np.float64, lambda weights: weights)
    return (out, lse) if return_lse else out


def paged_attention_same_precision(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    query_start_loc: Array,
    rows: Array | None = None,
    *,
    dtype: str,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    tree_mask: Array | None = None,
    tree_mask_start_loc: Array | None = None,
) -> Array:
    """Compute what a straightforward kernel would: float32 sums, weights rounded to the element type of the cache.

    Its error against `paged_attention` says how far a right kernel may be off. Parameters are those of
    `paged_attention`.

    Parameters
    ----------
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, rows : ndarray
        As for `paged_attention`.
    dtype : {"float32", "float16", "bfloat16"}
        The element type of the cache.
    softmax_scale, sliding_window, soft_cap, alibi_slopes, sinks : float, int or ndarray, optional
        As for `paged_attention`.
    k_scale, v_scale, tree_mask, tree_mask_start_loc : ndarray, optional
        As for `paged_attention`.

    Returns
    -------
    out : ndarray, shape (num_tokens, num_q_heads, head_dim), float32
        The result.
    """
    batch = (q, k_cache, v_cache, block_table, seq_lens, query_start_loc, rows)
    bits = _SIGNIFICANT_BITS[dtype]
    per_head = (alibi_slopes, sinks, k_scale, v_scale)
    options = (softmax_scale, sliding_window, soft_cap, per_head, (tree_mask, tree_mask_start_loc))
    return _attention(batch, options, np.float32, lambda weights: _round(weights, bits))[0]


def attention_tolerance(reference: Array, same_precision: Array, v: Array, dtype: str) -> float:
    """Return the largest error that a right kernel may have.

    Twice the error of the same inputs in the same precision, and four roundings of the largest value.

    Parameters
    ----------
    reference : ndarray
        What `paged_attention` returned.
    same_precision : ndarray
        What `paged_attention_same_precision` returned.
    v : ndarray
        The values that were attended to, without those of unused slots.
    dtype : {"float32", "float16", "bfloat16"}
        The element type of the kernel's output.

    Returns
    -------
    float
        Bound on the absolute error of each element.
    """
    error = np.abs(same_precision - reference).max(initial=0.0)
    epsilon = 2.0 ** (1 - _SIGNIFICANT_BITS[dtype])
    return float(2 * error + 4 * epsilon * np.abs(v).max(initial=0.0))


def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Join the results of two attentions of the same queries over different keys, in float64.

    Parameters
    ----------
    out_a, out_b : ndarray, shape (num_tokens, num_q_heads, head_dim)
        The results.
    lse_a, lse_b : ndarray, shape (num_tokens, num_q_heads)
        Their natural logarithms of the sum of exponentials.

    Returns
    -------
    out, lse : ndarray
        What attention over both sets of keys would have given.

    Examples
    --------
    >>> out, lse = merge_states(np.ones((1, 1, 8)), np.zeros((1, 1)), np.zeros((1, 1, 8)), np.full((1, 1), -np.inf))
    >>> float(out.min()), float(lse[0, 0])
    (1.0, 0.0)
    """
    lse = np.logaddexp(lse_a.astype(float), lse_b.astype(float))
    shift = np.where(np.isneginf(lse), 0.0, lse)
    parts = []
    for values, of in ((out_a, lse_a), (out_b, lse_b)):
        weight = np.exp(of - shift)[..., None]
        parts.append(np.where(weight == 0, 0.0, weight * values))
    return parts[0] + parts[1], lse


def _attention(
    batch: tuple[Any, ...],
    options: tuple[Any, ...],
    number: type[np.floating[Any]],
    round_weights: Callable[[Array], Array],
) -> tuple[Array, Array]:
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, rows = batch
    softmax_scale, sliding_window, soft_cap, per_head, (tree_mask, mask_starts) = options
    alibi_slopes, sinks, k_scale, v_scale = per_head
    num_tokens, num_q_heads, head_dim = q.shape
    scale = number(1 / np.sqrt(head_dim) if softmax_scale is None else softmax_scale)
    out = np.zeros((num_tokens, num_q_heads, head_dim), number)
    lse = np.full((num_tokens, num_q_heads), -np.inf, number)
    for sequence, length in enumerate(seq_lens):
        row = np.array([sequence if rows is None else rows[sequence]])
        k, v = gather_kv(k_cache, v_cache, block_table, np.array([length]), row)
        # One copy of each KV head per query head that reads it: (length, num_q_heads, head_dim).
        k = np.repeat(_scaled(k.astype(number), k_scale), num_q_heads // k.shape[1], axis=1)
        v = np.repeat(_scaled(v.astype(number), v_scale), num_q_heads // v.shape[1], axis=1)
        first, last = query_start_loc[sequence], query_start_loc[sequence + 1]
        rows_of_mask = None if tree_mask is None else tree_mask[mask_starts[sequence] : mask_starts[sequence + 1]]
        for token in range(first, last):
            seen = _seen(int(length), int(last - first), int(token - first), rows_of_mask)
            if sliding_window is not None:
                seen = seen[-sliding_window:]
            if len(seen) == 0:
                continue
            scores = np.einsum("hd,phd->hp", q[token].astype(number), k[seen]) * scale
            if soft_cap is not None:
                scores = number(soft_cap) * np.tanh(scores / number(soft_cap))
            if alibi_slopes is not None:
                positions = _positions(int(length), int(last - first), rows_of_mask)
                own = int(length - (last - first) + (token - first))
                own = int(positions[own]) if own >= 0 else own
                scores += np.outer(alibi_slopes, positions[seen] - own).astype(number)
            if sinks is not None:
                scores = np.column_stack([scores, sinks.astype(number)])
            largest = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            weights = weights[:, : len(seen)]
            out[token] = np.einsum("hp,phd->hd", round_weights(weights), v[seen]) / total
            lse[token] = (largest + np.log(total))[:, 0]
    return out, lse


def _scaled(values: Array, scale: Array | None) -> Array:
    """Return (length, num_kv_heads, head_dim) times a factor for all KV heads or each."""
    if scale is None:
        return values
    scaled: Array = values * np.asarray(scale, values.dtype)[:, None]
    return scaled


def _seen(length: int, num_queries: int, query: int, rows_of_mask: Array | None) -> Array:
    """Return the keys that a query sees, by their slots, in the order of their positions."""
    before = length - num_queries
    if rows_of_mask is None or len(rows_of_mask) == 0:
        return np.arange(max(0, before + query + 1))
    row = rows_of_mask.reshape(num_queries, -1)[query]
    of_step = np.flatnonzero(np.unpackbits(row, bitorder="little")[:num_queries])
    return np.concatenate([np.arange(before), before + of_step])


def _positions(length: int, num_queries: int, rows_of_mask: Array | None) -> Array:
    """Return the position of each key: a node of a tree stands as far behind the context as it sees other nodes."""
    positions = np.arange(length)
    if rows_of_mask is not None and len(rows_of_mask) > 0:
        seen = np.unpackbits(rows_of_mask.reshape(num_queries, -1), axis=1, bitorder="little")[:, :num_queries]
        positions[length - num_queries :] = length - num_queries + seen.sum(axis=1, dtype=int) - 1
    return positions


def _round(values: Array, significant_bits: int) -> Array:
    """Round to so many significant bits, ties to even; the exponent keeps its range."""
    fraction, exponent = np.frexp(values)
    rounded: Array = np.ldexp(np.rint(np.ldexp(fraction, significant_bits)), exponent - significant_bits)
    return rounded.astype(values.dtype)
