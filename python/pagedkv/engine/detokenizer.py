"""From tokens to text, piece by piece, never cutting a character in two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# What decoders write for bytes that are no character, also for the first bytes of one that is not complete.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Tokens before the first one that let it be decoded as it reads in the text, with the space before it.
_CONTEXT = 5
# A character has four bytes: of so many tokens the first must be complete or wrong.
_LONGEST_CHARACTER = 4

Decode = Callable[[Sequence[int]], str]


def make_decode(tokenizer: Any, *, skip_special_tokens: bool) -> Decode:
    """Return what turns token ids into text, by the shortest way that the tokenizer has.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The tokenizer.
    skip_special_tokens : bool
        Whether special tokens are left out.

    Returns
    -------
    callable
        Takes a sequence of ids.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """The text of one sample.

    Parameters
    ----------
    decode : callable
        Turns token ids into text.
    prompt_token_ids : sequence of int
        The prompt, of which the last tokens are the context of the first one.

    Examples
    --------
    >>> pieces = Detokenizer(lambda ids: bytes(ids).decode(errors="replace"), [])
    >>> [pieces.add([byte]) for byte in "aé!".encode()], pieces.finish()
    (['a', '', 'é', '!'], '')
    """

    __slots__ = ("_before", "_decode", "_num_read", "_window")

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        # The window is context, of which the text was given, and then tokens that wait.
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._num_read = len(self._window)
        self._before: str | None = None

    def add(self, token_ids: Sequence[int]) -> str:
        """Take tokens; return the text that is complete with them.

        Parameters
        ----------
        token_ids : sequence of int
            What comes next.

        Returns
        -------
        str
            Text that will not change any more.
        """
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if not text.endswith(_BROKEN):
            return self._read(len(self._window), text)
        return self._read_what_is_complete(text)

    def finish(self) -> str:
        """Return the rest, with a replacement character for each incomplete one."""
        if self._num_read == len(self._window):
            return ""
        return self._read(len(self._window), self._decode(self._window))

    def _read(self, end: int, text: str) -> str:
        """Give the text of the window up to a token; keep the tokens that gave it as context."""
        new = text[len(self._text_before()) :]
        # Tokens that leave no text, such as special ones, are no context for the next: they are dropped.
        context = self._window[self._num_read : end] if new else self._window[: self._num_read]
        self._window = context + self._window[end:]
        self._num_read = len(context)
        if new:
            self._before = None
        return new

    def _text_before(self) -> str:
        if self._before is None:
            self._before = self._decode(self._window[: self._num_read]) if self._num_read else ""
        return self._before

    def _read_what_is_complete(self, text: str) -> str:
        """Give what comes before the character that is not complete, if enough tokens wait that it can't be a part."""
        if len(self._window) - self._num_read <= _LONGEST_CHARACTER:
            return ""
        for end in range(len(self._window) - 1, self._num_read, -1):
            first = self._decode(self._window[:end])
            rest = self._decode(self._window[end:])
            # A character is not cut here if both parts are together what the whole is.
            if first + rest == text:
                return self._read(end, first)
        return ""
