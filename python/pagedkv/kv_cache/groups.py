"""Cache groups: layers that share a row of the block table, and how they see the bytes of a block."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, overload

from pagedkv import _core
from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kv_cache.checks import dtype_name
from pagedkv.kv_cache.memory import ITEM_BYTES, is_sliceable, reinterpret

_Attribute = TypeVar("_Attribute")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one shape that share block ids.

    Parameters
    ----------
    layers : tuple of int
        The model's layers, in the order of their slots in a block.
    num_kv_heads, head_dim, block_size : int
        Shape of a layer's keys in a block.
    dtype : str
        Name of the element type.
    sliding_window : int, optional
        Tokens that a query sees, itself included; blocks wholly before them need not be there.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    sliding_window: int | None = None

    @property
    def slot_shape(self) -> tuple[int, int, int, int]:
        """Shape of one layer's keys and values in a block."""
        return (2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one layer's keys and values in a block."""
        return math.prod(self.slot_shape) * ITEM_BYTES[self.dtype]


class OfEveryGroup(Generic[_Attribute]):
    """An attribute of a cache that its groups have alike; an AttributeError where they differ.

    Parameters
    ----------
    doc : str
        What it is.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, cache: None, owner: type) -> Self: ...
    @overload
    def __get__(self, cache: Any, owner: type) -> _Attribute: ...
    def __get__(self, cache: Any, owner: type) -> Any:
        if cache is None:
            return self
        found = [getattr(group, self._name) for group in cache.groups]
        if any(other != found[0] for other in found):
            raise AttributeError(f"{self._name}: the groups differ, {found}: ask groups[group_of(layer)]")
        return found[0]


def groups_of(cache_config: Any) -> tuple[tuple[CacheGroup, ...], int]:
    """Return the groups of a configuration as blocks hold them, and the layers that a block has room for.

    Parameters
    ----------
    cache_config : CacheConfig
        The configuration.

    Returns
    -------
    groups : tuple of CacheGroup
        The groups, split where they have more layers than a block has room for.
    num_layer_slots : int
        Layers that a block has room for.
    """
    if not cache_config.groups:
        raise InvalidArgumentError("cache_config: expected groups that describe the layers, found none")
    groups = tuple(
        CacheGroup(
            tuple(group.layers),
            group.num_kv_heads,
            group.head_dim,
            group.block_size,
            dtype_name(group.dtype),
            group.sliding_window,
        )
        for group in cache_config.groups
    )
    return groups, cache_config.num_layer_slots


def place_layers(groups: Sequence[CacheGroup]) -> dict[int, tuple[int, int]]:
    """Return the group and the slot of each layer.

    Parameters
    ----------
    groups : sequence of CacheGroup
        The groups of one pool.

    Returns
    -------
    dict of int to (int, int)
        Index of the group, and place of the layer in the group's blocks, by layer.

    Raises
    ------
    InvalidArgumentError
        If a layer comes twice, or blocks of the groups differ in bytes.
    """
    slot_bytes = [group.slot_bytes for group in groups]
    if len(set(slot_bytes)) > 1:
        raise InvalidArgumentError(f"groups: expected equal bytes per block and layer, found {slot_bytes}")
    places: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        for slot, layer in enumerate(group.layers):
            if layer in places:
                raise InvalidArgumentError(f"groups: expected each layer once, found layer {layer} again")
            places[layer] = (number, slot)
    return places


def view_tensor(pool: _core.Tensor, group: CacheGroup) -> _core.Tensor:
    """Return the pool as the layers of a group see it.

    Parameters
    ----------
    pool : Tensor, shape (num_blocks, num_layer_slots, 2, num_kv_heads, block_size, head_dim)
        The pool as any group of it sees it.
    group : CacheGroup
        The group.

    Returns
    -------
    Tensor
        The same memory in the group's shape and element type.

    Raises
    ------
    InvalidArgumentError
        If the group's shape differs and a layer's part of a block is not one span of memory.
    """
    if pool.shape[2:] == group.slot_shape and pool.dtype == group.dtype:
        return pool
    return pool.reinterpret(2, group.slot_shape, group.dtype, argument="pool")


def view_array(pool: Any, like: CacheGroup, group: CacheGroup) -> Any:
    """Return an array of torch or NumPy as the layers of a group see it, or None for one of another library.

    Parameters
    ----------
    pool : array
        The pool in the shape of `like`, which `view_tensor` accepted.
    like, group : CacheGroup
        The group that the pool has the shape of, and the one that looks at it.

    Returns
    -------
    array or None
        A view.
    """
    if not is_sliceable(pool):
        return None
    if (like.slot_shape, like.dtype) == (group.slot_shape, group.dtype):
        return pool
    return reinterpret(pool, group.slot_shape, group.dtype)
