"""Cache groups of a model: which of its layers share a block table, and what a sequence holds of each."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagedkv.config import GroupSpec, SchedulerConfig


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What an attention layer asks of the cache.

    Parameters
    ----------
    num_kv_heads, head_dim : int
        Shape of a token's keys and values.
    sliding_window : int, optional
        Tokens that a query sees, itself included.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


def group_layers(layers: Mapping[int, LayerShape], dtype: str, max_model_len: int | None = None) -> list[GroupSpec]:
    """Return the cache groups of layers: one for each shape and window that occurs.

    Parameters
    ----------
    layers : mapping of int to LayerShape
        What each layer asks for.
    dtype : str
        Element type of keys and values.
    max_model_len : int, optional
        Longest sequence. A window that holds it is none.

    Returns
    -------
    list of GroupSpec
        Layers that see everything first, then wide windows before narrow ones.

    Examples
    --------
    >>> window, full = LayerShape(2, 64, 32), LayerShape(2, 128, None)
    >>> [(group.layers, group.sliding_window) for group in group_layers({0: window, 1: window, 2: full}, "float32")]
    [([2], None), ([0, 1], 32)]
    >>> len(group_layers({0: window, 1: LayerShape(2, 64, None)}, "float32", max_model_len=32))
    1
    """
    shapes: dict[LayerShape, list[int]] = {}
    for layer, shape in sorted(layers.items()):
        window = shape.sliding_window
        if window is not None and max_model_len is not None and window >= max_model_len:
            window = None
        shapes.setdefault(LayerShape(shape.num_kv_heads, shape.head_dim, window), []).append(layer)
    return [
        GroupSpec(members, shape.num_kv_heads, shape.head_dim, dtype, sliding_window=shape.sliding_window)
        for shape, members in sorted(shapes.items(), key=lambda item: _widest_first(item[0]))
    ]


def _widest_first(shape: LayerShape) -> tuple[bool, int]:
    window = shape.sliding_window
    return (window is not None, -(window or 0))


def blocks_per_sequence(group: GroupSpec, limits: SchedulerConfig) -> int:
    """Return the most blocks that one sequence holds in a group: in a window group, the window and its last steps.

    Parameters
    ----------
    group : GroupSpec
        The group, as a `CacheConfig` has it.
    limits : SchedulerConfig
        Longest sequence, tokens per step, and plans in flight.

    Examples
    --------
    >>> limits = SchedulerConfig(max_model_len=4096, max_num_batched_tokens=256)
    >>> blocks_per_sequence(GroupSpec(1, 1, 64, block_size=16), limits)
    256
    >>> blocks_per_sequence(GroupSpec(1, 1, 64, block_size=16, sliding_window=512), limits)
    49
    """
    block_size = group.block_size or 1
    whole = -(-(limits.max_model_len + limits.lookahead) // block_size)
    if group.sliding_window is None:
        return whole
    in_flight = limits.max_plans_in_flight * limits.max_num_batched_tokens + limits.lookahead
    return min(whole, -(-(group.sliding_window - 1 + in_flight) // block_size) + 1)
