"""What the attention layers of a model need to know of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from pagedkv.attention import paged_attention
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
    slot_mapping : array, shape (num_tokens,), int64
        Where the keys and values of each new token go.
    block_table : array, shape (num_rows, max_blocks_per_seq), int32
        Block ids by row.
    rows : array, shape (num_seqs,), int32
        The row of each sequence.
    seq_lens : array, shape (num_seqs,), int32
        Tokens of each sequence, those of this step included.
    query_start_loc : array, shape (num_seqs + 1,), int32
        Where each sequence's new tokens start.

    Notes
    -----
    Arrays come from any library that speaks DLPack. `from_plan` imports them once for all layers.
    """

    kv_cache: KVCache
    slot_mapping: Any
    block_table: Any
    rows: Any
    seq_lens: Any
    query_start_loc: Any

    @classmethod
    def from_plan(cls, plan: Any, kv_cache: KVCache) -> Self:
        """Take the arrays of a plan as they are.

        Parameters
        ----------
        plan : StepPlan
            What `Scheduler.schedule` returned.
        kv_cache : KVCache
            The memory, to which the plan was applied.

        Returns
        -------
        AttentionMetadata
            The step, for cache group 0.
        """
        arrays = (plan.slot_mapping[0], kv_cache.block_table[0], plan.rows, plan.seq_lens, plan.query_start_loc)
        return cls(kv_cache, *(from_dlpack(array) for array in arrays))

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
        softmax_scale, sliding_window, soft_cap
            As for `paged_attention`.

        Returns
        -------
        torch.Tensor, shape (num_tokens, num_q_heads, head_dim)
            The result, in the dtype of `q`.
        """
        self.kv_cache.append_kv(layer, k, v, self.slot_mapping)
        out: torch.Tensor = paged_attention(
            q,
            *self.kv_cache.layer_tensors(layer),
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.rows,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        return out
