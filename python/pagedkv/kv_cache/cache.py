"""`KVCache`: the blocks of all layers, and the block table that kernels read."""

from typing import Any, Literal, Self, TypeVar

from pagedkv import _core
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kv_cache.checks import (
    check_apart,
    check_config,
    check_is_there,
    check_moves,
    check_packed,
    check_place,
    dtype_name,
    import_memory,
    integer,
    size,
)
from pagedkv.kv_cache.device import runs_kernels
from pagedkv.kv_cache.groups import CacheGroup, OfEveryGroup, groups_of, place_layers
from pagedkv.kv_cache.host import HostTier
from pagedkv.kv_cache.memory import make_blocks, make_pool, make_table
from pagedkv.kv_cache.ops import append_kv, copy_blocks, gather_kv, move_kv, update_block_table
from pagedkv.kv_cache.views import PoolViews

_Found = TypeVar("_Found")


class KVCache:
    """Keys and values of all layers in blocks of fixed size, and the block table that kernels read.

    The pool has shape ``(num_blocks, num_layer_slots, 2, num_kv_heads, block_size, head_dim)``; keys are at index 0 of
    the third dimension, values at index 1. In the "block" layout a block is one span of memory over all its layers, so
    copying it is one copy; in the "layer" layout each layer is one span and the strides differ. Both go down the same
    path.

    Layers may be in several cache groups, which `from_config` takes from a configuration. All groups draw blocks from
    the one pool, and a block belongs to one group at a time: each group sees the same bytes in its own shape and
    element type.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool, the null block 0 included.
    block_size : int
        Tokens per block.
    num_layers, num_kv_heads, head_dim : int
        The model's sizes.
    dtype : str or torch.dtype
        "float32", "float16", "bfloat16", or FP8: "float8_e4m3fn" or "float8_e5m2", whose scales are the caller's.
    max_num_seqs : int
        Rows of the block table.
    max_blocks_per_seq : int
        Columns of the block table.
    layout : {"block", "layer"}
        Which dimension is outermost in memory; ignored when `pool` is given.
    backend : {"torch", "numpy"}
        The library that makes the memory. NumPy holds bfloat16 as uint16 and FP8 as uint8.
    device : str or torch.device
        Where to make it: "cpu", or "cuda" or "cuda:N" with torch.
    pool : array, shape (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), optional
        Memory to use in place, from any library that speaks DLPack, with any strides as long as `head_dim` is
        contiguous.
    block_table : array, shape (1, max_num_seqs, max_blocks_per_seq), int32, optional
        Memory to use in place for the block table.
    host_blocks : int
        Blocks of the host tier, for requests that are preempted by swap; they take as much memory each as those of the
        pool, in the same layout. Beside a GPU they are page-locked, and transfers have a stream of their own.
    packed : bool
        Whether keys are packed, sixteen tokens side by side, which makes decoding on the CPU faster. Block sizes must
        be multiples of 16 then, and `pool` is not taken.

    Attributes
    ----------
    num_blocks, num_layers : int
        As given.
    num_layer_slots : int
        Layers that a block has room for.
    groups : tuple of CacheGroup
        Each group's layers, and how it sees a block.
    block_size, num_kv_heads, head_dim, dtype
        Those of all groups; where groups differ, an AttributeError says so.
    pool : array
        The whole memory, in the library that made it and as the first group sees it; refused where keys are packed.
    packed : bool
        As given.
    block_table : array, shape (num_groups, max_num_seqs, max_blocks_per_seq), int32
        Block ids by cache group, row and column; it never moves.

    Raises
    ------
    UnsupportedError
        If `device` is neither the CPU nor an NVIDIA GPU, or keys are to be packed there or in memory that is given.
    TypeError, InvalidArgumentError
        If an argument is out of its range, or given memory is read-only, overlaps itself or the other's, does not have
        the shape and type that it should, or can't be seen in the shape of each group.

    Examples
    --------
    >>> import numpy as np
    >>> cache = KVCache(64, 16, 2, 1, 8, max_num_seqs=4, max_blocks_per_seq=8, backend="numpy")
    >>> k = np.ones((3, 1, 8), np.float32)
    >>> cache.append_kv(0, k, 2 * k, np.array([16, 17, -1]))
    >>> k_cache, v_cache = cache.layer(0)
    >>> float(v_cache[1, 0, 1, 0]), cache.num_bytes
    (2.0, 131072)
    """

    block_size = OfEveryGroup[int]("Tokens per block of every group.")
    num_kv_heads = OfEveryGroup[int]("KV heads of every layer.")
    head_dim = OfEveryGroup[int]("Elements per head of every layer.")
    dtype = OfEveryGroup[str]("Element type of every layer, by its torch name.")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = "float32",
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        layout: Literal["block", "layer"] = "block",
        backend: Literal["torch", "numpy"] = "torch",
        device: str = "cpu",
        pool: Any = None,
        block_table: Any = None,
        host_blocks: int = 0,
        packed: bool = False,
    ) -> None:
        group = CacheGroup(
            tuple(range(size("num_layers", num_layers))),
            size("num_kv_heads", num_kv_heads),
            size("head_dim", head_dim),
            size("block_size", block_size),
            dtype_name(dtype),
        )
        table_sizes = (size("max_num_seqs", max_num_seqs), size("max_blocks_per_seq", max_blocks_per_seq))
        self._set_up(
            size("num_blocks", num_blocks),
            (group,),
            len(group.layers),
            table_sizes,
            layout=layout,
            backend=backend,
            device=device,
            pool=pool,
            block_table=block_table,
            host_blocks=host_blocks,
            packed=packed,
        )

    @classmethod
    def from_config(cls, cache_config: Any, scheduler_config: Any, **options: Any) -> Self:
        """Make the memory that a scheduler of these configurations hands out blocks of.

        Parameters
        ----------
        cache_config : CacheConfig
            Blocks and groups of layers.
        scheduler_config : SchedulerConfig
            Sequences and their longest length, which size the block table.
        **options
            `layout`, `backend`, `device`, `pool`, `block_table`, `packed`, and `host_blocks`, by default those of
            `cache_config`, as for the class. The pool has the shape of the first group,
            ``(num_blocks, num_layer_slots, 2, num_kv_heads, block_size, head_dim)``, and the block table
            ``(num_groups, max_num_seqs, max_blocks_per_seq)``, which is as wide as the smallest block size needs.

        Returns
        -------
        KVCache
            The memory.

        Raises
        ------
        TypeError, InvalidArgumentError
            If one of the two is no configuration, or it describes no layers, or groups that do not fit into one pool.
        """
        check_config("cache_config", "CacheConfig", cache_config, "groups")
        check_config("scheduler_config", "SchedulerConfig", scheduler_config, "max_model_len")
        groups, num_layer_slots = groups_of(cache_config)
        max_tokens = scheduler_config.max_model_len + scheduler_config.lookahead
        width = -(-max_tokens // min(group.block_size for group in groups))
        cache = cls.__new__(cls)
        table_sizes = (scheduler_config.max_num_seqs, width)
        options.setdefault("host_blocks", cache_config.num_host_blocks)
        cache._set_up(cache_config.num_blocks, groups, num_layer_slots, table_sizes, **options)
        return cache

    def _set_up(
        self,
        num_blocks: int,
        groups: tuple[CacheGroup, ...],
        num_layer_slots: int,
        table_sizes: tuple[int, int],
        *,
        layout: str = "block",
        backend: str = "torch",
        device: Any = "cpu",
        pool: Any = None,
        block_table: Any = None,
        host_blocks: int = 0,
        packed: bool = False,
    ) -> None:
        place = check_place(layout, backend, device)
        if packed:
            check_packed(groups, pool, place)
        if pool is None:
            check_is_there(place)
        self.num_blocks = num_blocks
        self.groups = groups
        self.num_layer_slots = num_layer_slots
        self._places = place_layers(groups)
        self.packed = packed
        self._backend = backend
        shape = (num_blocks, num_layer_slots, *groups[0].slot_shape)
        memory = make_pool(backend, shape, groups[0].dtype, layout, place) if pool is None else pool
        self._pool = PoolViews(memory, shape, groups, self._places, packed=packed)
        place = self._pool.device
        table_shape = (len(groups), *table_sizes)
        self.block_table = make_table(backend, table_shape, place) if block_table is None else block_table
        self._block_table = import_memory("block_table", self.block_table, table_shape, "int32")
        check_apart("block_table", self._block_table, "pool", self._pool.tensor)
        self._tables = [self._block_table.select(0, number) for number in range(len(groups))]
        self.host_blocks = integer("host_blocks", host_blocks)
        if self.host_blocks < 0:
            raise InvalidArgumentError(f"host_blocks: expected at least 0, found {host_blocks}")
        self._host: HostTier | None = None
        if self.host_blocks:
            sizes = (self.host_blocks, shape[1:], groups[0].dtype)
            self._host = HostTier(*sizes, layout, backend, packed=packed, device=place)
            if place != "cpu":
                self._host.outlive(memory)

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return len(self._places)

    @property
    def padding(self) -> float:
        """Share of the pool that no layer uses, because groups have fewer layers than a block has room for."""
        return 1 - self.num_layers / (self.num_layer_slots * len(self.groups))

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.num_blocks * self.num_layer_slots * self.groups[0].slot_bytes

    @property
    def device(self) -> str:
        """Where the memory lies."""
        return self._pool.tensor.device

    @property
    def pool(self) -> Any:
        """The whole memory, in the library that made it and as the first group sees it."""
        self._refuse_packed("pool", "pool_tensor")
        return self._pool.array

    @property
    def pool_tensor(self) -> _core.Tensor:
        """The whole memory as an imported tensor, which knows the element type and whether keys are packed."""
        return self._pool.tensor

    def layer(self, layer: int) -> tuple[Any, Any]:
        """Return the keys and the values of a layer, as views.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.

        Returns
        -------
        k_cache, v_cache : array, shape (num_blocks, num_kv_heads, block_size, head_dim)
            Views in the library of the pool and the shape of the layer's group; `Tensor` where that library is neither
            torch nor NumPy.

        Raises
        ------
        UnsupportedError
            If keys are packed: no strides say where their elements lie. Operations take `layer_tensors` then.
        """
        self._refuse_packed("layer", "layer_tensors")
        return self._find(self._pool.layers, layer)

    def layer_tensors(self, layer: int) -> tuple[_core.Tensor, _core.Tensor]:
        """Return the keys and the values of a layer as imported tensors.

        Operations take them without importing them again, and they know the element type where NumPy does not, and
        whether keys are packed.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.

        Returns
        -------
        k_cache, v_cache : Tensor, shape (num_blocks, num_kv_heads, block_size, head_dim)
            Views of the pool. Packed keys can be given to operations, and to nothing else.
        """
        return self._find(self._pool.tensors, layer)

    def group_of(self, layer: int) -> int:
        """Return the cache group of a layer: its row of `block_table` and of a plan's `slot_mapping`.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.

        Returns
        -------
        int
            Index of the group.
        """
        return self._find(self._places, layer)[0]

    def table_tensors(self) -> list[_core.Tensor]:
        """Return the block table of each group as imported tensors.

        Returns
        -------
        list of Tensor, shape (max_num_seqs, max_blocks_per_seq), int32
            Views of `block_table`, by group.
        """
        return list(self._tables)

    def apply(self, plan: Any) -> None:
        """Do what a plan asks before the model runs: table updates, slot moves, swap-out, swap-in, then copies.

        A transfer that was started before is passed over.

        Parameters
        ----------
        plan : StepPlan
            What `Scheduler.schedule` returned. Applying it again changes nothing, as long as the model has not run.

        Raises
        ------
        TypeError, InvalidArgumentError
            If it is no plan, or names cells, slots or blocks that the memory does not have; nothing is written then.
        """
        if not hasattr(plan, "table_updates"):
            raise TypeError(f"plan: expected a StepPlan, found {type(plan).__name__}")
        swaps = len(plan.swap_out) + len(plan.swap_in) > 0
        if swaps and self._host is None:
            raise InvalidArgumentError("host_blocks: expected a host tier, because the plan has swaps, found 0")
        if swaps and self._host is not None:
            self._host.check(plan, self.num_blocks)
        if len(plan.copies) and not 0 <= plan.copies.min() <= plan.copies.max() < self.num_blocks:
            raise InvalidArgumentError(
                f"plan.copies: expected blocks below {self.num_blocks}, found {plan.copies.max()}"
            )
        if len(plan.slot_moves):
            check_moves(plan.slot_moves, [self.num_blocks * group.block_size for group in self.groups])
        if len(plan.table_updates):
            update_block_table(self._block_table, plan.table_updates, self.num_blocks)
        if len(plan.slot_moves):
            self.move_kv(plan.slot_moves)
        if swaps and self._host is not None:
            self._host.start(plan, self._pool.whole)
        if len(plan.copies):
            copy_blocks(self._pool.whole, plan.copies)

    @property
    def host_pool(self) -> Any:
        """The memory of the host tier, in the library that made it; None where there is none."""
        self._refuse_packed("host_pool", "apply")
        return None if self._host is None else self._host.pool

    def finished_transfers(self, ids: Any) -> Any:
        """Return those of these transfers that have ended; `Scheduler.transfers_done` wants to know.

        Parameters
        ----------
        ids : array, shape (k,), int64
            Transfers, as `Scheduler.outstanding_transfers` lists them.

        Returns
        -------
        array, int64
            On the CPU, those that `apply` has started; beside a GPU, those of them whose copies are done.
        """
        return ids[:0] if self._host is None else self._host.finished(ids)

    def _refuse_packed(self, what: str, instead: str) -> None:
        if self.packed:
            raise UnsupportedError(f"{what}: expected keys in the natural layout, found packed keys: see {instead}")

    def append_kv(
        self, layer: int, k: Any, v: Any, slot_mapping: Any, *, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        """Write keys and values of new tokens into their slots.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.
        k, v : array, shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
            One row per token; converted where the cache is of another type.
        slot_mapping : array, shape (num_tokens,), int64
            ``block * block_size + offset`` of each token in the blocks of the layer's group; -1 is skipped. Where a
            slot comes twice, the later token wins.
        k_scale, v_scale : array, shape (1,) or (num_kv_heads,), float32, optional
            What keys and values are divided by before they are rounded to FP8, for all KV heads or each; attention
            needs the same. Only for a layer that is FP8.
        """
        append_kv(k, v, *self._find(self._pool.operands, layer), slot_mapping, k_scale=k_scale, v_scale=v_scale)

    def copy_blocks(self, pairs: Any) -> None:
        """Copy whole blocks over all layers.

        Parameters
        ----------
        pairs : array, shape (k, 2), int32
            Source and destination blocks. A destination comes once and is no source.
        """
        copy_blocks(self._pool.whole, pairs)

    def move_kv(self, slot_moves: Any) -> None:
        """Move single tokens over all layers of their groups.

        Parameters
        ----------
        slot_moves : array, shape (k, 3), int64
            Cache group, source slot and destination slot. All sources of a group are read before any destination is
            written; groups share no block.
        """
        for number, view in enumerate(self._pool.groups):
            move_kv(view, slot_moves, number)

    def gather_kv(
        self,
        layer: int,
        seq_lens: Any,
        rows: Any = None,
        *,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
    ) -> tuple[Any, Any]:
        """Collect the keys and values of whole sequences.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.
        seq_lens : array, shape (num_seqs,), int32
            How many tokens of each sequence.
        rows : array, shape (num_seqs,), int32, optional
            The row of the block table of each sequence; by default sequence ``s`` has row ``s``.
        k_scale, v_scale : array, shape (1,) or (num_kv_heads,), float32, optional
            What stored FP8 keys and values are multiplied by, where `out` is not FP8.
        out : pair of arrays, shape (sum(seq_lens), num_kv_heads, head_dim), optional
            Where to write, as numbers of its type or, in the layer's FP8, as they are stored.

        Returns
        -------
        k, v : array, shape (sum(seq_lens), num_kv_heads, head_dim)
            Copies, sequence after sequence: `out`, or contiguous arrays of the layer's type in the library that was
            chosen as backend. Tokens whose block has left the layer's window come from the null block, which holds
            nothing of meaning.
        """
        caches = self._find(self._pool.operands, layer)
        number = self.group_of(layer)
        table, scales = self._tables[number], {"k_scale": k_scale, "v_scale": v_scale}
        if out is not None or runs_kernels(caches[0]):
            return gather_kv(*caches, table, seq_lens, rows, **scales, out=out)
        group = self.groups[number]
        num_tokens = _core.num_gathered_tokens(caches[0], table, seq_lens, rows)
        shape = (num_tokens, group.num_kv_heads, group.head_dim)
        k, v = (make_blocks(self._backend, shape, group.dtype) for _ in range(2))
        as_stored = (_core.from_dlpack(k, group.dtype), _core.from_dlpack(v, group.dtype))
        gather_kv(*caches, table, seq_lens, rows, **scales, out=as_stored)
        return k, v

    def _find(self, by_layer: dict[int, _Found], layer: int) -> _Found:
        number = layer if type(layer) is int else integer("layer", layer)
        found = by_layer.get(number)
        if found is None:
            raise InvalidArgumentError(f"layer: expected 0 to {self.num_layers - 1}, found {number}")
        return found
