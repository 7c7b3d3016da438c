"""What a request gives back, by vLLM's names."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    Parameters
    ----------
    index : int
        Which sample.
    text : str
        The tokens as text, without special tokens; empty where there is no tokenizer.
    token_ids : list of int
        The sampled tokens, with the one that ended the sample.
    finish_reason : {"stop", "length"}
        Whether an end token or `max_tokens` ended it.
    stop_reason : int, optional
        The token of `stop_token_ids` that ended it; None for the model's own end tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stop_reason: int | None


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
    outputs : list of CompletionOutput
        The samples by index.
    finished : bool
        Whether all samples ended.
    num_cached_tokens : int
        Prompt tokens whose keys and values came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
