"""The pool as its groups, its layers and the operations see it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv import _core
from pagedkv.kv_cache.checks import import_memory
from pagedkv.kv_cache.groups import CacheGroup, view_array, view_tensor


class PoolViews:
    """Views of one pool.

    Parameters
    ----------
    array : array, shape (num_blocks, num_layer_slots, 2, num_kv_heads, block_size, head_dim)
        The memory, in the shape of the first group.
    shape : tuple of int
        The shape that it must have.
    groups : sequence of CacheGroup
        Who sees it.
    places : mapping of int to (int, int)
        The group and the slot of each layer.
    packed : bool
        Whether keys are packed.

    Attributes
    ----------
    tensor : Tensor
        The whole pool, imported.
    device : str
        Where it lies: "cpu", or as torch calls it.
    groups : list of Tensor
        The whole pool as each group sees it.
    tensors : dict of int to (Tensor, Tensor)
        Keys and values of each layer.
    layers : dict of int to (array, array)
        The same in the library of the memory, or `tensors` where that has no views.
    operands, whole
        What operations are handed of a layer and of the whole pool: kernels are launched on arrays, the CPU takes what
        it need not import again.
    """

    def __init__(
        self,
        array: Any,
        shape: tuple[int, ...],
        groups: Sequence[CacheGroup],
        places: Mapping[int, tuple[int, int]],
        *,
        packed: bool,
    ) -> None:
        natural = import_memory("pool", array, shape, groups[0].dtype)
        self.array = array
        self.tensor = natural.packed() if packed else natural
        self.device = "cpu" if natural.device.startswith("cpu") else natural.device
        views = [view_tensor(natural, group) for group in groups]
        self.groups = [view.packed() for view in views] if packed else views
        self.tensors: dict[int, tuple[_core.Tensor, _core.Tensor]] = {}
        self.layers: dict[int, tuple[Any, Any]] = {}
        sliceable = [view_array(array, groups[0], group) for group in groups]
        for layer, (group, slot) in places.items():
            both = self.groups[group].select(1, slot)
            self.tensors[layer] = (both.select(1, 0), both.select(1, 1))
            own = sliceable[group]
            self.layers[layer] = self.tensors[layer] if own is None else (own[:, slot, 0], own[:, slot, 1])
        self.operands: dict[int, tuple[Any, Any]] = self.tensors if self.device == "cpu" else self.layers
        self.whole: Any = self.tensor if self.device == "cpu" else array
