"""The shapes of answers: choices, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.engine import Logprob, RequestOutput

_Entries = Sequence[dict[int, "Logprob"] | None]


def usage(outputs: Iterable[RequestOutput], num_completion_tokens: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage of requests: a prompt counts once, whatever its number of samples.

    Parameters
    ----------
    outputs : iterable of RequestOutput
        One per request.
    num_completion_tokens : int, optional
        Tokens of all samples, where the outputs are deltas.
    """
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    if num_completion_tokens is None:
        num_completion_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def chat_logprobs(token_ids: Sequence[int], entries: _Entries | None, num_best: int) -> dict[str, Any] | None:
    """Return the log-probabilities of a chat completion."""
    if entries is None:
        return None
    return {
        "content": [_chat_entry(token, entry or {}, num_best) for token, entry in zip(token_ids, entries, strict=True)]
    }


def _chat_entry(token: int, entry: dict[int, Logprob], num_best: int) -> dict[str, Any]:
    best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:num_best]
    return {**_chat_token(entry[token]), "top_logprobs": [_chat_token(found) for _, found in best]}


def _chat_token(found: Logprob) -> dict[str, Any]:
    text = found.decoded_token or ""
    return {"token": text, "logprob": _finite(found.logprob), "bytes": list(text.encode())}


def completion_logprobs(
    token_ids: Sequence[int],
    entries: _Entries | None,
    num_best: int,
    token_text: Callable[[int], str | None],
    start: int = 0,
) -> dict[str, Any] | None:
    """Return the log-probabilities of a completion.

    Parameters
    ----------
    token_ids : sequence of int
        The tokens.
    entries : sequence of dict or None
        Their log-probabilities; None for the first of a prompt.
    num_best : int
        How many of the most probable tokens to tell.
    token_text : callable
        Turns a token into text.
    start : int
        Characters of the text before the first token.
    """
    if entries is None:
        return None
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, entry in zip(token_ids, entries, strict=True):
        own = (entry or {}).get(token)
        text = token_text(token) or ""
        found["text_offset"].append(start)
        found["tokens"].append(text)
        found["token_logprobs"].append(None if own is None else _finite(own.logprob))
        best = sorted((entry or {}).items(), key=lambda item: item[1].rank or 0)
        told = {other.decoded_token or str(number): _finite(other.logprob) for number, other in best[:num_best]}
        found["top_logprobs"].append(None if own is None else told or None)
        start += len(text)
    return found


def prompt_logprobs(entries: _Entries | None) -> list[Any] | None:
    """Return the log-probabilities of a prompt, by vLLM's shape."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _finite(found.logprob), "rank": found.rank, "decoded_token": found.decoded_token}
            for token, found in entry.items()
        }
        for entry in entries
    ]


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI writes this for what is never drawn.
    return max(logprob, -9999.0)
