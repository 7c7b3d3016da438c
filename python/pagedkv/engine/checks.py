"""What values of parameters must be, and how a mistake is told."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from pagedkv.exceptions import InvalidArgumentError

# What is expected, in words, and whether something found is that.
Check = tuple[str, Callable[[Any], bool]]


def mistake(field: str, expected: str, found: object) -> InvalidArgumentError:
    """Return the error that names a field, what was expected and what was found."""
    return InvalidArgumentError(f"{field}: expected {expected}, found {found!r}")


def check_fields(found: object, checks: Mapping[str, Check]) -> None:
    """Refuse an object of which a field is not what its check expects."""
    for name, (expected, is_right) in checks.items():
        if not is_right(value := getattr(found, name)):
            raise mistake(name, expected, value)


def is_number(found: object) -> bool:
    """Whether something is a real number, and no bool."""
    return isinstance(found, Real) and not isinstance(found, bool)


def is_integer(found: Any, least: int | None = None) -> bool:
    """Whether something is an integer, no bool, and not less than a limit."""
    try:
        value = operator.index(found)
    except TypeError:
        return False
    return not isinstance(found, bool) and (least is None or value >= least)


def between(low: float, high: float) -> Check:
    """Return the check of a number of a range, its ends included."""
    return f"a number of {low} to {high}", lambda found: is_number(found) and low <= found <= high


def integer(least: int | None, *, most: int | None = None, optional: bool = False) -> Check:
    """Return the check of an integer, or of None as well."""
    expected = "an integer" if least is None else f"an integer of at least {least}"
    if most is not None:
        expected += f" and at most {most}"
    return (
        expected,
        lambda found: (optional and found is None) or (is_integer(found, least) and (most is None or found <= most)),
    )


A_BOOL: Check = "True or False", lambda found: isinstance(found, bool)
A_TEMPERATURE: Check = (
    "a number of 0 to 1e30",
    lambda found: is_number(found) and 0 <= found <= 1e30,
)


def check_token_ids(token_ids: Any, vocab_size: int) -> None:
    """Refuse a prompt that is none for a model with so many tokens."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        found = f"{ids.ndim} dimensions of {ids.dtype}" if ids.size else "none"
        raise InvalidArgumentError(f"prompt_token_ids: expected at least one integer, found {found}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidArgumentError(f"prompt_token_ids: expected ids of 0 to {vocab_size - 1}, found {wrong}")


def check_requested_tokens(params: Any, vocab_size: int) -> None:
    """Refuse parameters of sampling that name tokens which the model does not have."""
    for name in ("logit_bias", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise mistake(name, f"ids of 0 to {vocab_size - 1}", token)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise mistake(name, f"at most the vocabulary, {vocab_size}", getattr(params, name))


def check_drawable(params: Any, bad_words: Sequence[Sequence[int]], ends: Iterable[int]) -> None:
    """Refuse parameters of sampling under which there might be no token to draw.

    A word that is not to be drawn counts by its last token, whatever is drawn before.
    """
    if params.allowed_token_ids is None:
        return
    last = {word[-1] for word in bad_words}
    refused = last.union(ends) if params.min_tokens else last
    if refused.issuperset(params.allowed_token_ids):
        expected = "a token that ends no bad word and, because of min_tokens, no answer"
        raise mistake("allowed_token_ids", expected, params.allowed_token_ids)
