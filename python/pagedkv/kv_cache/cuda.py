"""Cache operations on a GPU: checks what lies on the host, brings it over, launches kernels."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedkv import _core
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kernels.append_kv import append_kv as _append_kv
from pagedkv.kernels.copy_blocks import copy_blocks as _copy_blocks
from pagedkv.kernels.dims import CACHED, POOL, Dims, check_distinct, dtype_name
from pagedkv.kernels.gather_kv import gather_kv as _gather_kv
from pagedkv.kernels.move_kv import move_kv as _move_kv
from pagedkv.kv_cache.checks import check_apart
from pagedkv.kv_cache.device import as_tensor, on_host, optional_tensor, uploaded

if TYPE_CHECKING:
    import torch

_Ints = NDArray[Any]


def append_kv(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *, k_scale: Any = None, v_scale: Any = None
) -> None:
    """Write keys and values of new tokens into their slots; see `pagedkv.kv_cache.append_kv`.

    Slots that lie on the host are checked and taken over; those on the device are not looked at.
    """
    k_cache, v_cache = as_tensor("k_cache", k_cache), as_tensor("v_cache", v_cache)
    slots = slot_mapping
    if not _lies_on(slots, k_cache.device):
        slots = uploaded(_checked_slots(slots, k_cache), k_cache.device, argument="slot_mapping")
    _append_kv(
        as_tensor("k", k),
        as_tensor("v", v),
        k_cache,
        v_cache,
        as_tensor("slot_mapping", slots),
        k_scale=optional_tensor("k_scale", k_scale),
        v_scale=optional_tensor("v_scale", v_scale),
    )


def copy_blocks(pool: Any, pairs: Any) -> None:
    """Copy whole blocks over all layers; see `pagedkv.kv_cache.copy_blocks`."""
    pool = _checked_pool("pool", pool)
    pairs = _integers("pairs", pairs, "int32", 2)
    _check_pairs(pairs, (len(pool), len(pool)))
    sources, destinations = pairs.T
    if (both := np.isin(destinations, sources)).any():
        index = int(both.argmax())
        raise InvalidArgumentError(
            f"pairs[{index}, 1]: expected no block that is a source too, found {destinations[index]}"
        )
    _copy_blocks(pool, uploaded(pairs, pool.device, argument="pairs"))


def move_kv(pool: Any, slot_moves: Any, group: int = 0) -> None:
    """Move single tokens over all layers; see `pagedkv.kv_cache.move_kv`."""
    pool = _checked_pool("pool", pool)
    moves = _integers("slot_moves", slot_moves, "int64", 3)
    index = np.flatnonzero(moves[:, 0] == group)
    num_slots = pool.shape[0] * pool.shape[4]
    for side in (1, 2):
        _check_range("slot_moves", moves, index, side, "a slot", num_slots)
    _check_once("slot_moves", moves, index, 2)
    ordered = _in_order(moves[index])
    if len(ordered):
        _move_kv(pool, uploaded(ordered, pool.device, argument="slot_moves"), int(group))


def swap_blocks(source: Any, destination: Any, pairs: Any) -> None:
    """Copy whole blocks over all layers from one pool to another; see `pagedkv.kv_cache.swap_blocks`.

    Neighbours that stay neighbours are one copy. Copies are made in the order of the current stream; where the host's
    memory is not page-locked, the host waits for them.
    """
    import torch

    source = as_tensor("source", source)
    destination = as_tensor("destination", destination)
    dims = Dims(source.device)
    dims.check("source", source, POOL, CACHED)
    other = Dims(destination.device)
    other.check("destination", destination, POOL, (dtype_name(source),))
    if source.shape[1:] != destination.shape[1:]:
        expected = ", ".join(map(str, source.shape[1:]))
        raise InvalidArgumentError(
            f"destination: expected shape (num_blocks, {expected}), found {tuple(destination.shape)}"
        )
    check_distinct("destination", destination)
    check_apart("destination", _core.from_dlpack(destination), "source", _core.from_dlpack(source))
    pairs = _integers("pairs", pairs, "int32", 2)
    _check_pairs(pairs, (len(source), len(destination)))
    whole = source[:1].is_contiguous() and destination[:1].is_contiguous()
    layers = [slice(None)] if whole else list(range(source.shape[1]))
    for start, end, length in _runs(pairs):
        for layer in layers:
            to, of = destination[end : end + length, layer], source[start : start + length, layer]
            to.view(torch.uint8).copy_(of.view(torch.uint8), non_blocking=True)


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
    """Collect the keys and values of whole sequences; see `pagedkv.kv_cache.gather_kv`.

    Lengths and rows are checked on the host, wherever they lie; block ids are not looked at.
    """
    import torch

    k_cache, v_cache = as_tensor("k_cache", k_cache), as_tensor("v_cache", v_cache)
    table = as_tensor("block_table", block_table)
    if k_cache.ndim != 4 or table.ndim != 2:
        name, expected, found = (
            ("k_cache", "(num_blocks, num_kv_heads, block_size, head_dim)", k_cache)
            if k_cache.ndim != 4
            else ("block_table", "(num_rows, max_blocks_per_seq)", table)
        )
        raise InvalidArgumentError(f"{name}: expected shape {expected}, found {tuple(found.shape)}")
    lens = _integers("seq_lens", seq_lens, "int32")
    _check_lens(lens, table.shape[1] * k_cache.shape[2])
    starts = np.cumsum([0, *lens], dtype=np.int64)
    num_tokens = int(starts[-1])
    if num_tokens >= 1 << 31:
        raise UnsupportedError(f"seq_lens: expected fewer than 2^31 tokens in all on a GPU, found {num_tokens}")
    on_device_rows = None
    if rows is not None or len(lens) > len(table):
        wanted = np.arange(len(lens), dtype=np.int32) if rows is None else _integers("rows", rows, "int32")
        if len(wanted) != len(lens):
            raise InvalidArgumentError(f"rows: expected shape (num_seqs={len(lens)},), found ({len(wanted)},)")
        _check_range("rows", wanted[:, None], np.arange(len(wanted)), 0, "a row", len(table))
        on_device_rows = uploaded(wanted, k_cache.device, argument="rows")
    if out is None:
        shape = (num_tokens, k_cache.shape[1], k_cache.shape[3])
        out = tuple(torch.empty(shape, dtype=c.dtype, device=c.device) for c in (k_cache, v_cache))
    _gather_kv(
        k_cache,
        v_cache,
        table,
        uploaded(starts.astype(np.int32), k_cache.device, argument="seq_lens"),
        on_device_rows,
        as_tensor("k_out", out[0]),
        as_tensor("v_out", out[1]),
        num_tokens=num_tokens,
        k_scale=optional_tensor("k_scale", k_scale),
        v_scale=optional_tensor("v_scale", v_scale),
    )
    return out[0], out[1]


def update_block_table(block_table: Any, table_updates: Any, num_blocks: int) -> None:
    """Write cells of a block table in the order of the current stream; see `pagedkv.kv_cache.ops`."""
    table = as_tensor("block_table", block_table)
    updates = _integers("table_updates", table_updates, "int32", 4)
    every = np.arange(len(updates))
    for side, (what, limit) in enumerate(zip(("a group", "a row", "a column"), table.shape, strict=True)):
        _check_range("table_updates", updates, every, side, what, limit)
    _check_range("table_updates", updates, every, 3, "a block", num_blocks)
    cells = np.ravel_multi_index(tuple(updates[:, :3].T), tuple(table.shape))
    _, from_the_end = np.unique(cells[::-1], return_index=True)
    last = len(cells) - 1 - from_the_end
    on_device = uploaded(updates[last].T.astype(np.int64), table.device, argument="table_updates")
    group, row, column, block = on_device
    table[group, row, column] = block.to(table.dtype)


def _lies_on(array: Any, device: "torch.device") -> bool:
    import torch

    return device.type != "cpu" and isinstance(array, torch.Tensor) and array.device == device


def _integers(argument: str, array: Any, dtype: str, columns: int | None = None) -> _Ints:
    """Return an index array as NumPy's on the host: of one dimension, or of two with so many columns."""
    tensor = _core.from_dlpack(on_host(argument, array), argument=argument)
    if tensor.dtype != dtype:
        raise TypeError(f"{argument}: expected dtype {dtype}, found {tensor.dtype}")
    shape = tensor.shape
    if columns is None and len(shape) != 1:
        raise InvalidArgumentError(f"{argument}: expected shape (n,), found {shape}")
    if columns is not None and (len(shape) != 2 or shape[1] != columns):
        raise InvalidArgumentError(f"{argument}: expected shape (n, {columns}), found {shape}")
    return np.from_dlpack(tensor).copy()


