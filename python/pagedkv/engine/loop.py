"""The loop of continuous batching: schedule, apply, run, sample, commit."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.outputs import CompletionOutput, RequestOutput
from pagedkv.engine.sampler import sample_tokens
from pagedkv.engine.samples import SampleTable
from pagedkv.exceptions import InvalidArgumentError, StateError

if TYPE_CHECKING:
    from pagedkv.config import SchedulerConfig
    from pagedkv.engine.sampling_params import SamplingParams
    from pagedkv.kv_cache import KVCache
    from pagedkv.models import TransformersModel
    from pagedkv.scheduling import FinishedRequest, Scheduler, StepPlan, StepResult

logger = logging.getLogger(__name__)

_STOP = 1  # finish reasons of a StepResult: 1 stop, 2 length


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What a step hook is told, after the step was committed.

    Parameters
    ----------
    step : int
        Number of the step, from 0.
    plan : StepPlan
        What ran.
    result : StepResult
        What the commit did.
    """

    step: int
    plan: StepPlan
    result: StepResult


@dataclass(slots=True)
class _Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    lines: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    completions: list[CompletionOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Samples:
    """What a plan in flight drew: one entry per sample."""

    tokens: torch.Tensor
    positions: NDArray[np.int32]
    lines: NDArray[np.intp]
    handles: NDArray[np.int64]
    numbers: NDArray[np.uint64]


class EngineLoop:
    """Runs requests to their ends.

    Parameters
    ----------
    model : TransformersModel
        What computes logits.
    scheduler : Scheduler
        What decides which tokens run; nobody else plans or commits with it.
    kv_cache : KVCache
        The memory behind the scheduler's blocks.
    limits : SchedulerConfig
        What the scheduler was made with.
    eos_token_ids : iterable of int
        Tokens that end a sample unless its request ignores them.
    decode : callable
        Turns a list of token ids into text.
    seed : int
        Seed of the requests that have none.

    Attributes
    ----------
    step_hooks : list of callable
        Called with a `StepEvent` after each commit.
    """

    def __init__(
        self,
        model: TransformersModel,
        scheduler: Scheduler,
        kv_cache: KVCache,
        limits: SchedulerConfig,
        *,
        eos_token_ids: Iterable[int],
        decode: Callable[[list[int]], str],
        seed: int,
    ) -> None:
        self.step_hooks: list[Callable[[StepEvent], object]] = []
        self._model = model
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._decode = decode
        self._seed = seed
        self._num_requests = 0
        self._num_steps = 0
        self._requests: dict[int, _Request] = {}
        self._handles: dict[str, int] = {}
        self._table = SampleTable(limits.max_num_seqs, limits.max_model_len)
        self._plans: deque[StepPlan] = deque()
        self._drawn: deque[_Samples] = deque()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request was added and has not ended."""
        return bool(self._handles)

    @property
    def request_ids(self) -> list[str]:
        """Names of the requests that have not ended."""
        return list(self._handles)

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, prompt: str | None = None
    ) -> None:
        """Add a request.

        Parameters
        ----------
        request_id : str
            Name of the request; unique among those that have not ended.
        prompt_token_ids : list of int
            The prompt, at least one token.
        params : SamplingParams
            How its tokens are drawn, and when they end.
        prompt : str, optional
            The prompt as text, for the output.

        Raises
        ------
        InvalidArgumentError, NeverFitsError
            If the request can never run.
        """
        if request_id in self._handles:
            raise InvalidArgumentError(f"request_id: expected a new one, found {request_id!r}, which has not ended")
        _check_token_ids(prompt_token_ids, self._model.vocab_size)
        request = _Request(request_id, prompt, prompt_token_ids, params, self._seed_of(params))
        add = partial(self._scheduler.add_request, **self._limits_of(request))
        # From the scheduler into the dict without a bytecode between, where an interrupt would lose the handle.
        self._handles.update(zip((request_id,), starmap(add, ((request_id, prompt_token_ids),)), strict=True))
        self._requests[self._handles[request_id]] = request
        self._num_requests += 1

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; what they have so far is dropped.

        Parameters
        ----------
        request_ids : iterable of str
            Their names. Requests that have ended are passed over.
        """
        for request_id in request_ids:
            handle = self._handles.get(request_id)
            if handle is not None:
                self._scheduler.abort(handle)
                self._remove(request_id)

    def step(self) -> list[RequestOutput]:
        """Run plans until as many as allowed are in flight, then commit the oldest.

        Returns
        -------
        list of RequestOutput
            Requests that ended.

        Notes
        -----
        Where anything raises, all plans in flight are rolled back: requests are as they were before, and may go on.
        """
        try:
            while len(self._plans) < self._limits.max_plans_in_flight and self._launch():
                pass
            outputs = self._commit()
            while self._plans and not self._handles:
                outputs += self._commit()
        except BaseException:
            self._roll_back()
            raise
        return outputs

    def _launch(self) -> bool:
        """Make and run the next plan; return whether it has tokens."""
        # As in `add_request`, no bytecode between.
        self._plans.extend(starmap(self._scheduler.schedule, ((),)))
        plan = self._plans[-1]
        self._note_changes(plan)
        self._kv_cache.apply(plan)
        if self._kv_cache.host_blocks:
            self._end_transfers()
        self._drawn.append(self._run(plan))
        return plan.num_tokens > 0

    def _end_transfers(self) -> None:
        ended = self._kv_cache.finished_transfers(self._scheduler.outstanding_transfers)
        if ended.size:
            self._scheduler.transfers_done(ended)

    def _run(self, plan: StepPlan) -> _Samples:
        counts = np.diff(plan.sample_start_loc)
        lines = self._lines(plan, counts)
        positions = plan.positions[plan.sample_rows]
        parameters = self._table.parameters(lines)
        if plan.num_tokens:
            previous_tokens = self._drawn[-1].tokens if self._drawn else None
            logits = self._model.forward(plan, self._kv_cache, previous_tokens)
            tokens = sample_tokens(logits, parameters, positions)
        else:
            tokens = torch.empty(0, dtype=torch.int32)
        return _Samples(tokens, positions, lines, np.repeat(plan.handles, counts), parameters["sample"])

    def _lines(self, plan: StepPlan, counts: NDArray[np.int32]) -> NDArray[np.intp]:
        lines = self._table.lines(np.repeat(plan.rows, counts))
        # A prompt of which several samples are drawn has one row.
        for at in np.flatnonzero(counts > 1):
            start = plan.sample_start_loc[at]
            lines[start : start + counts[at]] = self._requests[int(plan.handles[at])].lines
        return lines

    def _note_changes(self, plan: StepPlan) -> None:
        for row, request_id, sample in plan.new:
            request = self._requests[self._handles[request_id]]
            if not request.lines.size:
                request.lines = self._table.add(request.params, request.seed)
            self._table.seat(row, request.lines[sample])
        for _, request_id, sample in plan.preempted:
            logger.info(
                "preempted sample %d of request %s, which will come back; cache usage is now %.1f %%",
                sample,
                request_id,
                100 * self._scheduler.usage,
            )

    def _commit(self) -> list[RequestOutput]:
        """End the oldest plan in flight; return the requests that ended with it."""
        plan, drawn = self._plans[0], self._drawn[0]
        tokens = drawn.tokens.cpu().numpy()
        result = self._scheduler.commit(plan, tokens)
        self._plans.popleft()
        self._drawn.popleft()
        if result.num_ignored:
            drawn, tokens = _kept(drawn, tokens, result)
        self._table.put_tokens(drawn.lines, drawn.positions + 1, tokens)
        reasons = result.finish_reason
        for at in np.flatnonzero(reasons):
            self._finish_sample(drawn, int(at), int(reasons[at]))
        outputs = [self._finish_request(finished) for finished in result.finished]
        event = StepEvent(self._num_steps, plan, result)
        self._num_steps += 1
        for hook in self.step_hooks:
            hook(event)
        return outputs

    def _finish_sample(self, drawn: _Samples, at: int, reason: int) -> None:
        request = self._requests[int(drawn.handles[at])]
        end = int(drawn.positions[at]) + 2
        token_ids = self._table.tokens(drawn.lines[at], len(request.prompt_token_ids), end)
        is_stop = reason == _STOP
        own_stop_id = is_stop and token_ids[-1] in (request.params.stop_token_ids or ())
        request.completions.append(
            CompletionOutput(
                index=int(drawn.numbers[at]),
                text=self._decode(token_ids),
                token_ids=token_ids,
                finish_reason="stop" if is_stop else "length",
                stop_reason=token_ids[-1] if own_stop_id else None,
            )
        )

    def _finish_request(self, finished: FinishedRequest) -> RequestOutput:
        request = self._requests[finished.handle]
        self._remove(finished.request_id)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=sorted(request.completions, key=lambda completion: completion.index),
            finished=True,
            num_cached_tokens=finished.num_cached_tokens,
        )

    def _remove(self, request_id: str) -> None:
        request = self._requests.pop(self._handles.pop(request_id), None)
        if request is not None:  # None where an interrupt came before it was noted
            self._table.remove(request.lines)

    def _seed_of(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        sequence = np.random.SeedSequence((self._seed % 2**64, self._num_requests))
        return int(sequence.generate_state(1, np.uint64)[0])

    def _limits_of(self, request: _Request) -> dict[str, Any]:
        params = request.params
        stop_token_ids = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._limits.max_model_len - len(request.prompt_token_ids))
        return {"max_tokens": max_tokens, "n": params.n, "stop_token_ids": sorted(stop_token_ids)}

    def _roll_back(self) -> None:
        for plan in self._plans:
            # A plan was ended already if the interrupt came right after its commit, or by the rollback of one before.
            with suppress(StateError):
                self._scheduler.rollback(plan)
        self._plans.clear()
        self._drawn.clear()


def _check_token_ids(token_ids: list[int], vocab_size: int) -> None:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        found = f"{ids.ndim} dimensions of {ids.dtype}" if ids.size else "none"
        raise InvalidArgumentError(f"prompt_token_ids: expected at least one integer, found {found}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidArgumentError(f"prompt_token_ids: expected ids of 0 to {vocab_size - 1}, found {wrong}")


def _kept(drawn: _Samples, tokens: NDArray[np.int32], result: StepResult) -> tuple[_Samples, NDArray[np.int32]]:
    """Leave out the samples that had ended before; a plan draws for each sample at most once."""
    key = np.dtype([("handle", np.int64), ("sample", np.int64)])
    ours, theirs = np.empty(len(tokens), key), np.empty(len(result.handles), key)
    ours["handle"], ours["sample"] = drawn.handles, drawn.numbers
    theirs["handle"], theirs["sample"] = result.handles, result.sequence
    kept = np.isin(ours, theirs)
    samples = _Samples(drawn.tokens, drawn.positions[kept], drawn.lines[kept], drawn.handles[kept], drawn.numbers[kept])
    return samples, tokens[kept]
