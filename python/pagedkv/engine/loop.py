"""The loop of continuous batching: schedule, apply, run, commit, tell."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.engine.admission import Admission
from pagedkv.engine.prompt_logprobs import PromptRows
from pagedkv.engine.runner import StepRunner
from pagedkv.engine.sample import Sample
from pagedkv.engine.samples import SampleTable
from pagedkv.engine.sampling_params import RequestOutputKind
from pagedkv.exceptions import InvalidArgumentError, StateError

if TYPE_CHECKING:
    from pagedkv.config import SchedulerConfig
    from pagedkv.engine.beam_search import BeamSearchParams
    from pagedkv.engine.drawn import Drawn, DrawnBeams, Taken
    from pagedkv.engine.outputs import FinishReason, RequestOutput
    from pagedkv.engine.prompt_lookup import PromptLookup
    from pagedkv.engine.request import EngineRequest
    from pagedkv.engine.sampling_params import SamplingParams
    from pagedkv.engine.text import TextCodec
    from pagedkv.kv_cache import KVCache
    from pagedkv.models import GGUFLlama, TransformersModel
    from pagedkv.models.adapters import Adapters
    from pagedkv.scheduling import FinishedRequest, Scheduler, StepPlan, StepResult

logger = logging.getLogger(__name__)

_REASONS: dict[int, FinishReason] = {1: "stop", 2: "length", 3: "abort"}  # finish reasons of a StepResult


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


class EngineLoop:
    """Runs requests to their ends.

    Parameters
    ----------
    model : TransformersModel or GGUFLlama
        What computes logits.
    scheduler : Scheduler
        What decides which tokens run; nobody else plans or commits with it.
    kv_cache : KVCache
        The memory behind the scheduler's blocks.
    limits : SchedulerConfig
        What the scheduler was made with.
    eos_token_ids : iterable of int
        Tokens that end a sample unless its request ignores them.
    text : TextCodec
        Turns tokens into text.
    seed : int
        Seed of the requests that have none.
    lookup : PromptLookup, optional
        What proposes draft tokens; with one plan in flight only.
    adapters : Adapters, optional
        What adds adapters to the model, where requests may have some.

    Attributes
    ----------
    step_hooks : list of callable
        Called with a `StepEvent` after each commit.
    """

    def __init__(
        self,
        model: TransformersModel | GGUFLlama,
        scheduler: Scheduler,
        kv_cache: KVCache,
        limits: SchedulerConfig,
        *,
        eos_token_ids: Iterable[int],
        text: TextCodec,
        seed: int,
        lookup: PromptLookup | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.step_hooks: list[Callable[[StepEvent], object]] = []
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._limits = limits
        self._text = text
        self._lookup = lookup
        self._admission = Admission(limits, text, model.vocab_size, eos_token_ids, seed)
        self._num_requests = 0
        self._num_steps = 0
        self._requests: dict[int, EngineRequest] = {}
        self._handles: dict[str, int] = {}
        self._beams: set[int] = set()
        self._prompt_rows = PromptRows(text.token_text)
        self._table = SampleTable(limits.max_num_seqs, limits.max_model_len, model.vocab_size)
        self._runner = StepRunner(
            model,
            kv_cache,
            self._table,
            self._prompt_rows,
            self._requests,
            self._beams,
            checks_drafts=lookup is not None,
            adapters=adapters,
        )
        self._plans: deque[StepPlan] = deque()
        self._drawn: deque[Drawn] = deque()
        self._usage = 0.0
        # Lines of the samples that drew in the last step and go on: those that drafts may be proposed for.
        self._going_on = np.empty(0, np.intp)

    @property
    def forward_seconds(self) -> float:
        """Time spent in the model's forward passes so far."""
        return self._runner.forward_seconds

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request was added and has not ended."""
        return bool(self._handles)

    def runs_adapter(self, lora_id: int) -> bool:
        """Whether a request that has not ended runs with an adapter."""
        return any(request.lora_id == lora_id for request in self._requests.values())

    @property
    def request_ids(self) -> list[str]:
        """Names of the requests that have not ended."""
        return list(self._handles)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None = None,
        **options: Any,
    ) -> None:
        """Add a request.

        Parameters
        ----------
        request_id : str
            Name of the request; unique among those that have not ended.
        prompt_token_ids : list of int
            The prompt, at least one token.
        params : SamplingParams or BeamSearchParams
            How its tokens are drawn, and when they end.
        prompt : str, optional
            The prompt as text, for the output.
        **options
            What `Scheduler.add_request` takes beside: `priority`, `tenant`, `cache_salt`, `lora_id`, `now`.

        Raises
        ------
        InvalidArgumentError, NeverFitsError
            If the request can never run.
        """
        if request_id in self._handles:
            raise InvalidArgumentError(f"request_id: expected a new one, found {request_id!r}, which has not ended")
        request = self._admission.make(request_id, prompt_token_ids, params, prompt, self._num_requests)
        request.lora_id = options.get("lora_id") or 0
        add = partial(self._scheduler.add_request, **self._admission.limits_of(request), **options)
        # From the scheduler into the dict without a bytecode between, where an interrupt would lose the handle.
        self._handles.update(zip((request_id,), starmap(add, ((request_id, prompt_token_ids),)), strict=True))
        handle = self._handles[request_id]
        self._requests[handle] = request
        if request.beams is not None:
            self._beams.add(handle)
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = self._prompt_rows.add(handle, prompt_token_ids, request.params.prompt_logprobs)
        self._num_requests += 1

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests; what they have so far is dropped.

        Parameters
        ----------
        request_ids : iterable of str
            Their names. Requests that have ended are passed over.

        Returns
        -------
        list of str
            Those that had not ended.
        """
        found = []
        for request_id in request_ids:
            handle = self._handles.get(request_id)
            if handle is not None:
                found.append(request_id)
                self._scheduler.abort(handle)
                self._remove(request_id)
        if found and not self._handles:
            self._settle()
        return found

    def step(self) -> list[RequestOutput]:
        """Run plans until as many as allowed are in flight, then commit the oldest.

        Returns
        -------
        list of RequestOutput
            Of requests that ended, and what is new of those that are streamed.

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

    def _settle(self) -> None:
        """End plans that run for nobody, and let the scheduler take up aborts, so that their blocks are free."""
        while self._plans:
            self._commit()
        plan = self._scheduler.schedule()
        self._kv_cache.apply(plan)
        self._scheduler.commit(plan, ())

    def _launch(self) -> bool:
        """Make and run the next plan; return whether it has tokens."""
        if self._lookup is not None and not self._beams:
            self._propose_drafts(self._lookup)
        # As in `add_request`, no bytecode between.
        self._plans.extend(starmap(self._scheduler.schedule, ((),)))
        plan = self._plans[-1]
        self._note_changes(plan)
        self._kv_cache.apply(plan)
        if self._kv_cache.host_blocks:
            ended = self._kv_cache.finished_transfers(self._scheduler.outstanding_transfers)
            if ended.size:
                self._scheduler.transfers_done(ended)
        previous_tokens = self._drawn[-1].tokens if self._drawn else None
        self._drawn.append(self._runner.run(plan, previous_tokens))
        return plan.num_tokens > 0

    def _propose_drafts(self, lookup: PromptLookup) -> None:
        lines, rows = self._table.drafting_rows(self._going_on)
        drafts = [lookup.propose(self._table.history(line)) for line in lines]
        has_some = np.array([draft.size > 0 for draft in drafts], bool)
        if has_some.any():
            starts = np.cumsum([0, *(draft.size for draft in drafts if draft.size)]).astype(np.int32)
            self._scheduler.set_draft_tokens(rows[has_some], starts, np.concatenate(drafts))

    def _note_changes(self, plan: StepPlan) -> None:
        for row, request_id, sample in plan.new:
            request = self._requests[self._handles[request_id]]
            if not request.lines.size:
                request.lines = self._table.add(request)
            self._table.seat(row, request.lines[sample])
        # Where blocks go to host memory, those that find no room there are lost all the same.
        at_most = "at most " if self._limits.preemption_mode == "swap" else ""
        for row, request_id, sample in plan.preempted:
            num_tokens = self._table.num_tokens(self._requests[self._handles[request_id]].lines[sample])
            self._table.leave(row)
            logger.info(
                "preempted sample %d of request %s, which will come back: %s%d tokens lost, cache usage %.1f %% before"
                " and %.1f %% now",
                sample,
                request_id,
                at_most,
                max(num_tokens - 1, 0),
                100 * self._usage,
                100 * self._scheduler.usage,
            )

    def _commit(self) -> list[RequestOutput]:
        """End the oldest plan in flight; return what there is to tell."""
        plan, drawn = self._plans[0], self._drawn[0]
        result, taken = drawn.commit(self._scheduler, plan)
        self._plans.popleft()
        self._drawn.popleft()
        self._usage = self._scheduler.usage
        entries = taken.entries()
        self._table.put_tokens(drawn.lines[entries], drawn.positions[entries] + 1, taken.tokens[entries])
        self._going_on = drawn.lines[taken.firsts[taken.reasons == 0]]
        for beams in drawn.beams:
            self._accept_beams(beams, result)
        touched: dict[int, EngineRequest] = {}
        for at in np.flatnonzero(self._table.is_watched(drawn.lines[taken.firsts]) | (taken.reasons != 0)):
            self._take_tokens(drawn, taken, int(at), touched)
        outputs = [self._end(self._requests[found.handle], found) for found in result.finished]
        outputs += self._tell(touched)
        event = StepEvent(self._num_steps, plan, result)
        self._num_steps += 1
        for hook in self.step_hooks:
            hook(event)
        return outputs

    def _accept_beams(self, drawn: DrawnBeams, result: StepResult) -> None:
        request = self._requests.get(drawn.handle)
        if request is not None and request.beams is not None:
            own = (result.handles == drawn.handle) & (result.num_new_tokens > 0)
            request.beams.accept(drawn.step, result.sequence[own].tolist())

    def _take_tokens(self, drawn: Drawn, taken: Taken, at: int, touched: dict[int, EngineRequest]) -> None:
        """Give a sample its tokens, where somebody looks at them or they were its last."""
        first, count = int(taken.firsts[at]), int(taken.counts[at])
        handle, number, line = int(drawn.handles[first]), int(drawn.numbers[first]), int(drawn.lines[first])
        request = self._requests[handle]
        sample, params = request.samples[number], request.params
        if sample.finish_reason is not None:
            return
        token_ids = (
            taken.tokens[first : first + count].tolist()
            if request.is_watched
            else self._table.tokens(line, len(request.prompt_token_ids))
        )
        reason = _REASONS.get(int(taken.reasons[at]))
        logprobs = []
        if params.logprobs is not None:
            assert drawn.logprobs is not None
            assert drawn.logprob_rows is not None
            num = len(drawn.logprobs.tokens[0]) if params.logprobs < 0 else params.logprobs
            logprobs = [
                drawn.logprobs.as_dict(int(row), token, num, self._text.token_text)
                for row, token in zip(drawn.logprob_rows[first : first + count], token_ids, strict=True)
            ]
        is_own_stop = reason == "stop" and token_ids[-1] in (params.stop_token_ids or ())
        is_cut = sample.take(token_ids, logprobs, reason, token_ids[-1] if is_own_stop else None)
        touched[handle] = request
        if is_cut and reason is None:
            if request.has_ended:
                request.num_cached_tokens = self._scheduler.request_stats(handle).num_cached_tokens
            self._scheduler.finish(handle, number)

    def _tell(self, touched: dict[int, EngineRequest]) -> list[RequestOutput]:
        outputs = []
        for handle, request in touched.items():
            if self._handles.get(request.request_id) != handle:
                continue
            if request.num_cached_tokens is None:
                request.num_cached_tokens = self._scheduler.request_stats(handle).num_cached_tokens
            if request.has_ended:
                outputs.append(request.output(request.num_cached_tokens))
                self._remove(request.request_id)
            elif request.is_streamed:
                outputs.append(request.output(request.num_cached_tokens))
        return outputs

    def _end(self, request: EngineRequest, finished: FinishedRequest) -> RequestOutput:
        num_cached_tokens, metrics = finished.num_cached_tokens, finished.stats
        self._remove(request.request_id)
        if request.beams is None:
            return request.output(num_cached_tokens, metrics)
        return request.beam_output(num_cached_tokens, metrics, partial(self._beam_text, request))

    def _beam_text(self, request: EngineRequest, token_ids: list[int], is_stop: bool) -> str:
        decode = self._text.decode(skip_special_tokens=True)
        sample = Sample(0, request.params, decode, request.prompt_token_ids)
        sample.take(token_ids, (), "stop" if is_stop else "length")
        return sample.output(RequestOutputKind.FINAL_ONLY).text

    def _remove(self, request_id: str) -> None:
        handle = self._handles.pop(request_id)
        request = self._requests.pop(handle, None)
        self._beams.discard(handle)
        self._prompt_rows.remove(handle)
        if request is not None and request.lines.size:  # not where an interrupt came before they were noted
            self._table.remove(request.lines)

    def _roll_back(self) -> None:
        for plan in self._plans:
            # A plan was ended already if the interrupt came right after its commit, or by the rollback of one before.
            with suppress(StateError):
                self._scheduler.rollback(plan)
        self._plans.clear()
        self._drawn.clear()
