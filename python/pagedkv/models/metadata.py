"""What the attention layers of a model need to know of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from pagedkv.attention import PagedAttention
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kv_cache import KVCache, from_dlpack

if TYPE_CHECKING:
    import torch


class AttentionStep(Protocol):
    """Takes the attention of one layer after another during a forward pass."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of the new tokens, shape (num_tokens, num_q_heads, head_dim)."""
        ...


_current: ContextVar[AttentionStep | None] = ContextVar("pagedkv_attention_step", default=None)


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Hand a step to layers that the keyword does not reach.

    A few models, StableLM among them, take any keyword in ``forward`` and do not pass it down to their layers.

    Parameters
    ----------
    step : AttentionMetadata
        What `current_step` returns inside of the ``with`` block, in this thread or task.
    """
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def current_step() -> AttentionStep | None:
    """Return what the innermost `attention_step` handed over, or None."""
    return _current.get()


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's view of a cache: where new keys and values go, and which blocks each sequence reads.

    Give it to a transformers model as the keyword ``pagedkv`` of its forward pass.

    Parameters
    ----------
    kv_cache : KVCache
        The memory.
    slot_mapping : array, shape (num_groups, num_tokens), int64
        Where the keys and values of each new token go, by cache group.
    block_table : array, shape (num_groups, num_rows, max_blocks_per_seq), int32
        Block ids by cache group and row.
    rows : array, shape (num_seqs,), int32
        The row of each sequence.
    seq_lens : array, shape (num_seqs,), int32
        Tokens of each sequence, those of this step included.
    query_start_loc : array, shape (num_seqs + 1,), int32
        Where each sequence's new tokens start.
    k_scale, v_scale : array, shape (1,) or (num_kv_heads,), float32, optional
        What stored FP8 keys and values must be multiplied by, in every layer.

    Notes
    -----
    Arrays come from any library that speaks DLPack. They are imported once for all layers, and the batch is planned
    once per cache group, when its first layer attends: make another object for the next step.
    """

    kv_cache: KVCache
    slot_mapping: Any
    block_table: Any
    rows: Any
    seq_lens: Any
    query_start_loc: Any
    k_scale: Any = None
    v_scale: Any = None
    _by_group: list[tuple[Any, Any]] = field(init=False, repr=False, compare=False)
    _layer: Callable[[int], tuple[Any, Any]] = field(init=False, repr=False, compare=False)
    _planned: dict[tuple[int, int, int | None], PagedAttention] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        slots, table = (_sliceable(getattr(self, name), name) for name in ("slot_mapping", "block_table"))
        groups = range(len(self.kv_cache.groups))
        for name, array in (("slot_mapping", slots), ("block_table", table)):
            if not array.shape or array.shape[0] != len(groups):
                raise InvalidArgumentError(
                    f"{name}: expected a first dimension of num_groups={len(groups)}, found shape {array.shape}"
                )
        object.__setattr__(self, "_by_group", [(slots.select(0, g), table.select(0, g)) for g in groups])
        is_on_host = self.kv_cache.device.startswith("cpu")
        object.__setattr__(self, "_layer", self.kv_cache.layer_tensors if is_on_host else self.kv_cache.layer)

    @classmethod
    def from_plan(
        cls, plan: Any, kv_cache: KVCache, *, slot_mapping: Any = None, k_scale: Any = None, v_scale: Any = None
    ) -> Self:
        """Take the arrays of a plan as they are.

        Parameters
        ----------
        plan : StepPlan
            What `Scheduler.schedule` returned.
        kv_cache : KVCache
            The memory, to which the plan was applied.
        slot_mapping : array, shape (num_groups, num_tokens), int64, optional
            The plan's, where a copy of it lies on the device of the memory.
        k_scale, v_scale : array, shape (1,) or (num_kv_heads,), float32, optional
            What stored FP8 keys and values must be multiplied by, in every layer.

        Returns
        -------
        AttentionMetadata
            The step, for all cache groups.
        """
        slots = from_dlpack(plan.slot_mapping) if slot_mapping is None else slot_mapping
        rows, lens, starts = (from_dlpack(array) for array in (plan.rows, plan.seq_lens, plan.query_start_loc))
        return cls(kv_cache, slots, kv_cache.block_table, rows, lens, starts, k_scale, v_scale)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the keys and values of the new tokens, then attend over the blocks.

        Parameters
        ----------
        layer : int
            Index of the layer, from 0.
        q : torch.Tensor, shape (num_tokens, num_q_heads, head_dim)
            Queries, sequence after sequence.
        k, v : torch.Tensor, shape (num_tokens, num_kv_heads, head_dim)
            New keys and values.
        softmax_scale, sliding_window, soft_cap, sinks
            As for `paged_attention`.

        Returns
        -------
        torch.Tensor, shape (num_tokens, num_q_heads, head_dim)
            The result, in the dtype of `q`.

        Raises
        ------
        UnsupportedError
            If the layer sees further back than its cache group keeps blocks.
        """
        number = self.kv_cache.group_of(layer)
        kept = self.kv_cache.groups[number].sliding_window
        if kept is not None and (sliding_window is None or sliding_window > kept):
            raise UnsupportedError(
                f"sliding_window: expected at most {kept}, which the cache group of layer {layer} keeps,"
                f" found {sliding_window}"
            )
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        self.kv_cache.append_kv(layer, k, v, self._by_group[number][0], **scales)
        out: torch.Tensor = self._attention(number, q.shape[1], sliding_window).run(
            q,
            *self._layer(layer),
            softmax_scale=softmax_scale,
            soft_cap=soft_cap,
            sinks=sinks,
            **scales,
        )
        return out

    def _attention(self, number: int, num_q_heads: int, sliding_window: int | None) -> PagedAttention:
        """Return the step's batch, planned for layers of a cache group that are alike."""
        kind = (number, num_q_heads, sliding_window)
        planned = self._planned.get(kind)
        if planned is None:
            planned = self.make_attention(number, num_q_heads, sliding_window)
            planned.plan(self.block_table_of(number), self.seq_lens, self.query_start_loc, self.rows)
            self._planned[kind] = planned
        return planned

    def block_table_of(self, number: int) -> Any:
        """Return the block table of a cache group."""
        return self._by_group[number][1]

    def make_attention(self, number: int, num_q_heads: int, sliding_window: int | None) -> PagedAttention:
        """Return attention for layers of a cache group that are alike, without a plan."""
        group = self.kv_cache.groups[number]
        sizes = (num_q_heads, group.num_kv_heads, group.head_dim, group.block_size)
        return PagedAttention(*sizes, sliding_window=sliding_window)


def _sliceable(array: Any, argument: str) -> Any:
    """Return an index array in a form that `select` works on: of a GPU a tensor of torch, else an imported one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor) and array.device.type != "cpu":
        return array
    return from_dlpack(array, argument=argument)
