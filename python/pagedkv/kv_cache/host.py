"""The host tier: memory for the blocks of requests that are preempted by swap."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kv_cache.checks import import_memory
from pagedkv.kv_cache.memory import make_pool
from pagedkv.kv_cache.ops import swap_blocks
from pagedkv.kv_cache.transfers import SideStream, Synchronous

_Ids = NDArray[np.int64]


class HostTier:
    """Blocks in host memory, laid out like those of the device, and the transfers between the two.

    Parameters
    ----------
    num_blocks : int
        Blocks of the tier.
    block_shape : tuple of int
        ``(num_layer_slots, 2, num_kv_heads, block_size, head_dim)``.
    dtype : str
        Name of the element type.
    layout : {"block", "layer"}
        Which dimension is outermost in memory.
    backend : {"torch", "numpy"}
        The library that makes the memory.
    packed : bool
        Whether keys are packed, as on the device.
    device : str
        Where the other blocks are.

    Attributes
    ----------
    pool : array, shape (num_blocks, num_layer_slots, 2, num_kv_heads, block_size, head_dim)
        The memory, in the library that made it.

    Notes
    -----
    On the CPU a transfer has ended when it was started. Beside a GPU transfers are made one after another on a stream
    of their own, each behind all that was asked of the current stream before.
    """

    def __init__(
        self,
        num_blocks: int,
        block_shape: tuple[int, ...],
        dtype: str,
        layout: str,
        backend: str,
        *,
        packed: bool = False,
        device: str = "cpu",
    ) -> None:
        shape = (num_blocks, *block_shape)
        self.pool = make_pool(backend, shape, dtype, layout, page_locked=device != "cpu")
        self._transfers = Synchronous() if device == "cpu" else SideStream(device)
        natural = import_memory("host_pool", self.pool, shape, dtype)
        self._operand: Any = self.pool if device != "cpu" else natural.packed() if packed else natural
        self._num_blocks = num_blocks
        self._last_started = 0

    def outlive(self, device_pool: Any) -> None:
        """See to it that the device's memory is not handed out again while a transfer is under way."""
        self._transfers.outlive(device_pool)

    def check(self, plan: Any, num_blocks: int) -> None:
        """Refuse a plan that names blocks which the device or the tier does not have."""
        limits = {"swap_out": (num_blocks, self._num_blocks), "swap_in": (self._num_blocks, num_blocks)}
        for name, ends in limits.items():
            pairs = getattr(plan, name)
            if len(pairs) and ((pairs < 0) | (pairs >= ends)).any():
                wrong = pairs[((pairs < 0) | (pairs >= ends)).any(axis=1)][0].tolist()
                raise InvalidArgumentError(f"plan.{name}: expected pairs of blocks below {ends}, found {wrong}")

    def start(self, plan: Any, device: Any) -> None:
        """Start the transfers of a plan that were not started before: first those out, then those in."""
        out, back = plan.swap_out_ids > self._last_started, plan.swap_in_ids > self._last_started
        # Ids rise, and what a plan that did not run had told comes with the next: nothing up to here is left to start.
        last = max(int(ids.max(initial=0)) for ids in (plan.swap_out_ids, plan.swap_in_ids))
        with self._transfers.until(last):
            if out.any():
                swap_blocks(device, self._operand, plan.swap_out[out])
            if back.any():
                swap_blocks(self._operand, device, plan.swap_in[back])
        self._last_started = max(self._last_started, last)

    def finished(self, ids: _Ids) -> _Ids:
        """Return those of the transfers that have ended."""
        return ids[ids <= self._transfers.last_finished()]
