"""From a prompt and parameters to a request: checked, and in the scheduler's words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.engine.adjustments import Rules
from pagedkv.engine.beam_search import BeamSearch, BeamSearchParams
from pagedkv.engine.checks import check_drawable, check_requested_tokens, check_token_ids, mistake
from pagedkv.engine.request import EngineRequest
from pagedkv.engine.sample import Sample
from pagedkv.engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pagedkv.config import SchedulerConfig
    from pagedkv.engine.text import TextCodec


class Admission:
    """Makes requests.

    Parameters
    ----------
    limits : SchedulerConfig
        What the scheduler was made with.
    text : TextCodec
        Turns tokens into text.
    vocab_size : int
        Logits per sample.
    eos_token_ids : iterable of int
        Tokens that end a sample unless its request ignores them.
    seed : int
        Seed of the requests that have none.
    """

    def __init__(
        self, limits: SchedulerConfig, text: TextCodec, vocab_size: int, eos_token_ids: Iterable[int], seed: int
    ) -> None:
        self._limits = limits
        self._text = text
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seed = seed

    def make(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None,
        number: int,
    ) -> EngineRequest:
        """Return a request, or say why there can be none.

        Parameters
        ----------
        request_id : str
            Its name.
        prompt_token_ids : list of int
            The prompt.
        params : SamplingParams or BeamSearchParams
            What it asks for.
        prompt : str or None
            The prompt as text.
        number : int
            How many requests came before.

        Returns
        -------
        EngineRequest
            With nothing computed yet.
        """
        self._check_seats(params)
        check_token_ids(prompt_token_ids, self._vocab_size)
        if isinstance(params, BeamSearchParams):
            beams = BeamSearch(params, () if params.ignore_eos else self._eos_token_ids)
            return EngineRequest(request_id, prompt, prompt_token_ids, _seats(params), [], beams)
        check_requested_tokens(params, self._vocab_size)
        self._text.check(params)
        decode = self._text.decode(skip_special_tokens=params.skip_special_tokens) if params.detokenize else None
        samples = [Sample(index, params, decode, prompt_token_ids) for index in range(params.n)]
        ends = [token for token in self._ends_of(params) if token < self._vocab_size]
        bad_words = self._text.bad_words(params)
        check_drawable(params, bad_words, ends)
        rules = Rules.of(params, bad_words, ends, len(prompt_token_ids))
        seed = self._seed_of(number) if params.seed is None else params.seed
        return EngineRequest(request_id, prompt, prompt_token_ids, params, samples, None, rules, seed)

    def limits_of(self, request: EngineRequest) -> dict[str, Any]:
        """Return what `Scheduler.add_request` is told of a request."""
        params = request.params
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._limits.max_model_len - len(request.prompt_token_ids))
        is_ahead = self._limits.max_plans_in_flight > 1
        needs_commit = request.beams is not None or (is_ahead and (params.reads_history or bool(params.stop)))
        return {
            "max_tokens": max_tokens,
            "n": params.n,
            # A beam search decides by itself what ends its sequences.
            "stop_token_ids": [] if request.beams is not None else self._ends_of(params),
            "min_tokens": params.min_tokens,
            "needs_commit": needs_commit,
            "use_prefix_cache": params.prompt_logprobs is None,
        }

    def _check_seats(self, params: SamplingParams | BeamSearchParams) -> None:
        # The scheduler refuses them too, but after everything that is kept per sample was made.
        most = self._limits.max_num_seqs
        name = "beam_width" if isinstance(params, BeamSearchParams) else "n"
        if (found := getattr(params, name)) > most:
            raise mistake(name, f"at most max_num_seqs={most}", found)

    def _ends_of(self, params: SamplingParams) -> list[int]:
        own = set(params.stop_token_ids or ())
        return sorted(own if params.ignore_eos else own | self._eos_token_ids)

    def _seed_of(self, number: int) -> int:
        sequence = np.random.SeedSequence((self._seed % 2**64, number))
        return int(sequence.generate_state(1, np.uint64)[0])


def _seats(params: BeamSearchParams) -> SamplingParams:
    return SamplingParams(
        n=params.beam_width,
        max_tokens=params.max_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
