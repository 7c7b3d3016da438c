"""What the attention layers of a model need to know of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from pagedkv.attention import PagedAttention
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kv_cache import KVCache, Tensor, from_dlpack

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
    _by_group: list[tuple[Tensor, Tensor]] = field(init=False, repr=False, compare=False)
    _planned: dict[tuple[int, int, int | None], PagedAttention] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        slots, table = (from_dlpack(getattr(self, name), argument=name) for name in ("slot_mapping", "block_table"))
        groups = range(len(self.kv_cache.groups))
        for name, array in (("slot_mapping", slots), ("block_table", table)):
            if not array.shape or array.shape[0] != len(groups):
                raise InvalidArgumentError(
                    f"{name}: expected a first dimension of num_groups={len(groups)}, found shape {array.shape}"
                )
        object.__setattr__(self, "_by_group", [(slots.select(0, g), table.select(0, g)) for g in groups])

    @classmethod
    def from_plan(cls, plan: Any, kv_cache: KVCache, *, k_scale: Any = None, v_scale: Any = None) -> Self:
        """Take the arrays of a plan as they are.

        Parameters
        ----------
        plan : StepPlan
            What `Scheduler.schedule` returned.
        kv_cache : KVCache
            The memory, to which the plan was applied.
        k_scale, v_scale : array, shape (1,) or (num_kv_heads,), float32, optional
            What stored FP8 keys and values must be multiplied by, in every layer.

        Returns
        -------
        AttentionMetadata
            The step, for all cache groups.
        """
        arrays = (plan.slot_mapping, kv_cache.block_table, plan.rows, plan.seq_lens, plan.query_start_loc)
        slots, table, rows, seq_lens, starts = (from_dlpack(array) for array in arrays)
        return cls(kv_cache, slots, table, rows, seq_lens, starts, k_scale, v_scale)

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
            *self.kv_cache.layer_tensors(layer),
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
            group, block_table = self.kv_cache.groups[number], self._by_group[number][1]
            sizes = (num_q_heads, group.num_kv_heads, group.head_dim, group.block_size)
            planned = PagedAttention(*sizes, sliding_window=sliding_window)
            planned.plan(block_table, self.seq_lens, self.query_start_loc, self.rows)
            self._planned[kind] = planned
        return planned
