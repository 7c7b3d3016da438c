"""How the tokens of a request are drawn, when they end, and what comes back of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from pagedkv.engine.checks import (
    A_BOOL,
    A_TEMPERATURE,
    Check,
    between,
    check_fields,
    integer,
    is_integer,
    is_number,
    mistake,
)
from pagedkv.exceptions import UnsupportedError

# Below this, vLLM and others draw the most probable token.
_GREEDY_TEMPERATURE = 1e-5
# vLLM's defaults of what is refused by name until it is implemented.
_NOT_IMPLEMENTED: dict[str, Any] = {
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
    "extra_args": None,
}


class RequestOutputKind(Enum):
    """What each output of a request that still runs holds, by vLLM's names."""

    CUMULATIVE = 0
    """All tokens and text so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """There is one output, when the request has ended."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling, by vLLM's names and with its defaults.

    Parameters
    ----------
    n : int
        Samples per prompt. They share the blocks of the prompt.
    presence_penalty, frequency_penalty : float
        What is taken from the logit of a token that the sample has already, once and for each time; -2 to 2.
    repetition_penalty : float
        What positive logits of tokens in the prompt or the sample are divided by, and negative ones multiplied by;
        0.01 to 100.
    temperature : float
        Logits are divided by it; 0 draws the most probable token.
    top_p : float
        Draw from the fewest most probable tokens whose probabilities sum to at least `top_p`, in (0, 1].
    top_k : int
        Draw from the `top_k` most probable tokens; 0 or -1 for all.
    min_p : float
        Draw from tokens at least `min_p` times as probable as the most probable one.
    seed : int, optional
        A request with a seed gets the same random numbers whatever else runs. Without one they follow from the seed of
        the engine and the number of requests before.
    stop : str or list of str, optional
        Text that ends a sample. It is not part of the output.
    stop_token_ids : iterable of int, optional
        Tokens that end a sample, beside the model's own end tokens. They are part of `token_ids` but not of the text.
    bad_words : list of str, optional
        Words whose last token is never drawn where the others stand before it.
    include_stop_str_in_output : bool
        Whether the text keeps what ended it.
    ignore_eos : bool
        Whether the model's own end tokens are tokens like any other.
    max_tokens : int, optional
        Most tokens per sample; None for what the longest sequence leaves.
    min_tokens : int
        Until there are so many tokens, no end token is drawn and no stop text is looked for.
    logprobs : int, optional
        Give the log-probability of each drawn token and of so many most probable ones, as the model says them, before
        penalties and temperature; -1 for the whole vocabulary.
    prompt_logprobs : int, optional
        The same for each token of the prompt. Such a request computes all of its prompt, without the prefix cache.
    detokenize : bool
        Whether the output has text.
    skip_special_tokens : bool
        Whether the text leaves special tokens out.
    truncate_prompt_tokens : int, optional
        Keep so many last tokens of the prompt; -1 for as many as fit beside `max_tokens`.
    output_kind : RequestOutputKind
        What `LLMEngine.step` and `AsyncLLMEngine.generate` give while the request runs.
    logit_bias : mapping of int to float, optional
        What is added to the logits of tokens, -100 to 100.
    allowed_token_ids : iterable of int, optional
        The only tokens that may be drawn.

    Raises
    ------
    InvalidArgumentError
        If a value is out of its range; a ValueError that names the field.
    UnsupportedError
        If a field is not implemented and not at its default: `spaces_between_special_tokens`, `structured_outputs`,
        `extra_args`.

    Examples
    --------
    >>> SamplingParams(temperature=0).is_greedy
    True
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    pagedkv.exceptions.InvalidArgumentError: top_p: expected a number above 0 and at most 1, found 1.5
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: Any = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Iterable[int] | None = None
    extra_args: Any = None

    def __post_init__(self) -> None:
        for name, default in _NOT_IMPLEMENTED.items():
            if (found := getattr(self, name)) != default:
                raise UnsupportedError(f"{name}: expected {default}, because it is not implemented, found {found!r}")
        check_fields(self, _CHECKS)
        self._check_together()
        self._set("stop", _texts("stop", self.stop))
        self._set("bad_words", _texts("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise mistake("allowed_token_ids", "at least one token", self.allowed_token_ids)
        if self.stop and not self.detokenize:
            raise mistake("stop", "none, because detokenize is False", self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is drawn."""
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether what was drawn before changes the logits of what is drawn next."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def reads_history(self) -> bool:
        """Whether a draw depends on the tokens before it other than through the model."""
        return self.has_penalties or bool(self.bad_words) or self.min_tokens > 0

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) not in (field.default, (), {})
        ]
        return f"SamplingParams({', '.join(changed)})"

    def _check_together(self) -> None:
        if self.is_greedy and self.n > 1:
            raise mistake("n", "1, because temperature is 0 and all samples are equal", self.n)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise mistake("min_tokens", f"at most max_tokens, which is {self.max_tokens}", self.min_tokens)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


# The largest number that arrays of tokens and of parameters hold.
_MOST = 2**31 - 1

_CHECKS: dict[str, Check] = {
    "n": integer(1),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "repetition_penalty": between(0.01, 100),
    "temperature": A_TEMPERATURE,
    "top_p": ("a number above 0 and at most 1", lambda found: is_number(found) and 0 < found <= 1),
    "top_k": integer(-1, most=_MOST),
    "min_p": between(0, 1),
    "seed": integer(None, optional=True),
    "include_stop_str_in_output": A_BOOL,
    "ignore_eos": A_BOOL,
    "max_tokens": integer(1, optional=True),
    "min_tokens": integer(0),
    "logprobs": integer(-1, optional=True),
    "prompt_logprobs": integer(-1, optional=True),
    "detokenize": A_BOOL,
    "skip_special_tokens": A_BOOL,
    "truncate_prompt_tokens": (
        "-1 or an integer of at least 1",
        lambda found: found is None or (is_integer(found, -1) and found != 0),
    ),
    "output_kind": ("a RequestOutputKind", lambda found: isinstance(found, RequestOutputKind)),
}


def _texts(field: str, found: Any) -> tuple[str, ...]:
    texts = _items((found,) if isinstance(found, str) else found)
    if texts is None or not all(isinstance(text, str) and text for text in texts):
        raise mistake(field, "texts that are not empty", found)
    return texts


def _token_ids(field: str, found: Any) -> tuple[int, ...]:
    ids = _items(found)
    if ids is None or not all(is_integer(token, 0) and token <= _MOST for token in ids):
        raise mistake(field, f"integers of 0 to {_MOST}", found)
    return tuple(int(token) for token in ids)


def _items(found: Any) -> tuple[Any, ...] | None:
    """Return what something holds, nothing for None; None where it holds nothing of the kind."""
    if found is None:
        return ()
    return tuple(found) if isinstance(found, Iterable) else None


def _biases(found: Any) -> dict[int, float]:
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise mistake("logit_bias", "a mapping of token ids to numbers", found)
    for token, bias in found.items():
        if not is_integer(token, 0):
            raise mistake("logit_bias", "token ids of at least 0", token)
        if not (is_number(bias) and -100 <= bias <= 100):
            raise mistake("logit_bias", "numbers of -100 to 100", bias)
    return {int(token): float(bias) for token, bias in found.items()}
