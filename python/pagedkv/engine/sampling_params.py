"""How the tokens of a request are drawn, and when they end."""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from pagedkv.exceptions import InvalidArgumentError, UnsupportedError

# Below this, vLLM and others draw the most probable token.
_GREEDY_TEMPERATURE = 1e-5
# vLLM's defaults of what is refused by name until it is implemented.
_NOT_IMPLEMENTED: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "stop": None,
    "bad_words": None,
    "include_stop_str_in_output": False,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "output_kind": None,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling, by vLLM's names and with its defaults.

    Parameters
    ----------
    n : int
        Samples per prompt. They share the blocks of the prompt.
    temperature : float
        Logits are divided by it; 0 draws the most probable token.
    top_k : int
        Draw from the `top_k` most probable tokens; 0 or -1 for all.
    top_p : float
        Draw from the fewest most probable tokens whose probabilities sum to at least `top_p`, in (0, 1].
    seed : int, optional
        A request with a seed gets the same random numbers whatever else runs. Without one they follow from the seed of
        the `LLM` and the number of requests before.
    max_tokens : int, optional
        Most tokens per sample; None for what the longest sequence leaves.
    stop_token_ids : iterable of int, optional
        Tokens that end a sample, beside the model's own end tokens. They are part of the output.
    ignore_eos : bool
        Whether the model's own end tokens are tokens like any other.

    Raises
    ------
    InvalidArgumentError
        If a value is out of its range; a ValueError that names the field.
    UnsupportedError
        If a field is not implemented and not at its default.

    Notes
    -----
    vLLM's further fields are there and refused by name unless at their defaults.

    Examples
    --------
    >>> SamplingParams(temperature=0).is_greedy
    True
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    pagedkv.exceptions.InvalidArgumentError: top_p: expected a number above 0 and at most 1, found 1.5
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    stop: Any = None
    bad_words: Any = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: Any = None
    structured_outputs: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    extra_args: Any = None

    def __post_init__(self) -> None:
        for name, default in _NOT_IMPLEMENTED.items():
            if (found := getattr(self, name)) != default:
                raise UnsupportedError(f"{name}: expected {default}, because it is not implemented, found {found!r}")
        _check_integer("n", self.n, 1)
        _check_integer("top_k", self.top_k, -1)
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise _mistake("temperature", "a finite number of at least 0", self.temperature)
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise _mistake("top_p", "a number above 0 and at most 1", self.top_p)
        if self.seed is not None:
            _check_integer("seed", self.seed, None)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        if self.is_greedy and self.n > 1:
            raise _mistake("n", "1, because temperature is 0 and all samples are equal", self.n)
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is drawn."""
        return self.temperature < _GREEDY_TEMPERATURE

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) not in (field.default, ())
        ]
        return f"SamplingParams({', '.join(changed)})"


def _mistake(field: str, expected: str, found: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field}: expected {expected}, found {found!r}")


def _is_number(found: object) -> bool:
    return isinstance(found, Real) and not isinstance(found, bool)


def _is_integer(found: Any, least: int | None) -> bool:
    try:
        value = operator.index(found)
    except TypeError:
        return False
    return not isinstance(found, bool) and (least is None or value >= least)


def _check_integer(field: str, found: Any, least: int | None) -> None:
    if not _is_integer(found, least):
        raise _mistake(field, "an integer" if least is None else f"an integer of at least {least}", found)


def _token_ids(token_ids: Iterable[int] | None) -> tuple[int, ...]:
    found = () if token_ids is None else tuple(token_ids)
    if not all(_is_integer(token, 0) for token in found):
        raise _mistake("stop_token_ids", "integers of at least 0", token_ids)
    return tuple(int(token) for token in found)
