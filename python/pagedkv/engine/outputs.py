"""What a request gives back, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagedkv.engine.logprobs import Logprob
    from pagedkv.scheduling import RequestStats

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    Parameters
    ----------
    index : int
        Which sample.
    text : str
        The tokens as text, without what ended them; empty where there is no tokenizer.
    token_ids : list of int
        The sampled tokens, with the one that ended the sample.
    cumulative_logprob : float, optional
        Sum of the tokens' log-probabilities; None unless the request asked for `logprobs`.
    logprobs : list of dict, optional
        For each token, log-probabilities by token id: the token's own, then those of the most probable ones.
    finish_reason : {"stop", "length", "abort"}, optional
        Whether an end token or text, `max_tokens` or an abort ended it; None while it runs.
    stop_reason : int or str, optional
        The token of `stop_token_ids` or the text of `stop` that ended it; None for the model's own end tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether the sample has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its samples.

    Parameters
    ----------
    request_id : str
        Name of the request, unique in its engine.
    prompt : str, optional
        The prompt, where it was given as text.
    prompt_token_ids : list of int
        The prompt's tokens.
    prompt_logprobs : list, optional
        For each token of the prompt log-probabilities by token id, None for the first; None unless asked for.
    outputs : list of CompletionOutput
        The samples by index; in a delta those with something new.
    finished : bool
        Whether all samples ended.
    num_cached_tokens : int
        Prompt tokens whose keys and values came from the prefix cache.
    metrics : RequestStats, optional
        Times and counts of the request, once it has ended by itself.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStats | None = None


def merged(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Return two deltas of a request as one.

    Parameters
    ----------
    earlier, later : RequestOutput
        Deltas that follow one another.

    Returns
    -------
    RequestOutput
        What both tell.
    """
    by_index = {completion.index: completion for completion in earlier.outputs}
    for new in later.outputs:
        old = by_index.get(new.index)
        if old is not None:
            logprobs = None if old.logprobs is None or new.logprobs is None else old.logprobs + new.logprobs
            new = replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs)
        by_index[new.index] = new
    return replace(later, outputs=[by_index[index] for index in sorted(by_index)])
