"""Log-probabilities of prompts: which rows of a step they need, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.logprobs import row_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.engine.logprobs import Logprob
    from pagedkv.scheduling import StepPlan


@dataclass(slots=True)
class _Prompt:
    token_ids: NDArray[np.int64]
    num_best: int
    found: list[dict[int, Logprob] | None] = field(default_factory=list)


class PromptRows:
    """Requests that want to know how probable their prompts are.

    Parameters
    ----------
    token_text : callable
        Turns a token id into text.
    """

    def __init__(self, token_text: Callable[[int], str | None]) -> None:
        self._token_text = token_text
        self._prompts: dict[int, _Prompt] = {}

    def add(self, handle: int, prompt_token_ids: list[int], num_best: int) -> list[dict[int, Logprob] | None]:
        """Note a request; return the list that is filled as its prompt is computed, None for the first token."""
        prompt = _Prompt(np.array(prompt_token_ids, np.int64), num_best, [None])
        if len(prompt_token_ids) > 1:
            self._prompts[handle] = prompt
        return prompt.found

    def remove(self, handle: int) -> None:
        """Forget a request."""
        self._prompts.pop(handle, None)

    def rows(self, plan: StepPlan) -> NDArray[np.int32]:
        """Return the rows of a plan behind which a prompt goes on, beside those that samples are drawn from."""
        if not self._prompts:
            return np.empty(0, np.int32)
        return np.concatenate([np.empty(0, np.int32), *(np.arange(*span) for _, span, _ in self._spans(plan))])

    def take(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Note what the model says behind these rows.

        Parameters
        ----------
        plan : StepPlan
            The plan that `rows` was asked about.
        logits : torch.Tensor, shape (num_rows, vocab_size)
            Of those rows.
        """
        start = 0
        for handle, (first, end), position in self._spans(plan):
            prompt, own = self._prompts[handle], logits[start : start + end - first]
            start += end - first
            tokens = prompt.token_ids[position + 1 : position + 1 + end - first]
            found = row_logprobs(own, torch.from_numpy(tokens).to(own.device), prompt.num_best)
            # A prompt that is computed again, after a rollback or a preemption, says the same.
            del prompt.found[position + 1 :]
            num = found.tokens.shape[1]
            prompt.found += [
                found.as_dict(row, token, num, self._token_text) for row, token in enumerate(tokens.tolist())
            ]
            if len(prompt.found) == len(prompt.token_ids):
                self.remove(handle)

    def _spans(self, plan: StepPlan) -> list[tuple[int, tuple[int, int], int]]:
        found = []
        for at in np.flatnonzero(np.isin(plan.handles, list(self._prompts))):
            handle, start = int(plan.handles[at]), int(plan.query_start_loc[at])
            position = int(plan.positions[start])
            left = len(self._prompts[handle].token_ids) - 1 - position
            end = min(int(plan.query_start_loc[at + 1]), start + left)
            if end > start:
                found.append((handle, (start, end), position))
        return found
