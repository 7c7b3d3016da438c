"""Beam search: which beams go on with which tokens, and which have ended, as `transformers.generate` decides it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.checks import A_BOOL, A_TEMPERATURE, Check, check_fields, integer, is_number

# Scores of beams that do not count.
_NONE = -1.0e9


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of beam search, by vLLM's names, with the early stopping of transformers.

    Parameters
    ----------
    beam_width : int
        Beams, and sequences that come back.
    max_tokens : int
        Most tokens of a sequence.
    ignore_eos : bool
        Whether the model's own end tokens are tokens like any other.
    temperature : float
        Logits are divided by it; 0 leaves them as they are.
    length_penalty : float
        A sequence's score is the sum of its log-probabilities over its number of tokens to this power.
    include_stop_str_in_output : bool
        Whether the text keeps the end token.
    early_stopping : bool or "never"
        True ends the search when there are `beam_width` sequences; False also when the best beam, as long as it is now,
        scores no better than they; "never" only when no beam can.

    Raises
    ------
    InvalidArgumentError
        If a value is out of its range; it names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        check_fields(self, _CHECKS)


_CHECKS: dict[str, Check] = {
    "beam_width": integer(1),
    "max_tokens": integer(1),
    "ignore_eos": A_BOOL,
    "temperature": A_TEMPERATURE,
    "length_penalty": ("a finite number", lambda found: is_number(found) and math.isfinite(found)),
    "include_stop_str_in_output": A_BOOL,
    "early_stopping": ("True, False or 'never'", lambda found: isinstance(found, bool) or found == "never"),
}


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One sequence that beam search found.

    Parameters
    ----------
    tokens : list of int
        Prompt and output.
    cum_logprob : float
        Sum of the log-probabilities of the output.
    score : float
        `cum_logprob` over the length to the power of `length_penalty`: what sequences are ordered by.
    text : str
        The output as text.
    finish_reason : {"stop", "length"}
        Whether an end token or `max_tokens` ended it.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What beam search found for one prompt.

    Parameters
    ----------
    sequences : list of BeamSearchSequence
        The best first.
    """

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that has ended."""

    token_ids: NDArray[np.int32]
    cum_logprob: float
    is_stop: bool


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What a step does to the beams of a request; it counts once it is accepted.

    Parameters
    ----------
    tokens, parents : numpy.ndarray, shape (beam_width,), int32
        The tokens that go on, and the row of logits that each continues; none where the search has ended.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    sequences: NDArray[np.int32]
    scores: torch.Tensor
    ended: list[Hypothesis | None]
    ended_scores: torch.Tensor
    is_improving: bool


@dataclass(slots=True)
class BeamSearch:
    """The beams of one request.

    Parameters
    ----------
    params : BeamSearchParams
        What was asked for.
    eos_token_ids : iterable of int
        Tokens that end a sequence.
    """

    params: BeamSearchParams
    eos_token_ids: Iterable[int]
    _ends: torch.Tensor = field(init=False)
    _beam_of: dict[int, int] = field(init=False)
    _sequences: NDArray[np.int32] = field(init=False)
    _scores: torch.Tensor = field(init=False)
    _ended: list[Hypothesis | None] = field(init=False)
    _ended_scores: torch.Tensor = field(init=False)
    _is_improving: bool = True

    def __post_init__(self) -> None:
        width = self.params.beam_width
        self._ends = torch.tensor(sorted(self.eos_token_ids), dtype=torch.long)
        self._beam_of = {number: number for number in range(width)}
        self._sequences = np.zeros((width, 0), np.int32)
        self._scores = torch.full((width,), _NONE)
        self._scores[0] = 0.0
        self._ended = [None] * width
        self._ended_scores = torch.full((width,), _NONE)

    @torch.inference_mode()
    def step(self, logits: torch.Tensor, numbers: Sequence[int]) -> BeamStep:
        """Choose the beams that go on.

        Parameters
        ----------
        logits : torch.Tensor, shape (beam_width, vocab_size)
            What the model says behind each beam.
        numbers : sequence of int
            The sequence number of each row.

        Returns
        -------
        BeamStep
            To be accepted when its tokens are committed.
        """
        params, width, length = self.params, self.params.beam_width, self._sequences.shape[1] + 1
        row_of = np.argsort([self._beam_of[number] for number in numbers])
        if params.temperature:
            logits = logits / params.temperature
        totals = (logits[row_of].float().log_softmax(-1).cpu() + self._scores[:, None]).reshape(-1)
        best = totals.topk(max(2, 1 + len(self._ends)) * width)
        beams, tokens = best.indices // logits.shape[-1], best.indices % logits.shape[-1]
        is_stop = torch.isin(tokens, self._ends)
        is_end = is_stop | (length >= params.max_tokens)

        parents, chosen = beams.numpy(), tokens.numpy().astype(np.int32)
        candidates = np.concatenate([self._sequences[parents], chosen[:, None]], axis=1)
        ended, ended_scores = self._merge(candidates, best.values, is_stop, is_end, length)
        running = best.values + is_end * _NONE
        going_on = running.topk(width).indices
        scores = running[going_on]
        is_improving = self._can_improve(scores, ended, ended_scores, length)
        is_over = not is_improving or bool(is_end.all())
        is_over |= params.early_stopping is True and all(ended)
        kept = going_on.numpy()[: 0 if is_over else width]
        return BeamStep(
            chosen[kept],
            row_of[parents[kept]].astype(np.int32),
            candidates[going_on.numpy()],
            scores,
            ended,
            ended_scores,
            is_improving,
        )

    def accept(self, step: BeamStep, numbers: Sequence[int]) -> None:
        """Go on with what a step chose.

        Parameters
        ----------
        step : BeamStep
            What `step` returned.
        numbers : sequence of int
            The sequence number that each of its tokens went to.
        """
        self._sequences, self._scores = step.sequences, step.scores
        self._ended, self._ended_scores, self._is_improving = step.ended, step.ended_scores, step.is_improving
        self._beam_of = {number: beam for beam, number in enumerate(numbers)}

    def hypotheses(self) -> list[tuple[Hypothesis, float]]:
        """Return the sequences that ended, and their scores, the best first."""
        pairs = zip(self._ended, self._ended_scores.tolist(), strict=True)
        return [(hypothesis, score) for hypothesis, score in pairs if hypothesis is not None]

    def _merge(
        self,
        candidates: NDArray[np.int32],
        totals: torch.Tensor,
        is_stop: torch.Tensor,
        is_end: torch.Tensor,
        length: int,
    ) -> tuple[list[Hypothesis | None], torch.Tensor]:
        """Take what ended among the best `beam_width` candidates, and keep the best of what has ended."""
        width = self.params.beam_width
        counts = is_end & (torch.arange(len(totals)) < width)
        scores = totals / length**self.params.length_penalty
        scores += (self.params.early_stopping is True and all(self._ended)) * _NONE
        scores += (not self._is_improving) * _NONE
        scores += ~counts * _NONE
        best = torch.cat([self._ended_scores, scores]).topk(width)
        ended = []
        for at in best.indices.tolist():
            new = at - width
            if new < 0:
                ended.append(self._ended[at])
            elif counts[new]:
                ended.append(Hypothesis(candidates[new], float(totals[new]), bool(is_stop[new])))
            else:
                ended.append(None)
        return ended, best.values

    def _can_improve(
        self, scores: torch.Tensor, ended: list[Hypothesis | None], ended_scores: torch.Tensor, length: int
    ) -> bool:
        """Whether the best beam may still score better than the worst sequence that has ended."""
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.params.max_tokens
        worst = float(ended_scores.min()) if all(ended) else _NONE
        return self._is_improving and bool(scores[0] / length**penalty > worst)
