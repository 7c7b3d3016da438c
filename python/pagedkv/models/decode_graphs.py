"""Steps of one token per sequence, as captured graphs: one for each size of a batch, replayed for all plans."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from pagedkv.attention import PagedAttention
from pagedkv.kv_cache.device import uploaded
from pagedkv.models.metadata import AttentionMetadata
from pagedkv.models.plan_arrays import PlanArrays, input_tokens

if TYPE_CHECKING:
    from pagedkv.kv_cache import KVCache

logger = logging.getLogger(__name__)

# Batches are filled up to the next of these.
_SMALL = (1, 2, 4)
_STEP = 8
MAX_SEQUENCES = 256

Replay = Callable[[], object]
Capture = Callable[[Callable[[], torch.Tensor], torch.device], tuple[Replay, torch.Tensor]]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes that batches are filled up to.

    Parameters
    ----------
    max_num_seqs : int
        Sequences of the largest batch.

    Returns
    -------
    list of int
        Rising; batches beyond the last one are run without a graph.

    Examples
    --------
    >>> bucket_sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    largest = min(max_num_seqs, MAX_SEQUENCES)
    return sorted({*(size for size in (*_SMALL, *range(_STEP, largest, _STEP)) if size < largest), largest})


class GraphCapture:
    """Captures graphs that share their memory: of all of them one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor], device: torch.device) -> tuple[Replay, torch.Tensor]:
        """Capture what a function launches on a GPU.

        Parameters
        ----------
        run : callable
            Launches; was called once before, so that it loads nothing new.
        device : torch.device
            The GPU.

        Returns
        -------
        replay : callable
            Launches it all again.
        result : torch.Tensor
            Where the results are after a replay, until the next one of any graph.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile.
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result


class DecodeGraphs:
    """Runs plans of single tokens by graphs.

    Parameters
    ----------
    forward : callable
        Takes token ids, positions, rows of logits and the step; returns logits.
    kv_cache : KVCache
        The memory, whose arrays stay where they are.
    device : torch.device
        Where the model is.
    max_num_seqs : int
        Sequences of the largest batch.
    scales : dict
        `k_scale` and `v_scale`, as for `AttentionMetadata`.
    capture : callable, optional
        What makes a graph; a `GraphCapture` but for tests.

    Notes
    -----
    A graph is captured when its size comes up first, after one run without it. It reads the plan's arrays, its work
    lists and the block table where they were then; before each replay these are filled anew, in the stream's order.
    """

    def __init__(
        self,
        forward: Forward,
        kv_cache: KVCache,
        device: torch.device,
        max_num_seqs: int,
        scales: dict[str, Any],
        capture: Capture | None = None,
    ) -> None:
        self._forward = forward
        self._kv_cache = kv_cache
        self._device = device
        self._sizes = bucket_sizes(max_num_seqs)
        self._scales = scales
        self._capture = GraphCapture() if capture is None else capture
        self._buckets: dict[int, _Bucket] = {}
        # What a plan refers to may be of the largest plan before it, which had no graph perhaps.
        self._previous = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def takes(self, plan: Any, rows: Any, previous_tokens: torch.Tensor | None) -> bool:
        """Return whether a plan has a graph.

        Parameters
        ----------
        plan : StepPlan
            The plan.
        rows : numpy.ndarray or None
            Further rows of logits that are wanted.
        previous_tokens : torch.Tensor or None
            What the plan before drew.
        """
        num_seqs = len(plan.seq_lens)
        largest = self._sizes[-1] if self._sizes else 0
        is_decoding = plan.num_tokens == num_seqs == plan.num_samples and 0 < num_seqs <= largest
        fits = previous_tokens is None or len(previous_tokens) <= len(self._previous)
        return rows is None and is_decoding and fits

    def run(self, plan: Any, previous_tokens: torch.Tensor | None) -> torch.Tensor:
        """Run a plan that `takes` takes.

        Parameters
        ----------
        plan : StepPlan
            The plan, which was applied to the cache.
        previous_tokens : torch.Tensor, shape (num_samples of the plan before,), int32, or None
            What the plan before drew.

        Returns
        -------
        torch.Tensor, shape (num_samples, vocab_size)
            Logits, in memory that the next run of any size may write.
        """
        num_seqs = len(plan.seq_lens)
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        padded = plan.pad_to(size, size, size)
        if previous_tokens is not None and len(previous_tokens):
            self._previous[: len(previous_tokens)].copy_(previous_tokens)
        bucket = self._buckets.get(size)
        if bucket is None:
            return self._first(size, padded)[:num_seqs]
        bucket.fill(padded)
        bucket.replay()
        return bucket.logits[:num_seqs]

    def _first(self, size: int, padded: Any) -> torch.Tensor:
        """Run the first plan of a size, and capture a graph for those to come."""
        arena = uploaded(_fixed_part(padded), self._device)
        arrays = PlanArrays.within(padded, arena)
        step = _StaticStep.of(padded, self._kv_cache, arrays, self._scales)
        step.set_size(size)

        def run() -> torch.Tensor:
            tokens = input_tokens(arrays, self._previous)
            return self._forward(tokens, arrays.positions, arrays.sample_rows, step)

        logits = run()
        try:
            replay, captured = self._capture(run, self._device)
        except RuntimeError as error:
            # Some models wait for the device within a pass, which a graph can't do.
            logger.warning("decoding is launched step by step, for it can't be captured: %s", error)
            self._sizes = []
        else:
            logger.info("captured a graph for decoding up to %d sequences", size)
            self._buckets[size] = _Bucket(arena, step, replay, captured)
        return logits


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A graph, and the memory that it reads and writes."""

    arena: torch.Tensor
    step: _StaticStep
    replay: Replay
    logits: torch.Tensor

    def fill(self, padded: Any) -> None:
        """Put a plan in the place of the one before."""
        self.arena.copy_(uploaded(_fixed_part(padded), self.arena.device))
        self.step.plan(padded)


class _StaticStep(AttentionMetadata):
    """A step whose arrays on the device stay where they are, while plan follows plan."""

    __slots__ = ("_size",)

    _size: int

    @classmethod
    def of(cls, padded: Any, kv_cache: KVCache, arrays: PlanArrays, scales: dict[str, Any]) -> _StaticStep:
        """Return the step of the first plan."""
        return cls.from_plan(padded, kv_cache, slot_mapping=arrays.slot_mapping, **scales)

    def set_size(self, size: int) -> None:
        """Say how many sequences and tokens each plan has."""
        object.__setattr__(self, "_size", size)

    def plan(self, padded: Any) -> None:
        """Plan the attention of all kinds of layers for the next plan."""
        for name in ("rows", "seq_lens", "query_start_loc"):
            object.__setattr__(self, name, getattr(padded, name))
        for (number, _, _), planned in self._planned.items():
            planned.plan(self.block_table_of(number), self.seq_lens, self.query_start_loc, self.rows)

    def make_attention(self, number: int, num_q_heads: int, sliding_window: int | None) -> PagedAttention:
        """Return attention with room for every plan."""
        planned = super().make_attention(number, num_q_heads, sliding_window)
        planned.reserve(self.block_table_of(number), num_seqs=self._size, num_tokens=self._size)
        return planned


def _fixed_part(padded: Any) -> torch.Tensor:
    """Return the bytes of a plan that hold the arrays of fixed size, which lie first: see docs/step_contract.md."""
    buffer: torch.Tensor = from_dlpack(padded.buffer)
    end = padded.tree_mask_start_loc.ctypes.data + padded.tree_mask_start_loc.nbytes - padded.buffer.ctypes.data
    return buffer[:end]
