"""Prompts in their forms: text, token ids, or a dict with either."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeGuard

from pagedkv.exceptions import InvalidArgumentError

_EXPECTED = "a str, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Parameters
    ----------
    text : str, optional
        The text, where it was given.
    token_ids : list of int
        The tokens.
    cache_salt : str, optional
        Only prompts with the same salt share cached prefixes.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def read_prompts(prompts: Any, tokenizer: Any) -> list[Prompt]:
    """Return prompts one by one, with their tokens.

    Parameters
    ----------
    prompts : str, list of int, dict, or a list of these
        One prompt or several; a list of ints is one. A dict has "prompt_token_ids", "prompt" or both; ids win. It may
        have a "cache_salt".
    tokenizer : transformers.PreTrainedTokenizerBase or None
        What turns text into tokens, adding the special tokens that its model expects.

    Returns
    -------
    list of Prompt
        The prompts in order.

    Raises
    ------
    InvalidArgumentError
        If something is no prompt, or text comes without a tokenizer.

    Examples
    --------
    >>> read_prompts([1, 2], None)
    [Prompt(text=None, token_ids=[1, 2], cache_salt=None)]
    >>> [prompt.token_ids for prompt in read_prompts([[1, 2], {"prompt_token_ids": [3]}], None)]
    [[1, 2], [3]]
    """
    several = prompts if _is_list(prompts) and not _is_ids(prompts) else [prompts]
    return [read_prompt(prompt, tokenizer) for prompt in several]


def read_prompt(prompt: Any, tokenizer: Any) -> Prompt:
    """Return one prompt with its tokens.

    Parameters
    ----------
    prompt : str, list of int or dict
        As for `read_prompts`, but one.
    tokenizer : transformers.PreTrainedTokenizerBase or None
        What turns text into tokens.

    Returns
    -------
    Prompt
        The prompt.
    """
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidArgumentError(f"cache_salt: expected a text that is not empty, found {salt!r}")
    if isinstance(prompt, dict):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    else:
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    if token_ids is None and isinstance(text, str):
        token_ids = _tokenize(text, tokenizer)
    if not _is_list(token_ids) or not (_is_ids(token_ids) or len(token_ids) == 0):
        raise InvalidArgumentError(f"prompts: expected {_EXPECTED}, found {_describe(prompt)}")
    return Prompt(text, [int(token) for token in token_ids], salt)


def _tokenize(text: str, tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InvalidArgumentError("prompts: expected token ids, because the LLM has no tokenizer, found text")
    return tokenizer(text).input_ids


def _is_list(found: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(found, Sequence) and not isinstance(found, str | bytes)


def _is_ids(found: Sequence[Any]) -> bool:
    return len(found) > 0 and all(isinstance(token, Integral) for token in found)


def _describe(prompt: Any) -> str:
    if isinstance(prompt, dict):
        return f"a dict with {sorted(prompt)}"
    return f"a {type(prompt).__name__}"
