"""What a plan in flight drew, and how it goes to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from pagedkv.engine.beam_search import BeamStep
    from pagedkv.engine.logprobs import RowLogprobs
    from pagedkv.scheduling import Scheduler, StepPlan, StepResult

_KEY = np.dtype([("handle", np.int64), ("sample", np.int64)])


@dataclass(frozen=True, slots=True)
class DrawnBeams:
    """What the beams of a request do in a step.

    Parameters
    ----------
    handle : int
        The request.
    rows : numpy.ndarray, shape (beam_width,), intp
        Its rows of logits among all of the step.
    step : BeamStep
        Tokens that go on, and which of these rows they continue.
    """

    handle: int
    rows: NDArray[np.intp]
    step: BeamStep


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a plan drew: one entry per row of logits.

    Parameters
    ----------
    tokens : torch.Tensor, shape (num_samples,), int32
        The tokens.
    positions : numpy.ndarray, shape (num_samples,), int32
        Position of the token from which each was drawn.
    lines, handles, numbers : numpy.ndarray, shape (num_samples,)
        Line, request and number of each sample.
    firsts : numpy.ndarray or None
        The first entry of each sample, where some have several, because drafts were checked.
    drafts : numpy.ndarray or None
        The token that stands behind each entry in the plan, -1 behind the last of a sample.
    logprobs : RowLogprobs or None
        Of those entries that want some.
    logprob_rows : numpy.ndarray or None
        The row of each entry in it, or -1.
    beams : list of DrawnBeams
        What beams do; the entries of their rows say nothing.
    """

    tokens: torch.Tensor
    positions: NDArray[np.int32]
    lines: NDArray[np.intp]
    handles: NDArray[np.int64]
    numbers: NDArray[np.int64]
    firsts: NDArray[np.intp] | None = None
    drafts: NDArray[np.int32] | None = None
    logprobs: RowLogprobs | None = None
    logprob_rows: NDArray[np.intp] | None = None
    beams: list[DrawnBeams] = field(default_factory=list)

    def commit(self, scheduler: Scheduler, plan: StepPlan) -> tuple[StepResult, Taken]:
        """End a plan with what it drew.

        Parameters
        ----------
        scheduler : Scheduler
            Whose plan it is.
        plan : StepPlan
            The oldest plan in flight.

        Returns
        -------
        result : StepResult
            What the commit did.
        taken : Taken
            What became of each sample that is no beam.
        """
        tokens = self.tokens.cpu().numpy()
        if self.beams:
            return self._commit_beams(scheduler, plan, tokens)
        if self.firsts is None:
            result = scheduler.commit(plan, tokens)
            firsts = np.arange(len(tokens))
        else:
            result = scheduler.commit(plan, self._accepted(tokens))
            firsts = self.firsts
        return result, self._taken(tokens, firsts, result, slice(None))

    def _commit_beams(
        self, scheduler: Scheduler, plan: StepPlan, tokens: NDArray[np.int32]
    ) -> tuple[StepResult, Taken]:
        beams = [drawn.handle for drawn in self.beams]
        plain = np.flatnonzero(~np.isin(self.handles, beams))
        steps = [drawn.step for drawn in self.beams]
        parents = [drawn.rows[drawn.step.parents] for drawn in self.beams]
        result = scheduler.commit(
            plan,
            np.concatenate([tokens[plain], *(step.tokens for step in steps)]).astype(np.int32),
            parents=np.concatenate([plain, *parents]).astype(np.int32),
        )
        return result, self._taken(tokens, plain, result, ~np.isin(result.handles, beams))

    def _accepted(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a row per sample: the drafts that are what was drawn, and the token behind them."""
        assert self.firsts is not None
        assert self.drafts is not None
        ends = np.append(self.firsts[1:], len(tokens))
        width = int((ends - self.firsts).max())
        entries = self.firsts[:, None] + np.arange(width)
        inside = entries < ends[:, None]
        entries = np.minimum(entries, len(tokens) - 1)
        is_right = inside & (self.drafts[entries] == tokens[entries])
        num_accepted = np.minimum.accumulate(is_right, axis=1).sum(1)
        kept = np.arange(width) <= num_accepted[:, None]
        return np.where(kept, tokens[entries], -1).astype(np.int32)

    def _taken(
        self,
        tokens: NDArray[np.int32],
        firsts: NDArray[np.intp],
        result: StepResult,
        of_result: slice | NDArray[np.bool_],
    ) -> Taken:
        if result.num_ignored:
            # Leave out the samples that had ended before; a plan draws for each sample in one run of entries.
            ours, theirs = np.empty(len(firsts), _KEY), np.empty(len(result.handles[of_result]), _KEY)
            ours["handle"], ours["sample"] = self.handles[firsts], self.numbers[firsts]
            theirs["handle"], theirs["sample"] = result.handles[of_result], result.sequence[of_result]
            firsts = firsts[np.isin(ours, theirs)]
        return Taken(tokens, firsts, result.num_new_tokens[of_result], result.finish_reason[of_result])


def checked_drafts(
    plan: StepPlan, counts: NDArray[np.int32]
) -> tuple[NDArray[np.intp] | None, NDArray[np.int32] | None]:
    """Return `firsts` and `drafts` of a plan, or None twice where it checks no drafts.

    Parameters
    ----------
    plan : StepPlan
        The plan.
    counts : numpy.ndarray, shape (num_sequences,), int32
        Its entries per sequence.
    """
    rows = plan.sample_rows
    # Of a sequence with drafts the rows follow one another; a prompt of several samples has one row, several times.
    is_checked = np.append(rows[1:] == rows[:-1] + 1, False) if len(rows) else np.empty(0, bool)
    ends = np.cumsum(counts)
    is_checked[ends[counts > 0] - 1] = False
    if not is_checked.any():
        return None, None
    firsts = np.flatnonzero(~np.append(False, is_checked[:-1]))
    drafts = np.full(len(rows), -1, np.int32)
    drafts[is_checked] = plan.token_ids[rows[is_checked] + 1]
    return firsts, drafts


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of the samples of a plan.

    Parameters
    ----------
    tokens : numpy.ndarray, shape (num_entries,), int32
        All that was drawn.
    firsts : numpy.ndarray, shape (num_samples,), intp
        The first entry of each sample.
    counts : numpy.ndarray, shape (num_samples,), int32
        How many of its entries count.
    reasons : numpy.ndarray, shape (num_samples,), int8
        Why it ended, or 0.
    """

    tokens: NDArray[np.int32]
    firsts: NDArray[np.intp]
    counts: NDArray[np.int32]
    reasons: NDArray[np.int8]

    def entries(self) -> NDArray[np.intp]:
        """Return all entries that count, sample after sample."""
        if (self.counts == 1).all():
            return self.firsts
        starts = np.repeat(self.firsts, self.counts)
        ends = np.cumsum(self.counts)
        return starts + np.arange(len(starts)) - np.repeat(ends - self.counts, self.counts)
