"""What the loop knows of each running sample, in arrays that a step reads and writes at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.adjustments import Adjustments
from pagedkv.engine.sampler import PARAMETERS

if TYPE_CHECKING:
    import torch

    from pagedkv.engine.request import EngineRequest

NO_LOGPROBS = -2


class SampleTable:
    """Parameters and tokens of samples, one line each.

    A sample has a line from its request's admission to the request's end, whichever rows of the block table it has in
    the meantime.

    Parameters
    ----------
    max_num_seqs : int
        Rows of the block table, and lines to start with: preempted requests keep theirs, so there may be more.
    max_model_len : int
        Longest sequence.
    vocab_size : int
        Logits per sample.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int) -> None:
        self._line_of_row = np.zeros(max_num_seqs, np.intp)
        self._row_of_line = np.full(max_num_seqs, -1, np.int32)
        self._parameters = np.zeros(max_num_seqs, PARAMETERS)
        self._tokens = np.empty((max_num_seqs, max_model_len), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        # Whether someone looks at each of its tokens, and how many log-probabilities they want.
        self._is_watched = np.zeros(max_num_seqs, bool)
        self._num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self._may_draft = np.zeros(max_num_seqs, bool)
        self._adjustments = Adjustments(max_num_seqs, vocab_size)
        self._vacant = list(range(max_num_seqs))

    def add(self, request: EngineRequest) -> NDArray[np.intp]:
        """Take a line for each sample of a request.

        Parameters
        ----------
        request : EngineRequest
            The request.

        Returns
        -------
        numpy.ndarray, shape (n,), intp
            The lines.
        """
        params, prompt_token_ids = request.params, request.prompt_token_ids
        while len(self._vacant) < params.n:
            self._grow()
        lines = np.array([self._vacant.pop() for _ in range(params.n)], np.intp)
        temperature = 0.0 if params.is_greedy else params.temperature
        parameters = (temperature, max(params.top_k, 0), params.top_p, params.min_p, request.seed % 2**64, 0)
        self._parameters[lines] = np.array(parameters, PARAMETERS)
        self._parameters["sample"][lines] = np.arange(params.n)
        self._tokens[lines, : len(prompt_token_ids)] = prompt_token_ids
        self._num_tokens[lines] = len(prompt_token_ids)
        self._is_watched[lines] = request.is_watched
        self._num_logprobs[lines] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._may_draft[lines] = not params.reads_history
        self._adjustments.add(lines, params, request.rules)
        return lines

    def remove(self, lines: NDArray[np.intp]) -> None:
        """Give lines of a request that ended back."""
        self._adjustments.remove(lines)
        for row in self._row_of_line[lines].tolist():
            if row >= 0:
                self.leave(row)
        self._vacant.extend(lines.tolist())

    def seat(self, row: int, line: int) -> None:
        """Note which sample a row of the block table belongs to from now on."""
        self._line_of_row[row] = line
        self._row_of_line[line] = row

    def leave(self, row: int) -> None:
        """Note that the sample of a row has left it."""
        line = self._line_of_row[row]
        if self._row_of_line[line] == row:
            self._row_of_line[line] = -1

    def lines(self, rows: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the lines of the samples in rows of the block table."""
        return self._line_of_row[rows]

    def parameters(self, lines: NDArray[np.intp]) -> NDArray[Any]:
        """Return how samples are drawn, for `sample_tokens`."""
        return self._parameters[lines]

    def adjust(self, logits: torch.Tensor, lines: NDArray[np.intp], positions: NDArray[np.int32]) -> torch.Tensor:
        """Return logits with penalties, biases and the like of their samples."""
        return self._adjustments.apply(logits, lines, positions, self._tokens)

    def num_logprobs(self, lines: NDArray[np.intp]) -> NDArray[np.int32]:
        """Return how many most probable tokens each sample is told of; `NO_LOGPROBS` for nothing at all."""
        return self._num_logprobs[lines]

    def is_watched(self, lines: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return whether someone looks at each token of samples."""
        return self._is_watched[lines]

    def put_tokens(self, lines: NDArray[np.intp], positions: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Write down one token per entry; a sample may have several, in order.

        Parameters
        ----------
        lines : numpy.ndarray, shape (num_tokens,), intp
            The samples' lines.
        positions : numpy.ndarray, shape (num_tokens,), int32
            Position of each token in its sequence.
        tokens : numpy.ndarray, shape (num_tokens,), int32
            The tokens.
        """
        self._tokens[lines, positions] = tokens
        self._num_tokens[lines] = positions + 1
        self._adjustments.count(lines, tokens)

    def num_tokens(self, line: int) -> int:
        """Return how many tokens of a sample are known, its prompt included."""
        return int(self._num_tokens[line])

    def tokens(self, line: int, start: int, end: int | None = None) -> list[int]:
        """Return the tokens of a sample between two positions."""
        found: list[int] = self._tokens[line, start : self._num_tokens[line] if end is None else end].tolist()
        return found

    def history(self, line: int) -> NDArray[np.int32]:
        """Return all known tokens of a sample, as a view."""
        return self._tokens[line, : self._num_tokens[line]]

    def drafting_rows(self, lines: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Return those of the lines that sit and may have drafts, and their rows."""
        lines = lines[self._may_draft[lines] & (self._row_of_line[lines] >= 0)]
        return lines, self._row_of_line[lines]

    def _grow(self) -> None:
        size = len(self._parameters)
        self._parameters = np.concatenate([self._parameters, np.zeros(size, PARAMETERS)])
        self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._num_tokens = np.concatenate([self._num_tokens, np.zeros(size, np.int32)])
        self._row_of_line = np.concatenate([self._row_of_line, np.full(size, -1, np.int32)])
        self._is_watched = np.concatenate([self._is_watched, np.zeros(size, bool)])
        self._num_logprobs = np.concatenate([self._num_logprobs, np.full(size, NO_LOGPROBS, np.int32)])
        self._may_draft = np.concatenate([self._may_draft, np.zeros(size, bool)])
        self._adjustments.grow(2 * size)
        self._vacant.extend(range(size, 2 * size))
