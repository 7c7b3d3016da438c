"""Drawing tokens from logits, for a whole step at once."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# How a sample is drawn; a temperature of 0 is greedy, a `top_k` of 0 keeps all tokens.
PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("sample", np.uint64),
    ]
)

_NUM_CANDIDATES = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def sample_tokens(logits: torch.Tensor, parameters: NDArray[Any], positions: NDArray[np.int32]) -> torch.Tensor:
    """Draw one token per row of logits.

    Parameters
    ----------
    logits : torch.Tensor, shape (num_samples, vocab_size), float32, float16 or bfloat16
        Scores of the next token.
    parameters : numpy.ndarray, shape (num_samples,), PARAMETERS
        How each sample is drawn.
    positions : numpy.ndarray, shape (num_samples,), int32
        Position of the token from which each sample is drawn.

    Returns
    -------
    torch.Tensor, shape (num_samples,), int32
        The tokens.

    Notes
    -----
    Each draw takes one random number, a function of (seed, sample, position) alone: it depends neither on the batch nor
    on earlier draws, so a token drawn again after a rollback or a preemption is the same.
    """
    tokens = logits.argmax(-1)
    is_drawn = parameters["temperature"] > 0
    if is_drawn.any():
        drawn = np.flatnonzero(is_drawn)
        tokens[drawn] = _draw(logits[drawn], parameters[drawn], positions[drawn])
    return tokens.int()


def _draw(logits: torch.Tensor, parameters: NDArray[Any], positions: NDArray[np.int32]) -> torch.Tensor:
    temperature = torch.from_numpy(parameters["temperature"].copy()).to(logits.device)
    scores = logits.float() / temperature[:, None]
    _keep_top_k(scores, parameters["top_k"])
    _keep_top_p(scores, parameters["top_p"])
    cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    uniform = torch.from_numpy(uniforms(parameters["seed"], parameters["sample"], positions)).to(logits.device)
    # The first token whose cumulative probability exceeds the number; one with probability 0 never does so first.
    return torch.searchsorted(cumulative, cumulative[:, -1:] * uniform[:, None], right=True)[:, 0]


def _keep_top_k(scores: torch.Tensor, top_k: NDArray[np.int64]) -> None:
    limited = np.flatnonzero((top_k > 0) & (top_k < scores.shape[-1]))
    if limited.size:
        k = torch.from_numpy(top_k[limited]).to(scores.device)
        own = scores[limited]
        least = own.topk(int(k.max())).values.gather(-1, k[:, None] - 1)
        scores[limited] = own.masked_fill(own < least, -torch.inf)


def _keep_top_p(scores: torch.Tensor, top_p: NDArray[np.float64]) -> None:
    limited = np.flatnonzero(top_p < 1)
    if limited.size:
        p = torch.from_numpy(top_p[limited]).to(scores.device)
        own = scores[limited]
        scores[limited] = own.masked_fill(own < _least_of_top_p(own, p), -torch.inf)


def _least_of_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the score of the last token of each row that `top_p` keeps."""
    total = scores.logsumexp(-1, keepdim=True)
    vocab_size = scores.shape[-1]
    # Sorting a whole vocabulary takes longer than a small model's step; a text's next token has few candidates.
    for num_candidates in (min(_NUM_CANDIDATES, vocab_size), vocab_size):
        best = scores.topk(num_candidates).values
        probabilities = (best - total).exp()
        before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
        num_kept = (before < top_p[:, None]).sum(-1, keepdim=True)
        if (num_kept < num_candidates).all():
            break
    return best.gather(-1, num_kept - 1)


def uniforms(seed: NDArray[np.uint64], sample: NDArray[np.uint64], position: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each (seed, sample, position).

    Parameters
    ----------
    seed, sample, position : numpy.ndarray, shape (num_samples,)
        Non-negative integers.

    Returns
    -------
    numpy.ndarray, shape (num_samples,), float64
        Multiples of 2**-52.

    References
    ----------
    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014: the mixing function.
    """
    mixed = _mix(_mix(_mix(seed) ^ sample) ^ position.astype(np.uint64))
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIERS[0]
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIERS[1]
    return bits ^ (bits >> np.uint64(31))
