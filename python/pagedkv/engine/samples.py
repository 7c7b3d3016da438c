"""What the loop knows of each running sample, in arrays that a step reads and writes at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.sampler import PARAMETERS

if TYPE_CHECKING:
    from pagedkv.engine.sampling_params import SamplingParams


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
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self._line_of_row = np.zeros(max_num_seqs, np.intp)
        self._parameters = np.zeros(max_num_seqs, PARAMETERS)
        self._tokens = np.empty((max_num_seqs, max_model_len), np.int32)
        self._vacant = list(range(max_num_seqs))

    def add(self, params: SamplingParams, seed: int) -> NDArray[np.intp]:
        """Take a line for each sample of a request.

        Parameters
        ----------
        params : SamplingParams
            How its tokens are drawn.
        seed : int
            Seed of its random numbers.

        Returns
        -------
        numpy.ndarray, shape (n,), intp
            The lines.
        """
        while len(self._vacant) < params.n:
            self._grow()
        lines = np.array([self._vacant.pop() for _ in range(params.n)], np.intp)
        temperature = 0.0 if params.is_greedy else params.temperature
        parameters = (temperature, max(params.top_k, 0), params.top_p, seed % 2**64, 0)
        self._parameters[lines] = np.array(parameters, PARAMETERS)
        self._parameters["sample"][lines] = np.arange(params.n)
        return lines

    def remove(self, lines: NDArray[np.intp]) -> None:
        """Give lines back.

        Parameters
        ----------
        lines : numpy.ndarray
            Lines of a request that ended.
        """
        self._vacant.extend(lines.tolist())

    def seat(self, row: int, line: int) -> None:
        """Note which sample a row of the block table belongs to from now on.

        Parameters
        ----------
        row : int
            The row.
        line : int
            The sample's line.
        """
        self._line_of_row[row] = line

    def lines(self, rows: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the lines of the samples in rows of the block table.

        Parameters
        ----------
        rows : numpy.ndarray, shape (num_samples,), int32
            The rows.

        Returns
        -------
        numpy.ndarray, shape (num_samples,), intp
            Their lines.
        """
        return self._line_of_row[rows]

    def parameters(self, lines: NDArray[np.intp]) -> NDArray[Any]:
        """Return how samples are drawn.

        Parameters
        ----------
        lines : numpy.ndarray, shape (num_samples,), intp
            Their lines.

        Returns
        -------
        numpy.ndarray, shape (num_samples,), PARAMETERS
            For `sample_tokens`.
        """
        return self._parameters[lines]

    def put_tokens(self, lines: NDArray[np.intp], positions: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Write down one token per sample.

        Parameters
        ----------
        lines : numpy.ndarray, shape (num_samples,), intp
            The samples' lines.
        positions : numpy.ndarray, shape (num_samples,), int32
            Position of each token in its sequence.
        tokens : numpy.ndarray, shape (num_samples,), int32
            The tokens.
        """
        self._tokens[lines, positions] = tokens

    def tokens(self, line: int, start: int, end: int) -> list[int]:
        """Return the tokens of a sample between two positions.

        Parameters
        ----------
        line : int
            The sample's line.
        start, end : int
            First position, and the one after the last.

        Returns
        -------
        list of int
            The tokens.
        """
        found: list[int] = self._tokens[line, start:end].tolist()
        return found

    def _grow(self) -> None:
        size = len(self._parameters)
        self._parameters = np.concatenate([self._parameters, np.zeros(size, PARAMETERS)])
        self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._vacant.extend(range(size, 2 * size))
