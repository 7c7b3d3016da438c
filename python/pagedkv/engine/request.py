"""A request while it runs, and the outputs that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.engine.outputs import CompletionOutput, RequestOutput
from pagedkv.engine.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagedkv.engine.adjustments import Rules
    from pagedkv.engine.beam_search import BeamSearch, Hypothesis
    from pagedkv.engine.logprobs import Logprob
    from pagedkv.engine.sample import Sample
    from pagedkv.engine.sampling_params import SamplingParams
    from pagedkv.scheduling import RequestStats


@dataclass(slots=True)
class EngineRequest:
    """What the loop knows of a request.

    Parameters
    ----------
    request_id : str
        Its name.
    prompt : str or None
        The prompt as text.
    prompt_token_ids : list of int
        The prompt.
    params : SamplingParams
        What it asks for; that of a beam search are its seats and its length.
    samples : list of Sample
        One per sample; none of a beam search.
    beams : BeamSearch or None
        The beams of a beam search.
    rules : Rules or None
        What it asks of logits beside penalties.
    seed : int
        Seed of its random numbers.
    lora_id : int
        The adapter that it runs with, 0 for none.
    lines : numpy.ndarray
        Lines of its samples in the table; none before it was admitted.
    prompt_logprobs : list or None
        What is known of the prompt's log-probabilities.
    num_cached_tokens : int or None
        Prompt tokens from the prefix cache, once somebody asked.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[Sample]
    beams: BeamSearch | None = None
    rules: Rules | None = None
    seed: int = 0
    lora_id: int = 0
    lines: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether all samples have."""
        return bool(self.samples) and all(sample.finish_reason is not None for sample in self.samples)

    @property
    def is_streamed(self) -> bool:
        """Whether it gives outputs while it runs."""
        return self.params.output_kind != RequestOutputKind.FINAL_ONLY

    @property
    def is_watched(self) -> bool:
        """Whether each of its tokens is looked at as it comes."""
        return self.is_streamed or bool(self.params.stop) or self.params.logprobs is not None

    def output(self, num_cached_tokens: int, metrics: RequestStats | None = None) -> RequestOutput:
        """Return what there is, or what is new."""
        kind = self.params.output_kind
        told = (
            self.samples if kind != RequestOutputKind.DELTA else [sample for sample in self.samples if sample.has_news]
        )
        return self._output([sample.output(kind) for sample in told], num_cached_tokens, metrics)

    def beam_output(
        self,
        num_cached_tokens: int,
        metrics: RequestStats | None,
        text_of: Callable[[list[int], bool], str],
    ) -> RequestOutput:
        """Return the sequences that a beam search found."""
        assert self.beams is not None
        found = self.beams.hypotheses()
        outputs = [_completion(index, hypothesis, text_of) for index, (hypothesis, _) in enumerate(found)]
        return self._output(outputs, num_cached_tokens, metrics)

    def _output(
        self, outputs: list[CompletionOutput], num_cached_tokens: int, metrics: RequestStats | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.has_ended or self.beams is not None,
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
            metrics=metrics,
        )


def _completion(index: int, hypothesis: Hypothesis, text_of: Callable[[list[int], bool], str]) -> CompletionOutput:
    token_ids: list[int] = hypothesis.token_ids.tolist()
    return CompletionOutput(
        index=index,
        text=text_of(token_ids, hypothesis.is_stop),
        token_ids=token_ids,
        cumulative_logprob=hypothesis.cum_logprob,
        finish_reason="stop" if hypothesis.is_stop else "length",
    )
