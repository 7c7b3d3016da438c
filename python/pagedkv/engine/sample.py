"""One sample of a request: its tokens, its text, and whether a text in it ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.engine.detokenizer import Detokenizer
from pagedkv.engine.outputs import CompletionOutput
from pagedkv.engine.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine.detokenizer import Decode
    from pagedkv.engine.logprobs import Logprob
    from pagedkv.engine.outputs import FinishReason
    from pagedkv.engine.sampling_params import SamplingParams


class Sample:
    """What a sample has so far.

    Parameters
    ----------
    index : int
        Which sample of its request.
    params : SamplingParams
        What its request asks for.
    decode : callable or None
        Turns token ids into text; None for no text.
    prompt_token_ids : sequence of int
        The prompt.

    Attributes
    ----------
    finish_reason, stop_reason
        As in `CompletionOutput`.
    """

    __slots__ = (
        "_detokenizer",
        "_index",
        "_logprobs",
        "_num_checked",
        "_num_searched",
        "_num_told",
        "_num_told_tokens",
        "_params",
        "_text",
        "_token_ids",
        "_total",
        "finish_reason",
        "stop_reason",
    )

    def __init__(
        self, index: int, params: SamplingParams, decode: Decode | None, prompt_token_ids: Sequence[int]
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._index = index
        self._params = params
        self._detokenizer = Detokenizer(decode, prompt_token_ids) if decode is not None else None
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] = []
        self._total = 0.0
        self._num_checked = self._num_searched = self._num_told = self._num_told_tokens = 0

    @property
    def has_news(self) -> bool:
        """Whether there is something that no delta told yet."""
        return self.finish_reason is not None or len(self._token_ids) > self._num_told_tokens

    def take(
        self,
        token_ids: list[int],
        logprobs: Sequence[dict[int, Logprob]],
        reason: FinishReason | None,
        stop_reason: int | None = None,
    ) -> bool:
        """Take tokens.

        Parameters
        ----------
        token_ids : list of int
            What was drawn.
        logprobs : sequence of dict
            Their log-probabilities, where the request asked for them.
        reason : {"stop", "length", "abort"}, optional
            Why the last of them ends the sample. A text of `stop` that came first prevails.
        stop_reason : int, optional
            The token that ends it.

        Returns
        -------
        bool
            Whether a text of `stop` ended the sample.
        """
        is_cut = False
        if self._params.stop and self._detokenizer is not None:
            for at, token in enumerate(token_ids):
                is_end = reason == "stop" and at == len(token_ids) - 1
                self._read([token], is_end)
                if self._cut_at_stop():
                    token_ids, logprobs = token_ids[: at + 1], logprobs[: at + 1]
                    reason, is_cut = None, True
                    break
        elif self._detokenizer is not None:
            self._read(token_ids, reason == "stop")
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._total += sum(entry[token].logprob for token, entry in zip(token_ids, logprobs, strict=False))
        if reason is not None:
            self.finish_reason, self.stop_reason = reason, stop_reason
            if self._detokenizer is not None:
                self._text += self._detokenizer.finish()
        return is_cut

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        """Return the sample as its request wants it: all of it, or what is new."""
        logprobs = self._logprobs if self._params.logprobs is not None else None
        # What may turn out to be the beginning of a stop text is not told yet.
        held = (
            0 if self.finish_reason is not None or self._params.include_stop_str_in_output else self._longest_stop() - 1
        )
        end = max(self._num_told, len(self._text) - max(held, 0))
        start = start_token = 0
        if kind == RequestOutputKind.DELTA:
            start, start_token = self._num_told, self._num_told_tokens
            self._num_told, self._num_told_tokens = end, len(self._token_ids)
        return CompletionOutput(
            index=self._index,
            text=self._text[start:end],
            token_ids=self._token_ids[start_token:],
            cumulative_logprob=None if logprobs is None else self._total,
            logprobs=None if logprobs is None else logprobs[start_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _read(self, token_ids: list[int], is_end: bool) -> None:
        assert self._detokenizer is not None
        if is_end and not self._params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        self._text += self._detokenizer.add(token_ids) if token_ids else ""

    def _cut_at_stop(self) -> bool:
        """End the sample if a stop text has come; called once per token, before it is counted."""
        self._num_checked += 1
        start, self._num_searched = self._num_searched, len(self._text)
        if self._num_checked <= self._params.min_tokens:
            return False
        # A stop text may have begun in what was searched before.
        found = [(self._text.find(stop, max(0, start - len(stop) + 1)), stop) for stop in self._params.stop or ()]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, ""))
        if at < 0:
            return False
        self._text = self._text[: at + len(stop) if self._params.include_stop_str_in_output else at]
        self.finish_reason, self.stop_reason = "stop", stop
        return True

    def _longest_stop(self) -> int:
        return max(map(len, self._params.stop or ()), default=0)
