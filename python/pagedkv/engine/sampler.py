"""Drawing tokens from logits, for a whole step at once."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention.row_ops import draw_tokens

# How a sample is drawn; a temperature of 0 is greedy, a `top_k` of 0 keeps all tokens.
PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("sample", np.uint64),
    ]
)

_NUM_CANDIDATES = 1024
_CHUNK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@torch.inference_mode()
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
    is_drawn = parameters["temperature"] > 0
    is_limited = is_drawn & ((parameters["min_p"] > 0) | (parameters["top_p"] < 1) | (parameters["top_k"] > 0))
    # Each kind by itself: what one row needs must not change the rounding of another.
    kinds = ((~is_drawn, _draw_best), (is_drawn & ~is_limited, _draw), (is_limited, _draw_limited))
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for is_kind, draw in kinds:
        if is_kind.all():
            return draw(logits, parameters, positions)
        if is_kind.any():
            rows = np.flatnonzero(is_kind)
            tokens[rows] = draw(logits[rows], parameters[rows], positions[rows])
    return tokens


def _draw_limited(logits: torch.Tensor, parameters: NDArray[Any], positions: NDArray[np.int32]) -> torch.Tensor:
    parameters = parameters.copy()
    scores = _tempered(logits, parameters["temperature"])
    parameters["temperature"] = 1
    _keep_min_p(scores, parameters["min_p"])
    _keep_top_k(scores, parameters["top_k"])
    _keep_top_p(scores, parameters["top_p"])
    return _draw(scores, parameters, positions)


def _draw(logits: torch.Tensor, parameters: NDArray[Any], positions: NDArray[np.int32]) -> torch.Tensor:
    uniform = uniforms(parameters["seed"], parameters["sample"], positions)
    temperature = parameters["temperature"].copy()
    if logits.device.type == "cpu":
        tokens = torch.empty(len(logits), dtype=torch.int32)
        draw_tokens(logits, temperature, uniform, tokens)
        return tokens
    scores = _tempered(logits, temperature) if (temperature != 1).any() else logits
    return _pick(scores, torch.from_numpy(uniform).to(logits.device))


def _tempered(logits: torch.Tensor, temperature: NDArray[np.float32]) -> torch.Tensor:
    return logits.to(torch.float32, copy=True).div_(torch.from_numpy(temperature).to(logits.device)[:, None])


def _draw_best(logits: torch.Tensor, _: NDArray[Any], __: NDArray[np.int32]) -> torch.Tensor:
    """Return the first of the largest logits of each row; torch's argmax takes some ten times as long as its amax."""
    chunks = _chunks(logits, -torch.inf)
    largest = chunks.amax(-1)
    chunk = largest.argmax(-1)
    rows = torch.arange(len(logits), device=logits.device)
    return (chunk * _CHUNK + chunks[rows, chunk].argmax(-1)).int()


def _chunks(rows: torch.Tensor, filler: float) -> torch.Tensor:
    """Return rows in chunks of equal length."""
    vocab_size = rows.shape[-1]
    if vocab_size % _CHUNK:
        rows = torch.nn.functional.pad(rows, (0, -vocab_size % _CHUNK), value=filler)
    return rows.view(len(rows), rows.shape[-1] // _CHUNK, _CHUNK)


def _pick(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first token of each row whose cumulative weight exceeds that share of the row's whole weight.

    For a GPU; on the CPU `draw_tokens` does it in one pass. Sums of chunks first, then one chunk: a cumulative sum over
    a whole vocabulary takes several times as long.
    """
    chunks = _chunks(scores, -torch.inf)
    largest = scores.amax(-1).float()[:, None]
    up_to = _weights(chunks, largest[:, None]).sum(-1).cumsum(-1, dtype=torch.float64)
    target = up_to[:, -1:] * uniform[:, None]
    # One with weight 0 never exceeds the number first. Rounding may leave nothing above it: then the last that counts.
    chunk = torch.searchsorted(up_to, target, right=True).minimum(_last(up_to))
    before = up_to.gather(-1, (chunk - 1).clamp_(min=0)).masked_fill_(chunk == 0, 0)
    own = chunks[torch.arange(len(scores), device=scores.device), chunk[:, 0]]
    within = _weights(own, largest).cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(within, target - before, right=True).minimum(_last(within))
    return (chunk * _CHUNK + token)[:, 0].int()


def _weights(scores: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return scores.to(torch.float32, copy=True).sub_(largest).exp_()


def _last(cumulative: torch.Tensor) -> torch.Tensor:
    """Return the first place of each row at which the whole sum is reached."""
    return torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())


def _keep_min_p(scores: torch.Tensor, min_p: NDArray[np.float32]) -> None:
    limited = np.flatnonzero(min_p > 0)
    if limited.size:
        least = torch.from_numpy(np.log(min_p[limited])).to(scores.device)
        own = scores[limited]
        scores[limited] = own.masked_fill(own < own.amax(-1, keepdim=True) + least[:, None], -torch.inf)


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
