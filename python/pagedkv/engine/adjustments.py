"""What changes logits before a draw: penalties, biases, bad words, allowed tokens, a least number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine.sampling_params import SamplingParams

_PENALTIES = np.dtype([("presence", np.float32), ("frequency", np.float32), ("repetition", np.float32)])
_NO_PENALTIES = np.array((0, 0, 1), _PENALTIES)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a request asks of logits beside penalties.

    Parameters
    ----------
    biased : numpy.ndarray, intp
        Tokens with a bias.
    biases : numpy.ndarray, float32
        Their biases.
    allowed : numpy.ndarray or None
        The only tokens that may be drawn.
    bad_words : tuple of numpy.ndarray
        Token sequences of which the last is not drawn behind the others.
    ends : numpy.ndarray
        Tokens that are not drawn before there are `min_tokens`.
    min_tokens : int
        Least number of tokens.
    prompt_len : int
        Tokens of the prompt.
    """

    biased: NDArray[np.intp]
    biases: NDArray[np.float32]
    allowed: NDArray[np.intp] | None
    bad_words: tuple[NDArray[np.int32], ...]
    ends: NDArray[np.intp]
    min_tokens: int
    prompt_len: int

    @classmethod
    def of(
        cls, params: SamplingParams, bad_words: Sequence[Sequence[int]], ends: Sequence[int], prompt_len: int
    ) -> Rules | None:
        """Return what a request asks for, or None where that is nothing."""
        if not (params.logit_bias or params.allowed_token_ids or bad_words or params.min_tokens):
            return None
        bias, allowed = dict(params.logit_bias or {}), params.allowed_token_ids
        return cls(
            np.array(list(bias), np.intp),
            np.array(list(bias.values()), np.float32),
            None if allowed is None else np.array(list(allowed), np.intp),
            tuple(np.array(word, np.int32) for word in bad_words),
            np.array(ends, np.intp),
            params.min_tokens,
            prompt_len,
        )

    def apply(self, logits: torch.Tensor, tokens: NDArray[np.int32]) -> None:
        """Change one row of logits for the token behind these."""
        if self.allowed is not None:
            allowed = torch.from_numpy(self.allowed)
            kept = logits[allowed]
            logits.fill_(-torch.inf)
            logits[allowed] = kept
        if len(tokens) - self.prompt_len < self.min_tokens:
            logits[torch.from_numpy(self.ends)] = -torch.inf
        if len(self.biased):
            logits[torch.from_numpy(self.biased)] += torch.from_numpy(self.biases).to(logits.device)
        for word in self.bad_words:
            before = len(word) - 1
            if before <= len(tokens) - self.prompt_len and (tokens[len(tokens) - before :] == word[:-1]).all():
                logits[int(word[-1])] = -torch.inf


