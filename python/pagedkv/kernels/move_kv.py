"""Launches `move_kv`: moves single tokens over all layers of a pool."""

from typing import TYPE_CHECKING

from pagedkv.kernels.checked import Parameters
from pagedkv.kernels.dims import strides
from pagedkv.kernels.launch import launcher_of, run
from pagedkv.kernels.rows import copying_variant

if TYPE_CHECKING:
    import torch

_WRITTEN = frozenset({"cache"})


def move_kv(pool: "torch.Tensor", slot_moves: "torch.Tensor", group: int) -> None:
    """Move single tokens over all layers.

    Parameters
    ----------
    pool : torch.Tensor, shape (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        The pool; modified. The last dimension is contiguous.
    slot_moves : torch.Tensor, shape (num_moves, 3), int64, contiguous
        Cache group, source and destination, on the pool's device; not looked at. Moves are done in order: no
        destination comes twice, and none is the source of a later move.
    group : int
        The moves of which group are done.
    """
    num_moves = len(slot_moves)
    if num_moves == 0 or pool.numel() == 0:
        return
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    variant = copying_variant("move_kv", pool)
    row_vectors = head_dim * pool.element_size() // int(variant.macros["PKV_VECTOR_BYTES"])
    block_stride, layer_stride, side_stride, head_stride, slot_stride, _ = strides(pool)
    values = {
        "num_moves": num_moves,
        "group": group,
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "block_size": block_size,
        "head_dim": head_dim,
        "layout": (block_stride, head_stride, slot_stride),
        "layer_stride": layer_stride,
        "side_stride": side_stride,
        "element_bytes": pool.element_size(),
        "unused": 0,
    }
    arrays = {"cache": pool, "slot_moves": slot_moves}
    grid = -(-2 * num_layers * num_kv_heads * row_vectors // variant.threads)
    run(launcher_of(pool.device), variant, Parameters("move_kv", values, [], []), arrays, _WRITTEN, grid)
