"""`/v1/completions`: prompts in, texts out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from pagedkv.server.answers import completion_logprobs, prompt_logprobs, usage
from pagedkv.server.streaming import stream_chunks

if TYPE_CHECKING:
    from pagedkv.engine import CompletionOutput, RequestOutput, SamplingParams
    from pagedkv.engine.stream import Stream
    from pagedkv.server.generation import Generator, Prompt
    from pagedkv.server.protocol import CompletionRequest

DEFAULT_MAX_TOKENS = 16


class Completion:
    """One request to `/v1/completions`.

    Parameters
    ----------
    generator : Generator
        Runs it.
    body : CompletionRequest
        The request.
    prompts : sequence of Prompt
        Its prompts.
    model, name : str
        What the model and the answer are called.
    """

    def __init__(
        self, generator: Generator, body: CompletionRequest, prompts: Sequence[Prompt], model: str, name: str
    ) -> None:
        self._generator = generator
        self._body = body
        self._prompts = prompts
        self._head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}

    @property
    def name(self) -> str:
        """What the answer is called."""
        return str(self._head["id"])

    @property
    def params(self) -> SamplingParams:
        """How tokens are drawn."""
        body, more = self._body, {}
        if body.logprobs is not None:
            more["logprobs"] = body.logprobs
            if body.echo and body.prompt_logprobs is None:
                more["prompt_logprobs"] = body.logprobs
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        # A prompt alone is scored by drawing one token and leaving it out.
        max_tokens = 1 if self._is_prompt_alone else max_tokens
        return self._generator.params(body, self._prompts, max_tokens, **more)

    @property
    def _is_prompt_alone(self) -> bool:
        return self._body.echo and self._body.max_tokens == 0

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [
            self._choice(number * self._body.n + sample.index, output, sample)
            for number, output in enumerate(outputs)
            for sample in output.outputs
        ]
        num_tokens = 0 if self._is_prompt_alone else None
        return {**self._head, "choices": choices, "usage": usage(outputs, num_tokens)}

    def chunks(self, streams: Sequence[Stream]) -> AsyncIterator[bytes]:
        """Return the answer as events."""
        return stream_chunks(self._generator, streams, self._body, self._head, self._deltas)

    def _deltas(self, number: int, output: RequestOutput, offsets: dict[int, int]) -> list[dict[str, Any]]:
        found = []
        for sample in output.outputs:
            index = number * self._body.n + sample.index
            choice = self._delta(index, sample, offsets.get(index, 0))
            offsets[index] = offsets.get(index, 0) + len(sample.text)
            found.append(choice)
        return found

    def _delta(self, index: int, sample: CompletionOutput, start: int) -> dict[str, Any]:
        num_best, token_text = self._body.logprobs or 0, self._generator.engine.engine.text.token_text
        choice: dict[str, Any] = {
            "index": index,
            "text": sample.text,
            "logprobs": completion_logprobs(sample.token_ids, sample.logprobs, num_best, token_text, start),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def _choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        choice = self._delta(index, sample, 0)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        if self._body.echo:
            self._put_prompt_first(choice, index, output, sample)
        return choice

    def _put_prompt_first(
        self, choice: dict[str, Any], index: int, output: RequestOutput, sample: CompletionOutput
    ) -> None:
        codec = self._generator.engine.engine.text
        decode = codec.decode(skip_special_tokens=self._body.skip_special_tokens)
        prompt = output.prompt
        given = self._prompts[index // self._body.n]
        # What truncation left has no text of its own.
        if prompt is None or len(output.prompt_token_ids) < len(given.token_ids):
            prompt = decode(output.prompt_token_ids) if decode is not None else ""
        is_alone = self._is_prompt_alone
        choice["text"] = prompt + ("" if is_alone else sample.text)
        if self._body.logprobs is not None:
            entries = [*(output.prompt_logprobs or ()), *(() if is_alone else sample.logprobs or ())]
            token_ids = output.prompt_token_ids + ([] if is_alone else sample.token_ids)
            choice["logprobs"] = completion_logprobs(token_ids, entries, self._body.logprobs, codec.token_text)
        if is_alone:
            choice["finish_reason"] = "length"
