"""From a plan to what it draws: the model's forward pass, and tokens from its logits."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.drawn import Drawn, DrawnBeams, checked_drafts
from pagedkv.engine.logprobs import row_logprobs
from pagedkv.engine.sampler import sample_tokens
from pagedkv.engine.samples import NO_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Mapping, Set
    from contextlib import AbstractContextManager

    from pagedkv.engine.prompt_logprobs import PromptRows
    from pagedkv.engine.request import EngineRequest
    from pagedkv.engine.samples import SampleTable
    from pagedkv.kv_cache import KVCache
    from pagedkv.models import GGUFLlama, TransformersModel
    from pagedkv.models.adapters import Adapters
    from pagedkv.scheduling import StepPlan


class StepRunner:
    """Computes plans; what they draw is committed by somebody else.

    Parameters
    ----------
    model : TransformersModel or GGUFLlama
        What computes logits.
    kv_cache : KVCache
        The memory, to which plans were applied.
    table : SampleTable
        Parameters and tokens of the samples that run.
    prompt_rows : PromptRows
        Requests that want to know how probable their prompts are.
    requests : mapping of int to EngineRequest
        The requests that have not ended, by handle, as the loop keeps them.
    beams : set of int
        Handles of those that search by beams.
    checks_drafts : bool
        Whether plans may have draft tokens.
    adapters : Adapters or None
        What adds adapters to the model.

    Attributes
    ----------
    forward_seconds : float
        Time spent in the model's forward passes so far.
    """

    def __init__(
        self,
        model: TransformersModel | GGUFLlama,
        kv_cache: KVCache,
        table: SampleTable,
        prompt_rows: PromptRows,
        requests: Mapping[int, EngineRequest],
        beams: Set[int],
        *,
        checks_drafts: bool,
        adapters: Adapters | None = None,
    ) -> None:
        self.forward_seconds = 0.0
        self._model = model
        self._kv_cache = kv_cache
        self._table = table
        self._prompt_rows = prompt_rows
        self._requests = requests
        self._beams = beams
        self._checks_drafts = checks_drafts
        self._adapters = adapters

    def run(self, plan: StepPlan, previous_tokens: torch.Tensor | None) -> Drawn:
        """Compute a plan.

        Parameters
        ----------
        plan : StepPlan
            The plan, seen by the table and applied to the cache.
        previous_tokens : torch.Tensor, shape (num_samples of the plan before,), int32, or None
            What that plan drew, if it is still in flight.

        Returns
        -------
        Drawn
            What it drew.
        """
        counts = np.diff(plan.sample_start_loc)
        rows, handles = plan.sample_rows, np.repeat(plan.handles, counts)
        positions, lines = plan.positions[rows], self._lines(plan, counts)
        parameters = self._table.parameters(lines)
        numbers = parameters["sample"].astype(np.int64)
        if not plan.num_tokens:
            return Drawn(torch.empty(0, dtype=torch.int32), positions, lines, handles, numbers)
        logits = self._forward(plan, rows, previous_tokens)
        tokens = sample_tokens(self._table.adjust(logits, lines, positions), parameters, positions)
        wanted = self._table.num_logprobs(lines)
        logprobs, logprob_rows = None, None
        if (wanted > NO_LOGPROBS).any():
            at = np.flatnonzero(wanted > NO_LOGPROBS)
            logprob_rows = np.full(len(rows), -1, np.intp)
            logprob_rows[at] = np.arange(len(at))
            logprobs = row_logprobs(logits[at], tokens[at], -1 if wanted.min() == -1 else int(wanted.max()))
        beams = self._step_beams(logits, handles, numbers) if self._beams else []
        firsts, drafts = checked_drafts(plan, counts) if self._checks_drafts else (None, None)
        return Drawn(tokens, positions, lines, handles, numbers, firsts, drafts, logprobs, logprob_rows, beams)

    def _forward(self, plan: StepPlan, rows: NDArray[np.int32], previous_tokens: torch.Tensor | None) -> torch.Tensor:
        prompt_rows = self._prompt_rows.rows(plan)
        wanted = np.concatenate([rows, prompt_rows]) if prompt_rows.size else None
        start = time.perf_counter()
        with self._with_adapters(plan):
            logits = self._model.forward(plan, self._kv_cache, previous_tokens, wanted)
        self.forward_seconds += time.perf_counter() - start
        if wanted is not None:
            self._prompt_rows.take(plan, logits[len(rows) :])
        return logits[: len(rows)]

    def _with_adapters(self, plan: StepPlan) -> AbstractContextManager[None]:
        if self._adapters is None:
            return nullcontext()
        own = np.array([self._requests[handle].lora_id for handle in plan.handles.tolist()], np.int64)
        return self._adapters.step(own, np.diff(plan.query_start_loc))

    def _step_beams(
        self, logits: torch.Tensor, handles: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> list[DrawnBeams]:
        found = []
        for handle in self._beams & set(handles.tolist()):
            beams = self._requests[handle].beams
            rows = np.flatnonzero(handles == handle)
            assert beams is not None
            found.append(DrawnBeams(handle, rows, beams.step(logits[rows], numbers[rows].tolist())))
        return found

    def _lines(self, plan: StepPlan, counts: NDArray[np.int32]) -> NDArray[np.intp]:
        lines = self._table.lines(np.repeat(plan.rows, counts))
        # A prompt of which several samples are drawn has one row.
        for at in np.flatnonzero(counts > 1):
            start = plan.sample_start_loc[at]
            if plan.sample_rows[start] != plan.sample_rows[start + 1]:
                continue  # one sample, of which drafts are checked
            lines[start : start + counts[at]] = self._requests[int(plan.handles[at])].lines
        return lines