class Adjustments:
    """What the samples that run ask of their logits, one line each.

    Parameters
    ----------
    num_lines : int
        Lines to start with.
    vocab_size : int
        Logits per sample.
    """

    def __init__(self, num_lines: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._penalties = np.full(num_lines, _NO_PENALTIES, _PENALTIES)
        self._is_penalised = np.zeros(num_lines, bool)
        self._is_ruled = np.zeros(num_lines, bool)
        self._rules: dict[int, Rules] = {}
        # How often a penalised line drew each token; a place is taken by the first line that needs one.
        self._counts = np.zeros((0, vocab_size), np.int32)
        self._place = np.full(num_lines, -1, np.intp)
        self._vacant: list[int] = []

    def add(self, lines: NDArray[np.intp], params: SamplingParams, rules: Rules | None) -> None:
        """Note what the samples of a request ask for."""
        if params.has_penalties:
            penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
            self._penalties[lines] = np.array(penalties, _PENALTIES)
            self._is_penalised[lines] = True
            for line in lines:
                self._place[line] = self._take_place()
        if rules is not None:
            self._is_ruled[lines] = True
            self._rules.update((line, rules) for line in lines.tolist())

    def remove(self, lines: NDArray[np.intp]) -> None:
        """Forget what lines asked for."""
        for line in lines[self._is_penalised[lines]].tolist():
            self._vacant.append(int(self._place[line]))
            self._place[line] = -1
        for line in lines[self._is_ruled[lines]].tolist():
            del self._rules[line]
        self._is_penalised[lines] = self._is_ruled[lines] = False
        self._penalties[lines] = _NO_PENALTIES

    def grow(self, num_lines: int) -> None:
        """Make room for more lines."""
        more = num_lines - len(self._place)
        self._penalties = np.concatenate([self._penalties, np.full(more, _NO_PENALTIES, _PENALTIES)])
        self._is_penalised = np.concatenate([self._is_penalised, np.zeros(more, bool)])
        self._is_ruled = np.concatenate([self._is_ruled, np.zeros(more, bool)])
        self._place = np.concatenate([self._place, np.full(more, -1, np.intp)])

    def count(self, lines: NDArray[np.intp], tokens: NDArray[np.int32]) -> None:
        """Count one more token per line."""
        penalised = self._is_penalised[lines]
        if penalised.any():
            np.add.at(self._counts, (self._place[lines[penalised]], tokens[penalised]), 1)

    def apply(
        self,
        logits: torch.Tensor,
        lines: NDArray[np.intp],
        positions: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> torch.Tensor:
        """Return logits as the samples ask for.

        Parameters
        ----------
        logits : torch.Tensor, shape (num_samples, vocab_size)
            What the model says; not changed.
        lines : numpy.ndarray, shape (num_samples,), intp
            Line of each sample.
        positions : numpy.ndarray, shape (num_samples,), int32
            Position of the token from which each sample is drawn.
        tokens : numpy.ndarray, shape (num_lines, max_model_len), int32
            Tokens of all lines.

        Returns
        -------
        torch.Tensor, shape (num_samples, vocab_size)
            The same tensor where nothing is asked for, else another one, in float32.
        """
        penalised, ruled = self._is_penalised[lines], self._is_ruled[lines]
        if not (penalised.any() or ruled.any()):
            return logits
        adjusted = logits.to(torch.float32, copy=True)
        for at in np.flatnonzero(ruled):
            self._rules[int(lines[at])].apply(adjusted[at], tokens[lines[at], : positions[at] + 1])
        if penalised.any():
            rows = np.flatnonzero(penalised)
            self._penalise(adjusted, rows, lines[rows], positions[rows] + 1, tokens)
        return adjusted

    def _penalise(
        self,
        logits: torch.Tensor,
        at: NDArray[np.intp],
        lines: NDArray[np.intp],
        num_tokens: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> None:
        # Only logits of tokens that occurred change. Short lines repeat their first token: one value, written twice.
        longest = int(num_tokens.max())
        seen = tokens[lines, :longest].astype(np.int64)
        seen = np.where(np.arange(longest) < num_tokens[:, None], seen, seen[:, :1])
        counts = torch.from_numpy(self._counts[self._place[lines][:, None], seen]).to(logits.device)
        index = torch.from_numpy(seen).to(logits.device)
        presence, frequency, repetition = (
            torch.from_numpy(self._penalties[name][lines].copy())[:, None].to(logits.device)
            for name in ("presence", "frequency", "repetition")
        )
        own = logits[at]
        values = own.gather(-1, index)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts + presence * (counts > 0)
        logits[at] = own.scatter_(-1, index, values)

    def _take_place(self) -> int:
        if not self._vacant:
            start = len(self._counts)
            more = max(4, start)
            self._counts = np.concatenate([self._counts, np.zeros((more, self._vocab_size), np.int32)])
            self._vacant.extend(range(start, start + more))
        place = self._vacant.pop()
        self._counts[place] = 0
        return place


def bad_word_tokens(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the token sequences that spell words, at the beginning of a text and behind a space.

    Parameters
    ----------
    words : sequence of str
        The words.
    tokenizer : transformers.PreTrainedTokenizerBase
        What turns text into tokens.

    Returns
    -------
    list of list of int
        One or two per word: the second, behind a space, only where it is as long and begins otherwise, as in vLLM.
    """
    found = []
    for word in words:
        bare = tokenizer(word.lstrip(), add_special_tokens=False).input_ids
        spaced = tokenizer(" " + word.lstrip(), add_special_tokens=False).input_ids
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return [list(ids) for ids in found if ids]
