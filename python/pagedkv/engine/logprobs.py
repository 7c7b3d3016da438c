"""Log-probabilities of tokens, as the model says them: before penalties, temperature and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Logprob:
    """How probable a token was.

    Parameters
    ----------
    logprob : float
        Natural logarithm of its probability.
    rank : int, optional
        Its place among all tokens, from 1.
    decoded_token : str, optional
        The token as text; None where there is no tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one token per row, and of each row's most probable ones.

    Parameters
    ----------
    chosen, ranks : numpy.ndarray, shape (num_rows,)
        Log-probability and rank of the token.
    tokens, logprobs : numpy.ndarray, shape (num_rows, k)
        The most probable tokens, and theirs.
    """

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]

    def as_dict(self, row: int, token: int, num: int, decode: Callable[[int], str | None]) -> dict[int, Logprob]:
        """Return the entries of a row: the token itself, then the `num` most probable ones, by vLLM's order."""
        found = {token: Logprob(float(self.chosen[row]), int(self.ranks[row]), decode(token))}
        best = zip(self.tokens[row, :num].tolist(), self.logprobs[row, :num].tolist(), strict=True)
        for rank, (other, logprob) in enumerate(best, 1):
            found.setdefault(other, Logprob(logprob, rank, decode(other)))
        return found


@torch.inference_mode()
def row_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_best: int) -> RowLogprobs:
    """Compute log-probabilities from logits.

    Parameters
    ----------
    logits : torch.Tensor, shape (num_rows, vocab_size)
        What the model says.
    tokens : torch.Tensor, shape (num_rows,), integers
        The token of each row.
    num_best : int
        How many of the most probable tokens to give; -1 for all.

    Returns
    -------
    RowLogprobs
        On the host.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.long()[:, None])
    vocab_size = logits.shape[-1]
    best = logprobs.topk(vocab_size if num_best < 0 else min(num_best, vocab_size))
    ranks = (logprobs > chosen).sum(-1) + 1
    arrays = chosen[:, 0], ranks, best.indices, best.values
    return RowLogprobs(*(array.cpu().numpy() for array in arrays))
