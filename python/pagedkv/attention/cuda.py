"""Attention on a GPU: plans batches on the host, keeps the plan in device memory, launches kernels layer by layer."""

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from pagedkv import _core
from pagedkv.attention.reserved import Reserved, Room
from pagedkv.exceptions import InvalidArgumentError, StateError
from pagedkv.kernels.launch import launcher_of
from pagedkv.kernels.merge_states import merge_states as _merge_states
from pagedkv.kernels.paged_attention import (
    LayerOptions,
    WorkLists,
    attend,
    blocks_side_by_side,
    check_heads,
    rows_per_item,
)
from pagedkv.kernels.variants import check_pair, head_dim_class, variants_of
from pagedkv.kv_cache.device import as_tensor, on_host, optional_tensor, uploaded

if TYPE_CHECKING:
    import torch

_ALIGNED_WORDS = 4  # the kernels read lists by 16 bytes

_PLANS: WeakValueDictionary[int, "DevicePlan"] = WeakValueDictionary()
_PACKED = -0x70A6ED  # no plan of the CPU begins so
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Sizes:
    """What a plan is made for."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: int | None
    split_keys: int | None


class DevicePlan:
    """A batch in device memory, as `PagedAttention` keeps it; `run` as `_core.AttentionPlan` has it.

    Parameters
    ----------
    sizes : Sizes
        Heads, blocks and the window.
    block_table : array, shape (num_rows, max_blocks_per_seq), int32
        Block ids, on the device; read by every run, so that later changes of it count.
    seq_lens, query_start_loc, rows, tree_mask, tree_mask_start_loc
        As for `PagedAttention.plan`; wherever they lie.
    reserved : Reserved, optional
        Memory for the plan, in the place of the plan that was there; by default the plan takes its own.
    """

    def __init__(
        self,
        sizes: Sizes,
        block_table: Any,
        seq_lens: Any,
        query_start_loc: Any,
        *,
        rows: Any = None,
        tree_mask: Any = None,
        tree_mask_start_loc: Any = None,
        reserved: Reserved | None = None,
    ) -> None:
        self._sizes = sizes
        self._number = 0
        self._block_table = as_tensor("block_table", block_table)
        self._check_sizes()
        device = self._block_table.device
        launcher = launcher_of(device)
        if launcher.is_capturing():
            raise StateError("plan: expected a stream that is not being captured, found one that is: plan before")
        query_start_loc = _integers("query_start_loc", query_start_loc)
        self._num_tokens = max(0, int(query_start_loc.reshape(-1)[-1])) if query_start_loc.size else 0
        if reserved is not None:
            if self._num_tokens > (most := reserved.room.num_tokens):
                raise InvalidArgumentError(
                    f"query_start_loc: expected at most {most} tokens, for which room is reserved,"
                    f" found {self._num_tokens}"
                )
            self._num_tokens = most
        few_rows, many_rows = rows_per_item(sizes.head_dim)
        *lists, num_partial_rows = _core.device_work(
            sizes.num_kv_heads,
            sizes.num_q_heads // sizes.num_kv_heads,
            on_host("seq_lens", seq_lens),
            query_start_loc,
            self._num_tokens,
            (self._block_table.shape[0], self._block_table.shape[1] * sizes.block_size),
            rows=None if rows is None else on_host("rows", rows),
            sliding_window=sizes.sliding_window,
            tree_mask=None if tree_mask is None else on_host("tree_mask", tree_mask),
            tree_mask_start_loc=(
                None if tree_mask_start_loc is None else on_host("tree_mask_start_loc", tree_mask_start_loc)
            ),
            few_rows=few_rows,
            many_rows=many_rows,
            num_workers=blocks_side_by_side(launcher, sizes.head_dim),
            fixed_keys=sizes.split_keys,
        )
        if reserved is None:
            self.work = _upload(lists, num_partial_rows, device)
        else:
            self.work = reserved.fill(lists, num_partial_rows)

    def pack(self) -> NDArray[np.int32]:
        """Return two words that name this plan in this process, for as long as it is in place."""
        if self._number == 0:
            self._number = next(_numbers)
            _PLANS[self._number] = self
        return np.array([_PACKED, self._number], np.int32)

    def _check_sizes(self) -> None:
        sizes, table = self._sizes, self._block_table
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "block_size"):
            if getattr(sizes, name) < 1:
                raise InvalidArgumentError(f"{name}: expected at least 1, found {getattr(sizes, name)}")
        check_heads(sizes.num_q_heads, sizes.num_kv_heads, sizes.head_dim)
        if table.ndim != 2:
            raise InvalidArgumentError(
                f"block_table: expected shape (num_rows, max_blocks_per_seq), found {tuple(table.shape)}"
            )

    def run(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        out: Any,
        lse: Any = None,
        softmax_scale: float | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        """Compute the attention of one layer into `out`, and `lse` if it is given."""
        q, k_cache, v_cache = as_tensor("q", q), as_tensor("k_cache", k_cache), as_tensor("v_cache", v_cache)
        self._check_shapes(q, k_cache)
        options = LayerOptions(
            softmax_scale=softmax_scale,
            sliding_window=self._sizes.sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=optional_tensor("alibi_slopes", alibi_slopes),
            sinks=optional_tensor("sinks", sinks),
            k_scale=optional_tensor("k_scale", k_scale),
            v_scale=optional_tensor("v_scale", v_scale),
        )
        out, lse = as_tensor("out", out), optional_tensor("lse", lse)
        if len(q) == self._num_tokens:
            attend(self.work, q, k_cache, v_cache, self._block_table, out, lse, options)
            return
        if out.shape != q.shape:
            raise InvalidArgumentError(f"out: expected shape {tuple(q.shape)}, found {tuple(out.shape)}")
        mine, rest = slice(self._num_tokens), slice(self._num_tokens, None)
        of_sequences = (out[mine], None if lse is None else lse[mine])
        attend(self.work, q[mine], k_cache, v_cache, self._block_table, *of_sequences, options)
        out[rest].zero_()
        if lse is not None:
            lse[rest].fill_(-math.inf)

    def _check_shapes(self, q: "torch.Tensor", k_cache: "torch.Tensor") -> None:
        sizes = self._sizes
        expected = (sizes.num_q_heads, sizes.head_dim)
        if q.ndim != 3:
            expected_shape = "(num_tokens, num_q_heads, head_dim)"
            raise InvalidArgumentError(f"q: expected shape {expected_shape}, found {tuple(q.shape)}")
        if tuple(q.shape[1:]) != expected or len(q) < self._num_tokens:
            found = f"(at least {self._num_tokens}, {sizes.num_q_heads}, {sizes.head_dim})"
            raise InvalidArgumentError(f"plan: expected one for q {tuple(q.shape)}, found one for {found}")
        of_layer = (sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
        if k_cache.ndim == 4 and tuple(k_cache.shape[1:]) != of_layer:
            raise InvalidArgumentError(
                f"plan: expected one for layers (num_blocks, {', '.join(map(str, k_cache.shape[1:]))}), found one for "
                f"(num_blocks, {', '.join(map(str, of_layer))})"
            )


def unpack(words: "torch.Tensor") -> DevicePlan:
    """Return the plan that `DevicePlan.pack` named.

    Raises
    ------
    InvalidArgumentError
        If the words name none, or one that another has taken the place of.
    """
    named = words.tolist() if words.device.type == "cpu" and words.shape == (2,) else []
    plan = _PLANS.get(named[1]) if named[:1] == [_PACKED] else None
    if plan is None:
        raise InvalidArgumentError(
            f"plan: expected what PagedAttention.pack returned for the plan in place, found {tuple(words.shape)} words"
        )
    return plan


def reserve(sizes: Sizes, block_table: Any, num_seqs: int, num_tokens: int) -> Reserved:
    """Return memory for the plans of batches of single queries; see `PagedAttention.reserve`."""
    table = as_tensor("block_table", block_table)
    workers = blocks_side_by_side(launcher_of(table.device), sizes.head_dim)
    longest = table.shape[1] * sizes.block_size
    room = Room.of(
        num_seqs,
        num_tokens,
        group=sizes.num_q_heads // sizes.num_kv_heads,
        rows=rows_per_item(sizes.head_dim),
        pieces=-(-workers // sizes.num_kv_heads),
        max_pieces=None if sizes.split_keys is None else -(-longest // sizes.split_keys),
    )
    return Reserved(room, table.device)


def load_kernels(device: "torch.device", q_dtype: str, kv_dtype: str, head_dims: Collection[int]) -> int:
    """Load all kernels that a model may launch, and compile those that are not on disk; return how many there are.

    Parameters
    ----------
    device : torch.device
        The GPU.
    q_dtype, kv_dtype : str
        Element types of the queries and of the cache.
    head_dims : collection of int
        Elements per head of its layers.

    Raises
    ------
    TypeError, ValueError
        If attention has no kernel for these types or heads.
    """
    check_pair(q_dtype, kv_dtype)
    launcher = launcher_of(device)
    needed = variants_of(q_dtype, kv_dtype, {head_dim_class(head_dim) for head_dim in head_dims})
    for variant in needed:
        launcher.load(variant)
    return len(needed)


def _integers(argument: str, array: Any) -> Any:
    return np.from_dlpack(_core.from_dlpack(on_host(argument, array), argument=argument))


def _upload(lists: list[Any], num_partial_rows: int, device: "torch.device") -> WorkLists:
    """Put the lists side by side into one array, which goes to the device in one copy."""
    starts = np.cumsum([0, *(-(-len(words) // _ALIGNED_WORDS) * _ALIGNED_WORDS for words in lists)]).tolist()
    arena = np.zeros(starts[-1], np.int32)
    for start, words in zip(starts, lists, strict=False):
        arena[start : start + len(words)] = words
    on_device = uploaded(arena, device)
    views = [on_device[start : start + len(words)] for start, words in zip(starts, lists, strict=False)]
    few, many, merges, mask, depths = views
    num_few, num_many, num_merges = (int(words[0]) for words in lists[:3])
    return WorkLists(
        few,
        many,
        merges,
        num_few,
        num_many,
        num_merges,
        mask if len(mask) else None,
        depths if len(mask) else None,
        num_partial_rows,
    )


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    out: Any,
    *,
    rows: Any,
    lse: Any,
    sliding_window: int | None,
    tree_mask: Any,
    tree_mask_start_loc: Any,
    **of_layer: Any,
) -> None:
    """Plan and compute attention, as `_core.paged_attention` does on the CPU."""
    queries, cache = as_tensor("q", q), as_tensor("k_cache", k_cache)
    if queries.ndim != 3:
        found = tuple(queries.shape)
        raise InvalidArgumentError(f"q: expected shape (num_tokens, num_q_heads, head_dim), found {found}")
    if cache.ndim != 4:
        expected = "(num_blocks, num_kv_heads, block_size, head_dim)"
        raise InvalidArgumentError(f"k_cache: expected shape {expected}, found {tuple(cache.shape)}")
    sizes = Sizes(queries.shape[1], cache.shape[1], queries.shape[2], cache.shape[2], sliding_window, None)
    plan = DevicePlan(
        sizes,
        block_table,
        seq_lens,
        query_start_loc,
        rows=rows,
        tree_mask=tree_mask,
        tree_mask_start_loc=tree_mask_start_loc,
    )
    plan.run(q, k_cache, v_cache, out, lse, **of_layer)


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any) -> None:
    """Join two results, as `_core.merge_states` does on the CPU."""
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out, "lse": lse}
    _merge_states(*(as_tensor(name, array) for name, array in arrays.items()))
