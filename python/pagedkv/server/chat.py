"""`/v1/chat/completions`: a conversation in, answers out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from pagedkv.server.answers import chat_logprobs, prompt_logprobs, usage
from pagedkv.server.streaming import event, stream_chunks

if TYPE_CHECKING:
    from pagedkv.engine import CompletionOutput, RequestOutput, SamplingParams
    from pagedkv.engine.stream import Stream
    from pagedkv.server.generation import Generator, Prompt
    from pagedkv.server.protocol import ChatCompletionRequest


class ChatCompletion:
    """One request to `/v1/chat/completions`.

    Parameters
    ----------
    generator : Generator
        Runs it.
    body : ChatCompletionRequest
        The request.
    prompt : Prompt
        The conversation as text and tokens.
    model, name : str
        What the model and the answer are called.
    """

    def __init__(
        self, generator: Generator, body: ChatCompletionRequest, prompt: Prompt, model: str, name: str
    ) -> None:
        self._generator = generator
        self._body = body
        self._prompt = prompt
        self._head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}

    @property
    def name(self) -> str:
        """What the answer is called."""
        return str(self._head["id"])

    @property
    def params(self) -> SamplingParams:
        """How tokens are drawn: as many as the longest sequence leaves, if the request does not say."""
        body = self._body
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        more = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
        return self._generator.params(body, [self._prompt], max_tokens, **more)

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        [output] = outputs
        choices = []
        for sample in output.outputs:
            message = {"role": "assistant", "content": sample.text, "refusal": None}
            choice = {**self._choice(sample), "message": message}
            if self._body.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        answer = {**self._head, "choices": choices, "usage": usage(outputs)}
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    async def chunks(self, streams: Sequence[Stream]) -> AsyncIterator[bytes]:
        """Return the answer as events: who speaks first, then what is said."""
        head = {**self._head, "object": "chat.completion.chunk"}
        chunks = stream_chunks(self._generator, streams, self._body, head, self._deltas)
        try:
            for index in range(self._body.n):
                delta = {"index": index, "delta": {"role": "assistant", "content": ""}}
                yield event({**head, "choices": [{**delta, "logprobs": None, "finish_reason": None}]})
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()
            self._generator.discard(streams)

    def _deltas(self, number: int, output: RequestOutput, offsets: dict[int, int]) -> list[dict[str, Any]]:
        found = []
        for sample in output.outputs:
            choice = {**self._choice(sample), "delta": {"content": sample.text} if sample.text else {}}
            if self._body.return_token_ids:
                choice["token_ids"] = sample.token_ids
            found.append(choice)
        return found

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        return {
            "index": sample.index,
            "logprobs": chat_logprobs(sample.token_ids, sample.logprobs, self._body.top_logprobs or 0),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
