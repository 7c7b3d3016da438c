"""Draft tokens from the text itself: what followed the last time that the last few tokens stood there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.checks import integer, mistake
from pagedkv.exceptions import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Proposes the continuation of an earlier occurrence of a sequence's last tokens.

    Parameters
    ----------
    num_speculative_tokens : int
        Most draft tokens per sequence and step.
    prompt_lookup_max, prompt_lookup_min : int
        How many last tokens must have occurred before; the longest match is taken.

    References
    ----------
    Saxena, Prompt Lookup Decoding, 2023 (github.com/apoorvumang/prompt-lookup-decoding).
    """

    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        expected, is_right = integer(1)
        for name in self.__slots__:
            if not is_right(found := getattr(self, name)):
                raise mistake(name, expected, found)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise mistake("prompt_lookup_min", f"at most {self.prompt_lookup_max}", self.prompt_lookup_min)

    @classmethod
    def read(cls, config: PromptLookup | Mapping[str, Any] | None) -> PromptLookup | None:
        """Take vLLM's `speculative_config`: ``{"method": "ngram", "num_speculative_tokens": 4, ...}``."""
        if config is None or isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise mistake("speculative_config", "a mapping", config)
        options = dict(config)
        if (method := options.pop("method", "ngram")) != "ngram":
            raise InvalidArgumentError(f"speculative_config: expected the method 'ngram', found {method!r}")
        if unknown := sorted(set(options) - set(cls.__slots__)):
            raise InvalidArgumentError(f"speculative_config: expected {', '.join(cls.__slots__)}, found {unknown[0]!r}")
        return cls(**options)

    def propose(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return draft tokens.

        Parameters
        ----------
        tokens : numpy.ndarray, shape (num_tokens,), int32
            All known tokens of a sequence.

        Returns
        -------
        numpy.ndarray, int32
            At most `num_speculative_tokens`; none where the last tokens are new.
        """
        # Ends of earlier occurrences of the last token; each longer match is among those of the shorter one.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        found = ends if self.prompt_lookup_min == 1 else ends[:0]
        for size in range(2, self.prompt_lookup_max + 1):
            ends = ends[ends >= size - 1]
            ends = ends[tokens[ends - size + 1] == tokens[-size]] if len(tokens) > size else ends[:0]
            if not ends.size:
                break
            if size >= self.prompt_lookup_min:
                found = ends
        if not found.size:
            return tokens[:0]
        # The last one with enough behind it: of text that repeats itself, the very last one has next to nothing.
        long = found[found < len(tokens) - self.num_speculative_tokens]
        start = int(long[-1] if long.size else found[0]) + 1
        return tokens[start : start + self.num_speculative_tokens]
