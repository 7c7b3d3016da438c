"""`PagedAttention`: a batch that is planned once per step and run layer by layer."""

from typing import TYPE_CHECKING, Any

from pagedkv import _core
from pagedkv.attention.cuda import DevicePlan, Sizes, reserve
from pagedkv.attention.reserved import Reserved
from pagedkv.exceptions import InvalidArgumentError, StateError
from pagedkv.kv_cache.device import runs_kernels
from pagedkv.kv_cache.memory import make_like

if TYPE_CHECKING:
    import torch


class PagedAttention:
    """Attention of a step's batch over many layers.

    `plan` checks the batch and cuts it into work items, once per step and cache group; `run` computes one layer after
    another and does nothing but that. What decides where a batch is cut is said here and to `plan`; what only changes
    numbers, and may differ from layer to layer, to `run`.

    Parameters
    ----------
    num_q_heads : int
        Query heads, a multiple of `num_kv_heads`.
    num_kv_heads : int
        KV heads of the cache.
    head_dim : int
        Elements per head, a multiple of 8 up to 512.
    block_size : int
        Tokens per block.
    sliding_window : int, optional
        Keys that a query sees, itself included: those at positions above ``position - sliding_window``.
    split_keys : int, optional
        On a GPU, keys of sequences with few queries are cut at multiples of so many, whatever else is in the batch, so
        that results do not depend on it. By default they are cut so that the device is busy. On the CPU results never
        depend on the batch, and nothing is said by it.

    Raises
    ------
    TypeError, InvalidArgumentError
        From `plan`, if a size is no integer or out of its range.

    Notes
    -----
    Several threads may run layers of one plan at the same time. `plan` puts a new plan in place of the old one, which
    runs that have begun keep.

    Examples
    --------
    >>> import numpy as np
    >>> attention = PagedAttention(num_q_heads=2, num_kv_heads=1, head_dim=8, block_size=16)
    >>> attention.plan(np.array([[3, 1]], np.int32), np.array([20], np.int32), np.array([0, 1], np.int32))
    >>> layers = [np.full((4, 1, 16, 8), layer, np.float32) for layer in (1, 2)]
    >>> q = np.ones((1, 2, 8), np.float32)
    >>> [float(attention.run(q, cache, cache).max()) for cache in layers]
    [1.0, 2.0]
    """

    __slots__ = ("_plan", "_reserved", "_sizes", "_sliding_window", "_split_keys")

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        sliding_window: int | None = None,
        split_keys: int | None = None,
    ) -> None:
        self._sizes = (num_q_heads, num_kv_heads, head_dim, block_size)
        self._sliding_window = sliding_window
        self._split_keys = split_keys
        self._plan: _core.AttentionPlan | DevicePlan | None = None
        self._reserved: Reserved | None = None

    def reserve(self, block_table: Any, *, num_seqs: int, num_tokens: int) -> None:
        """Keep plans where they are from now on, with room for any batch of a size, so that graphs can be captured.

        A graph that holds runs computes, when it is replayed, the plan that was made last. Each sequence has one query
        at most then; runs take `num_tokens` of them, and those that belong to no sequence give 0. On the CPU there are
        no graphs, and nothing is kept.

        Parameters
        ----------
        block_table : array, shape (num_rows, max_blocks_per_seq), int32
            What plans will name; its width says how long sequences may be.
        num_seqs : int
            Most sequences of a batch.
        num_tokens : int
            Tokens of a run.

        Raises
        ------
        InvalidArgumentError
            If a size is below 1. From `plan`, if a batch needs more room; the plan before stays in place then.

        Notes
        -----
        Thread blocks are launched for all that may come to be; those that find nothing to do end at once.
        """
        for name, size in (("num_seqs", num_seqs), ("num_tokens", num_tokens)):
            if size < 1:
                raise InvalidArgumentError(f"{name}: expected at least 1, found {size}")
        if runs_kernels(block_table):
            sizes = Sizes(*self._sizes, self._sliding_window, self._split_keys)
            self._reserved = reserve(sizes, block_table, num_seqs, num_tokens)

    def plan(
        self,
        block_table: Any,
        seq_lens: Any,
        query_start_loc: Any,
        rows: Any = None,
        *,
        tree_mask: Any = None,
        tree_mask_start_loc: Any = None,
    ) -> None:
        """Check a batch and cut it into work items, for all `run` calls from now on.

        The arrays are read here and not kept: later changes of the block table concern the next plan only. On a GPU
        `run` reads the block table, so changes of it count from where they are made in the order of the stream, and ids
        in it are not looked at; lengths, starts, rows and trees are taken from the host, or copied to it.

        Parameters
        ----------
        block_table : array, shape (num_rows, max_blocks_per_seq), int32
            Block ids of the layers' cache group. Entries beyond a sequence's length, or wholly before its window, are
            never read.
        seq_lens : array, shape (num_seqs,), int32
            Tokens of each sequence, those of this step included.
        query_start_loc : array, shape (num_seqs + 1,), int32
            Where each sequence's queries start.
        rows : array, shape (num_seqs,), int32, optional
            The row of `block_table` of each sequence; by default sequence ``s`` has row ``s``.
        tree_mask : array, uint8, optional
            What queries of draft trees see of their own step, as for `paged_attention`.
        tree_mask_start_loc : array, shape (num_seqs + 1,), int32, optional
            Where the rows of each sequence start in `tree_mask`, in bytes; only with it.

        Raises
        ------
        TypeError
            If an argument is no array, or has another element type.
        InvalidArgumentError
            If shapes disagree, or a size, an id or a length is out of its range. The plan before stays in place.

        Notes
        -----
        The cost is ``O(blocks + items * log(items))``; the number of threads is found as for `paged_attention`.
        """
        batch = (block_table, seq_lens, query_start_loc)
        options = {"rows": rows, "tree_mask": tree_mask, "tree_mask_start_loc": tree_mask_start_loc}
        if runs_kernels(block_table):
            sizes = Sizes(*self._sizes, self._sliding_window, self._split_keys)
            self._plan = DevicePlan(sizes, *batch, **options, reserved=self._reserved)
        else:
            self._plan = _core.AttentionPlan(*self._sizes, *batch, **options, sliding_window=self._sliding_window)

    def run(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        *,
        softmax_scale: float | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Compute the attention of one layer.

        Arrays may be imported tensors (`from_dlpack`, `KVCache.layer_tensors`), which costs least: nothing is imported
        again then.

        Parameters
        ----------
        q : array, shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
            Queries, sequence after sequence; those behind the last sequence belong to none and give 0.
        k_cache, v_cache : array, shape (num_blocks, num_kv_heads, block_size, head_dim)
            One layer of the cache: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2. Packed keys are known by
            the tensors of `KVCache.layer_tensors`.
        softmax_scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale, out, return_lse
            As for `paged_attention`.

        Returns
        -------
        out : array, shape (num_tokens, num_q_heads, head_dim)
            The result, like `q`. A query that sees no key gives 0.
        lse : array, shape (num_tokens, num_q_heads), float32
            Natural logarithm of the sum of exponentials, minus infinity where no key is seen; only with `return_lse`.

        Raises
        ------
        StateError
            If there is no plan yet.
        TypeError
            If an argument is no array, has an element type that it cannot have, or none can be made like `q`.
        InvalidArgumentError
            If shapes disagree with one another or with the plan, or memory is on another device. Nothing is written
            then.

        Notes
        -----
        The cost is ``O(num_q_heads * head_dim)`` per pair of a query and a key that it sees. The result is that of
        `paged_attention`, bit by bit.
        """
        plan = self._plan
        if plan is None:
            raise _no_plan()
        if out is None:
            out = make_like("out", q)
        lse = make_like("lse", out, out.shape[:2], "float32") if return_lse else None
        # By place: names are looked up one by one.
        plan.run(q, k_cache, v_cache, out, lse, softmax_scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale)
        return (out, lse) if return_lse else out

    def pack(self) -> "torch.Tensor":
        """Return the plan as a tensor, which the torch operation `pagedkv::paged_attention` takes.

        Returns
        -------
        torch.Tensor, shape (num_words,), int32
            Sizes, lengths and blocks of the batch. What the words mean is this package's affair and may change; words
            that are no plan are refused. The window is in it, the number of threads is not.

        Raises
        ------
        StateError
            If there is no plan yet.

        Notes
        -----
        Some three words per sequence and one per block. The operation checks and cuts what it unpacks again, layer by
        layer, which costs little beside the attention itself. Of a plan for a GPU the words, two of them in host
        memory, are a name: they are good in this process, until another plan takes its place.
        """
        import torch

        if self._plan is None:
            raise _no_plan()
        return torch.from_numpy(self._plan.pack())


def _no_plan() -> StateError:
    return StateError("plan: expected a planned batch, because nothing can be run without, found none")
