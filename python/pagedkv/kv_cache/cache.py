"""`KVCache`: the blocks of all layers, and the block table that kernels read."""

from typing import Any, Literal, Self

from pagedkv import _core
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kv_cache.memory import ITEM_BYTES, is_sliceable, make_blocks, make_table
from pagedkv.kv_cache.ops import append_kv, copy_blocks, gather_kv

_UNSUPPORTED_DTYPES = ("float8_e4m3fn", "float8_e5m2")


class KVCache:
    """Keys and values of all layers in blocks of fixed size, and the block table that kernels read.

    The pool has shape ``(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)``; keys are at index 0 of the
    third dimension, values at index 1. In the "block" layout a block is one span of memory over all its layers, so
    copying it is one copy; in the "layer" layout each layer is one span and the strides differ. Both go down the same
    path.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool, the null block 0 included.
    block_size : int
        Tokens per block.
    num_layers, num_kv_heads, head_dim : int
        The model's sizes.
    dtype : str or torch.dtype
        "float32", "float16" or "bfloat16".
    max_num_seqs : int
        Rows of the block table.
    max_blocks_per_seq : int
        Columns of the block table.
    layout : {"block", "layer"}
        Which dimension is outermost in memory; ignored when `pool` is given.
    backend : {"torch", "numpy"}
        The library that makes the memory. NumPy holds bfloat16 as uint16.
    device : str
        Where to make it; the CPU only.
    pool : array, shape (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), optional
        Memory to use in place, from any library that speaks DLPack, with any strides as long as `head_dim` is
        contiguous.
    block_table : array, shape (1, max_num_seqs, max_blocks_per_seq), int32, optional
        Memory to use in place for the block table.

    Attributes
    ----------
    num_blocks, block_size, num_layers, num_kv_heads, head_dim : int
        As given.
    dtype : str
        Name of the element type.
    pool : array
        The whole memory, in the library that made it.
    block_table : array, shape (1, max_num_seqs, max_blocks_per_seq), int32
        Block ids by cache group, row and column; it never moves.

    Raises
    ------
    UnsupportedError
        If `dtype` or `device` waits for a later version.
    TypeError, InvalidArgumentError
        If an argument is out of its range, or given memory does not have the shape and type that it should.

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
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = _dtype_name(dtype)
        _check_sizes(self, max_num_seqs=max_num_seqs, max_blocks_per_seq=max_blocks_per_seq)
        _check_place(layout, backend, device)
        self._backend = backend
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        self.pool = _make_pool(backend, shape, self.dtype, layout) if pool is None else pool
        self._pool = _import("pool", self.pool, shape, self.dtype)
        table_shape = (1, max_num_seqs, max_blocks_per_seq)
        self.block_table = make_table(backend, table_shape) if block_table is None else block_table
        self._block_table = _import("block_table", self.block_table, table_shape, "int32")
        self._tensors = [_select_layer(self._pool, layer) for layer in range(num_layers)]
        self._layers = [_slice_layer(self.pool, layer) or self._tensors[layer] for layer in range(num_layers)]

    @classmethod
    def from_config(cls, cache_config: Any, scheduler_config: Any, **options: Any) -> Self:
        """Make the memory that a scheduler of these configurations hands out blocks of.

        Parameters
        ----------
        cache_config : CacheConfig
            Blocks and the one group of layers.
        scheduler_config : SchedulerConfig
            Sequences and their longest length, which size the block table.
        **options
            `layout`, `backend`, `device`, `pool`, `block_table` as for the class.

        Returns
        -------
        KVCache
            The memory.

        Raises
        ------
        UnsupportedError
            If the configuration has more than one group.
        """
        if len(cache_config.groups) != 1:
            raise UnsupportedError(f"cache_config.groups: KVCache holds one group, found {len(cache_config.groups)}")
        group = cache_config.groups[0]
        max_tokens = scheduler_config.max_model_len + scheduler_config.lookahead
        return cls(
            cache_config.num_blocks,
            cache_config.block_size,
            group.num_layers,
            group.num_kv_heads,
            group.head_dim,
            group.dtype,
            max_num_seqs=scheduler_config.max_num_seqs,
            max_blocks_per_seq=-(-max_tokens // cache_config.block_size),
            **options,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        elements = self.num_blocks * self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * ITEM_BYTES[self.dtype]

    @property
    def device(self) -> str:
        """Where the memory lies."""
        return self._pool.device

    def layer(self, layer: int) -> tuple[Any, Any]:
        """Return the keys and the values of a layer, as views.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.

        Returns
        -------
        k_cache, v_cache : array, shape (num_blocks, num_kv_heads, block_size, head_dim)
            Views in the library of the pool; `Tensor` where that is neither torch nor NumPy.
        """
        return self._layers[self._check_layer(layer)]

    def layer_tensors(self, layer: int) -> tuple[_core.Tensor, _core.Tensor]:
        """Return the keys and the values of a layer as imported tensors.

        Operations take them without importing them again, and they know the element type where NumPy does not.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.

        Returns
        -------
        k_cache, v_cache : Tensor, shape (num_blocks, num_kv_heads, block_size, head_dim)
            Views of the pool.
        """
        return self._tensors[self._check_layer(layer)]

    def apply(self, plan: Any) -> None:
        """Do what a plan asks of the memory before the model runs: table updates, then copies.

        Parameters
        ----------
        plan : StepPlan
            What `Scheduler.schedule` returned. Applying it again changes nothing, as long as the model has not run.

        Raises
        ------
        UnsupportedError
            If the plan has slot moves or swaps; nothing is written then.
        InvalidArgumentError
            If it names cells or blocks that the memory does not have; nothing is written then.
        """
        for name in ("slot_moves", "swap_out", "swap_in"):
            if len(getattr(plan, name)):
                raise UnsupportedError(f"plan.{name}: KVCache.apply does not support them yet")
        if len(plan.copies) and not 0 <= plan.copies.min() <= plan.copies.max() < self.num_blocks:
            raise InvalidArgumentError(
                f"plan.copies: expected blocks below {self.num_blocks}, found {plan.copies.max()}"
            )
        if len(plan.table_updates):
            _core.update_block_table(self._block_table, plan.table_updates)
        if len(plan.copies):
            copy_blocks(self._pool, plan.copies)

    def append_kv(self, layer: int, k: Any, v: Any, slot_mapping: Any) -> None:
        """Write keys and values of new tokens into their slots.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.
        k, v : array, shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
            One row per token; converted where the cache is of another type.
        slot_mapping : array, shape (num_tokens,), int64
            ``block * block_size + offset`` of each token; -1 is skipped. Where a slot comes twice, the later token
            wins.
        """
        append_kv(k, v, *self.layer_tensors(layer), slot_mapping)

    def copy_blocks(self, pairs: Any) -> None:
        """Copy whole blocks over all layers.

        Parameters
        ----------
        pairs : array, shape (k, 2), int32
            Source and destination blocks. A destination comes once and is no source.
        """
        copy_blocks(self._pool, pairs)

    def gather_kv(self, layer: int, seq_lens: Any, rows: Any = None) -> tuple[Any, Any]:
        """Collect the keys and values of whole sequences.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.
        seq_lens : array, shape (num_seqs,), int32
            How many tokens of each sequence.
        rows : array, shape (num_seqs,), int32, optional
            The row of the block table of each sequence; by default sequence ``s`` has row ``s``.

        Returns
        -------
        k, v : array, shape (sum(seq_lens), num_kv_heads, head_dim)
            Contiguous copies, sequence after sequence, in the library that was chosen as backend.
        """
        num_tokens = max(0, sum(int(length) for length in seq_lens))
        shape = (num_tokens, self.num_kv_heads, self.head_dim)
        k, v = (make_blocks(self._backend, shape, self.dtype) for _ in range(2))
        out = (_core.from_dlpack(k, self.dtype), _core.from_dlpack(v, self.dtype))
        gather_kv(*self.layer_tensors(layer), self._block_table.select(0, 0), seq_lens, rows, out=out)
        return k, v

    def _check_layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise InvalidArgumentError(f"layer: expected 0 to {self.num_layers - 1}, found {layer}")
        return layer


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name in _UNSUPPORTED_DTYPES:
        raise UnsupportedError(f"dtype: KVCache does not support {name} yet")
    _check_choice("dtype", name, tuple(ITEM_BYTES))
    return name


def _check_choice(argument: str, found: str, choices: tuple[str, ...]) -> None:
    if found not in choices:
        raise InvalidArgumentError(f"{argument}: expected one of {', '.join(choices)}, found {found!r}")


def _check_place(layout: str, backend: str, device: Any) -> None:
    _check_choice("layout", layout, ("block", "layer"))
    _check_choice("backend", backend, ("torch", "numpy"))
    if str(device) != "cpu":
        raise UnsupportedError(f"device: KVCache makes memory on the cpu only, found {device!s}")


def _check_sizes(cache: KVCache, **table_sizes: int) -> None:
    names = ("num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim")
    sizes = {name: getattr(cache, name) for name in names} | table_sizes
    for name, size in sizes.items():
        if size < 1:
            raise InvalidArgumentError(f"{name}: expected at least 1, found {size}")


def _make_pool(backend: str, shape: tuple[int, ...], dtype: str, layout: str) -> Any:
    if layout == "block":
        return make_blocks(backend, shape, dtype)
    num_blocks, num_layers, *rest = shape
    return make_blocks(backend, (num_layers, num_blocks, *rest), dtype).swapaxes(0, 1)


def _import(argument: str, array: Any, shape: tuple[int, ...], dtype: str) -> _core.Tensor:
    tensor = _core.from_dlpack(array, dtype, argument=argument)
    if tensor.shape != shape:
        raise InvalidArgumentError(f"{argument}: expected shape {shape}, found {tensor.shape}")
    if tensor.readonly:
        raise InvalidArgumentError(f"{argument}: expected writable memory, found a read-only array")
    return tensor


def _select_layer(pool: _core.Tensor, layer: int) -> tuple[_core.Tensor, _core.Tensor]:
    layer_tensor = pool.select(1, layer)
    return layer_tensor.select(1, 0), layer_tensor.select(1, 1)


def _slice_layer(pool: Any, layer: int) -> tuple[Any, Any] | None:
    return (pool[:, layer, 0], pool[:, layer, 1]) if is_sliceable(pool) else None