def _checked_pool(argument: str, array: Any) -> "torch.Tensor":
    pool = as_tensor(argument, array)
    dims = Dims(pool.device)
    dims.check(argument, pool, POOL, CACHED)
    check_distinct(argument, pool)
    return pool


def _checked_slots(slot_mapping: Any, cache: "torch.Tensor") -> _Ints:
    """Return slots that are in the cache, each once: where one comes twice, the later token wins."""
    slots = _integers("slot_mapping", slot_mapping, "int64")
    num_slots = cache.shape[0] * cache.shape[2] if cache.ndim == 4 else 0
    wrong = (slots < -1) | (slots >= num_slots)
    if wrong.any():
        index = int(wrong.argmax())
        expected = f"-1 or a slot below {num_slots}"
        raise InvalidArgumentError(f"slot_mapping[{index}]: expected {expected}, found {slots[index]}")
    _, from_the_end = np.unique(slots[::-1], return_index=True)
    last = np.zeros(len(slots), bool)
    last[len(slots) - 1 - from_the_end] = True
    slots[~last] = -1
    return slots


def _check_lens(lens: _Ints, most: int) -> None:
    wrong = (lens < 0) | (lens > most)
    if wrong.any():
        index = int(wrong.argmax())
        raise InvalidArgumentError(f"seq_lens[{index}]: expected 0 to {most}, found {lens[index]}")


