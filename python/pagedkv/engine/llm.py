"""Generation for a batch of prompts: the face that most people see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from pagedkv.engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from pagedkv.engine.llm_engine import LLMEngine
from pagedkv.engine.loop import StepEvent
from pagedkv.engine.lora import LoRARequest
from pagedkv.engine.options import EngineOptions
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.progress import Progress
from pagedkv.engine.prompts import Prompt, read_prompts
from pagedkv.engine.sampling_params import RequestOutputKind, SamplingParams
from pagedkv.exceptions import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from pagedkv.kv_cache import KVCache
    from pagedkv.scheduling import Scheduler, SchedulerStats


class LLM:
    """A language model of transformers with its keys and values in a paged cache.

    Parameters
    ----------
    model, tokenizer, dtype
        As for `LLMEngine`, which says what is raised and how a model that was given is run.
    **options
        The keywords of `LLMEngine`: sizes of the cache and of batches, prefix caching, preemption, order of requests,
        speculative decoding, adapters, seed.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> config = LlamaConfig(vocab_size=32, intermediate_size=64, max_position_embeddings=128, **sizes)
    >>> with LLM(LlamaForCausalLM(config).eval()) as llm:
    ...     outputs = llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    >>> [len(output.outputs[0].token_ids) for output in outputs]
    [4, 4]
    """

    def __init__(
        self,
        model: PreTrainedModel | str | PathLike[str],
        tokenizer: Any = None,
        dtype: str | torch.dtype = "auto",
        **options: Unpack[EngineOptions],
    ) -> None:
        self._engine = LLMEngine(model, tokenizer, dtype, **options)
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine that runs the requests."""
        return self._engine

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, to look at: block tables, reference counts, usage."""
        return self._engine.scheduler

    @property
    def kv_cache(self) -> KVCache:
        """The memory of the cache, to look at."""
        return self._engine.kv_cache

    @property
    def step_hooks(self) -> list[Callable[[StepEvent], object]]:
        """Callables that are told of each step, by a `StepEvent` after its commit; add to the list or take from it."""
        return self._engine.step_hooks

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, or None where there is none."""
        return self._engine.get_tokenizer()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all in one continuous batch.

        Parameters
        ----------
        prompts : str, list of int, dict, or a list of these
            One prompt or several, as text, token ids, or ``{"prompt_token_ids": [...]}``.
        sampling_params : SamplingParams or list of SamplingParams, optional
            One for all prompts, or one for each; by default ``SamplingParams()``.
        use_tqdm : bool or callable
            Whether to show a progress bar, or what makes one in the place of `tqdm.tqdm`.
        priority : list of int, optional
            One per prompt, lower first, where `scheduling_policy` is "priority".
        lora_request : LoRARequest, or list of LoRARequest or None, optional
            The adapter of all prompts, or one for each, where `enable_lora` is true.

        Returns
        -------
        list of RequestOutput
            One per prompt, in their order.

        Raises
        ------
        InvalidArgumentError, NeverFitsError
            If a prompt can never run; then none does.

        Notes
        -----
        If anything raises, an interrupt from the keyboard included, the requests of this call are aborted and the LLM
        remains usable.
        """
        read = read_prompts(prompts, self.get_tokenizer())
        params = _per_prompt(
            "sampling_params",
            SamplingParams() if sampling_params is None else sampling_params,
            SamplingParams,
            len(read),
        )
        # One output per request is made, at its end, whatever the caller would stream.
        final = [replace(own, output_kind=RequestOutputKind.FINAL_ONLY) for own in params]
        return self._run(read, final, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, written down by the tokenizer's chat template.

        Parameters
        ----------
        messages : list of dict, or a list of such lists
            One conversation or several: dicts with "role" and "content".
        sampling_params : SamplingParams or list of SamplingParams, optional
            One for all conversations, or one for each.
        use_tqdm : bool or callable
            As for `generate`.
        chat_template : str, optional
            A template in the place of the tokenizer's.
        add_generation_prompt : bool
            Whether the text ends with the beginning of an answer.
        continue_final_message : bool
            Whether the answer goes on with the last message; not with `add_generation_prompt`.
        lora_request : LoRARequest, or list of LoRARequest or None, optional
            As for `generate`.

        Returns
        -------
        list of RequestOutput
            One per conversation, in their order.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        texts = [self._engine.text.render_chat(conversation, **options) for conversation in conversations]
        tokenizer = self.get_tokenizer()
        # The template has written the special tokens.
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        prompts = [{"prompt": text, "prompt_token_ids": own} for text, own in zip(texts, ids, strict=True)]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: bool | Callable[..., Any] = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the most probable continuations of prompts by beam search.

        Parameters
        ----------
        prompts : str, list of int, dict, or a list of these
            As for `generate`.
        params : BeamSearchParams or list of BeamSearchParams
            One for all prompts, or one for each.
        use_tqdm, lora_request
            As for `generate`.

        Returns
        -------
        list of BeamSearchOutput
            One per prompt, in their order.

        Notes
        -----
        The beams of a prompt share its blocks and those of their common beginnings; a block that two go on writing is
        copied once.
        """
        read = read_prompts(prompts, self.get_tokenizer())
        own = _per_prompt("params", params, BeamSearchParams, len(read))
        outputs = self._run(read, own, use_tqdm, None, lora_request)
        return [_beam_output(output, params) for output, params in zip(outputs, own, strict=True)]

    def get_metrics(self) -> SchedulerStats:
        """Return counts and times since the LLM was made."""
        return self._engine.get_metrics()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Give the memory of the cache back and let go of the model; doing so again changes nothing."""
        self._engine.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        if priority is not None and len(priority) != len(prompts):
            raise InvalidArgumentError(f"priority: expected one for each of {len(prompts)}, found {len(priority)}")
        adapters = _per_prompt("lora_request", lora_request, LoRARequest, len(prompts), is_optional=True)
        order: dict[str, int] = {}
        try:
            for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(self._num_requests)
                self._num_requests += 1
                order[request_id] = number
                options = {"priority": priority[number] if priority else 0, "lora_request": adapters[number]}
                self._engine.add_request(request_id, prompt, own, **options)
            outputs = self._finish(use_tqdm, len(prompts))
        except BaseException:
            self._engine.abort_request(order)
            raise
        return sorted(outputs, key=lambda output: order[output.request_id])

    def _finish(self, use_tqdm: bool | Callable[..., Any], total: int) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        with Progress(use_tqdm, total) as progress:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    outputs.append(output)
                    progress.add(output)
        return outputs


def _per_prompt(
    argument: str, given: Any, kind: type[Any], num_prompts: int, *, is_optional: bool = False
) -> Sequence[Any]:
    def is_one(found: Any) -> bool:
        return isinstance(found, kind) or (is_optional and found is None)

    if is_one(given):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(map(is_one, given)):
        raise InvalidArgumentError(f"{argument}: expected {kind.__name__}, or a list of them, found {given!r}")
    if len(given) != num_prompts:
        raise InvalidArgumentError(
            f"{argument}: expected one, or one for each of {num_prompts} prompts, found {len(given)}"
        )
    return given


def _beam_output(output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=output.prompt_token_ids + found.token_ids,
                cum_logprob=found.cumulative_logprob or 0.0,
                score=(found.cumulative_logprob or 0.0) / len(found.token_ids) ** params.length_penalty,
                text=found.text,
                finish_reason="stop" if found.finish_reason == "stop" else "length",
            )
            for found in output.outputs
        ]
    )
