"""Attention over the blocks of a paged KV cache: one front, one backend per device."""

from typing import Any

from pagedkv import _core
from pagedkv.attention import cuda
from pagedkv.attention.cuda import load_kernels
from pagedkv.attention.planned import PagedAttention
from pagedkv.kv_cache.device import runs_kernels
from pagedkv.kv_cache.memory import make_like

__all__ = ["PagedAttention", "instruction_sets", "load_kernels", "merge_states", "paged_attention"]


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    rows: Any = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    tree_mask: Any = None,
    tree_mask_start_loc: Any = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Compute causal attention of a ragged batch over cached keys and values.

    Decode, prefill, and both in one batch. Query ``i`` of a sequence with ``n`` queries and length ``L`` sits at
    position ``L - n + i`` and sees the keys up to itself. Query heads share KV heads in groups of any size: query head
    ``h`` reads KV head ``h // (num_q_heads // num_kv_heads)``. Arrays come from any library that speaks DLPack, with
    any strides as long as ``head_dim`` is contiguous; element types of queries, cache and output may differ. Where `q`
    lies on an NVIDIA GPU it is computed there: see Notes.

    Parameters
    ----------
    q : array, shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
        Queries, sequence after sequence. `head_dim` is a multiple of 8 up to 512.
    k_cache, v_cache : array, shape (num_blocks, num_kv_heads, block_size, head_dim)
        One layer of the cache, such as `KVCache.layer` returns, or `KVCache.layer_tensors` where keys are packed:
        float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
    block_table : array, shape (num_rows, max_blocks_per_seq), int32
        Block ids. Entries beyond a sequence's length, or wholly before its window, are never read.
    seq_lens : array, shape (num_seqs,), int32
        Tokens of each sequence, those of this step included.
    query_start_loc : array, shape (num_seqs + 1,), int32
        Where each sequence's queries start in `q`. Tokens from the last entry on belong to no sequence.
    rows : array, shape (num_seqs,), int32, optional
        The row of `block_table` of each sequence; by default sequence ``s`` has row ``s``.
    softmax_scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` by default.
    sliding_window : int, optional
        Keys that a query sees, itself included: those at positions above ``position - sliding_window``.
    soft_cap : float, optional
        Scores ``s`` become ``soft_cap * tanh(s / soft_cap)``, after the scale.
    alibi_slopes : array, shape (num_q_heads,), float32, float16 or bfloat16, optional
        ``slope * (key position - query position)`` is added to the scores, after the cap. A token of a draft tree
        stands as far behind the context as it sees other tokens of the tree.
    sinks : array, shape (num_q_heads,), float32, float16 or bfloat16, optional
        A further score of each query head, neither scaled nor capped, that takes its share of the weights and has no
        value. It counts in `lse` where a query sees a key.
    k_scale, v_scale : array, shape (1,) or (num_kv_heads,), float32, optional
        What stored FP8 keys and values must be multiplied by, for all KV heads or each; 1 by default.
    tree_mask : array, uint8, optional
        For draft trees, `StepPlan.tree_mask`: what queries see of their own step. A sequence with ``n`` queries has
        either no bytes or ``n`` rows of ``8 * ceil(n / 64)`` bytes; bit ``k`` of row ``i``, counted from the lowest
        bit of the first byte on, says whether query ``i`` sees the key of query ``k``. Keys before the step are seen
        as ever. A window counts the seen keys of the step as successive positions.
    tree_mask_start_loc : array, shape (num_seqs + 1,), int32, optional
        Where the rows of each sequence start, in bytes; only with `tree_mask`.
    out : array, shape (num_tokens, num_q_heads, head_dim), optional
        Where to write the result. By default an array like `q` is made, by torch or NumPy.
    return_lse : bool
        Whether to return the logarithm of the sum of exponentials too.

    Returns
    -------
    out : array, shape (num_tokens, num_q_heads, head_dim)
        The result. A query that sees no key gives 0.
    lse : array, shape (num_tokens, num_q_heads), float32
        Natural logarithm of the sum of exponentials, minus infinity where no key is seen; only with `return_lse`.

    Raises
    ------
    TypeError
        If an argument is no array, or has an element type that it cannot have.
    InvalidArgumentError
        If shapes disagree, an id or a length points outside, or memory is on another device. Nothing is written then.
    UnsupportedError
        If a GPU's kernels have no such heads, or can't read rows where they lie.

    Notes
    -----
    On a GPU `head_dim` is at most 256, queries and output are float16 or bfloat16, and the cache is of their type or
    FP8; `q`, the caches, `block_table`, `out` and numbers per head lie on one device, ids of blocks are not looked at,
    and `seq_lens`, `query_start_loc`, `rows` and trees are best left on the host, where they are needed. Kernels are
    launched on torch's current stream. A result may depend on the batch by the order of its sums; see `split_keys` of
    `PagedAttention`. The rest of these notes is about the CPU.

    The cost is ``O(num_q_heads * head_dim)`` per pair of a query and a key that it sees. Sums are float32. Results
    depend neither on the number of threads nor on the rest of the batch, but on the instruction set, which
    `PAGEDKV_CPU_ISA` forces. Whatever unused slots hold, NaN included,
    never reaches the result. The number of threads is `PAGEDKV_NUM_THREADS` from the environment, else torch's if
    torch is imported, else the CPUs of the process.

    References
    ----------
    Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023.
    Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    Press, Smith and Lewis, Train Short, Test Long: Attention with Linear Biases, arXiv:2108.12409.
    OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, arXiv:2508.10925: sinks as learned scores.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.ones((4, 1, 16, 8), np.float32)
    >>> q = np.ones((1, 2, 8), np.float32)
    >>> table = np.array([[3, 1]], np.int32)
    >>> out = paged_attention(q, cache, cache, table, np.array([20], np.int32), np.array([0, 1], np.int32))
    >>> out.shape, float(out.max())
    ((1, 2, 8), 1.0)
    """
    if out is None:
        out = make_like("out", q)
    lse = make_like("lse", out, out.shape[:2], "float32") if return_lse else None
    backend = cuda if runs_kernels(q) else _core
    backend.paged_attention(
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
    """Join the results of two attentions of the same queries over different keys.

    Parameters
    ----------
    out_a, out_b : array, shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
        The results, as `paged_attention` returns them.
    lse_a, lse_b : array, shape (num_tokens, num_q_heads), float32
        Their natural logarithms of the sum of exponentials.

    Returns
    -------
    out, lse : array
        What attention over both sets of keys would have given, like `out_a` and `lse_a`. A state without keys, its
        `lse` minus infinity, has no part in it; two of them give 0 and minus infinity.

    Raises
    ------
    TypeError, InvalidArgumentError
        If shapes disagree or an element type is not supported.

    Examples
    --------
    >>> import numpy as np
    >>> one, lse = np.ones((1, 1, 8), np.float32), np.zeros((1, 1), np.float32)
    >>> out, both = merge_states(one, lse, 3 * one, lse)
    >>> float(out.max()), round(float(both[0, 0]), 6)
    (2.0, 0.693147)
    """
    out, lse = make_like("out_a", out_a), make_like("lse_a", lse_a)
    backend = cuda if runs_kernels(out_a) else _core
    backend.merge_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def instruction_sets() -> list[str]:
    """Return the names of the instruction sets that this processor has and attention can use, the best one last.

    The environment variable `PAGEDKV_CPU_ISA` forces one of them.

    Returns
    -------
    list of str
        Of ``scalar``, ``avx2``, ``avx512``, ``avx512_bf16`` and ``amx``.

    Examples
    --------
    >>> instruction_sets()[0]
    'scalar'
    """
    return _core.instruction_sets()