def _check_pairs(pairs: _Ints, num_blocks: tuple[int, int]) -> None:
    every = np.arange(len(pairs))
    for side in (0, 1):
        _check_range("pairs", pairs, every, side, "a block", num_blocks[side])
    _check_once("pairs", pairs, every, 1)


def _check_range(argument: str, entries: _Ints, index: _Ints, side: int, what: str, limit: int) -> None:
    values = entries[index, side]
    wrong = (values < 0) | (values >= limit)
    if wrong.any():
        at = int(index[wrong.argmax()])
        place = f"{at}, {side}" if entries.shape[1] > 1 else f"{at}"
        raise InvalidArgumentError(f"{argument}[{place}]: expected {what} below {limit}, found {entries[at, side]}")


def _check_once(argument: str, entries: _Ints, index: _Ints, side: int) -> None:
    values = entries[index, side]
    order = np.argsort(values, kind="stable")
    twice = np.flatnonzero(values[order][1:] == values[order][:-1])
    if len(twice):
        at = int(index[order[twice[0] + 1]])
        raise InvalidArgumentError(
            f"{argument}[{at}, {side}]: expected each destination once, found {entries[at, side]}"
        )


def _in_order(moves: _Ints) -> _Ints:
    """Return moves in an order in which none writes what a later one reads; those of a step plan are in one already."""
    sources, destinations = moves[:, 1].tolist(), moves[:, 2].tolist()
    last_reader = {source: index for index, source in enumerate(sources)}
    if all(last_reader.get(slot, -1) <= index for index, slot in enumerate(destinations)):
        return moves
    writer = {slot: index for index, slot in enumerate(destinations)}
    waits_for = [0] * len(moves)  # of each move, the moves that still have to read its destination
    for index, slot in enumerate(sources):
        if (other := writer.get(slot, index)) != index:
            waits_for[other] += 1
    ready = [index for index, count in enumerate(waits_for) if count == 0]
    for index in ready:  # which grows
        if (other := writer.get(sources[index], index)) != index:
            waits_for[other] -= 1
            if waits_for[other] == 0:
                ready.append(other)
    if len(ready) < len(moves):
        slot = next(slot for index, slot in enumerate(destinations) if waits_for[index])
        raise UnsupportedError(
            f"slot_moves: expected no ring of slots that take each other's place on a GPU, found {slot}"
        )
    return moves[ready]


def _runs(pairs: _Ints) -> list[tuple[int, int, int]]:
    """Return the pairs as first source, first destination and length of runs in which both rise by one."""
    if len(pairs) == 0:
        return []
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(pairs)]
    return [(int(pairs[s, 0]), int(pairs[s, 1]), e - s) for s, e in zip(starts, ends, strict=True)]
