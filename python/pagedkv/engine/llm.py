"""Generation for a batch of prompts: the face that most people see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from pagedkv.config import CacheConfig, SchedulerConfig, choose_layer_slots
from pagedkv.engine.cache_size import choose_num_blocks
from pagedkv.engine.loop import EngineLoop, StepEvent
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.progress import Progress
from pagedkv.engine.prompts import read_prompts
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.exceptions import InvalidArgumentError, StateError
from pagedkv.kv_cache import KVCache
from pagedkv.models import TransformersModel, load_model
from pagedkv.scheduling import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LLM:
    """A language model of transformers with its keys and values in a paged cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel, str or path
        A model; or the folder of one, a ``.gguf`` file, or a name that transformers knows.
    tokenizer : tokenizer, str or path, optional
        A tokenizer, or where to load one; by default it comes from where the model is loaded. Without one, prompts are
        token ids and outputs have no text.
    dtype : str or torch.dtype
        Element type of the weights: "auto", "float32", "float16" or "bfloat16".
    kv_cache_dtype : str or torch.dtype
        Element type of keys and values in the cache: "auto" for that of the weights, one of its names, or FP8:
        "float8_e4m3fn" or "float8_e5m2".
    k_scale, v_scale : float
        What keys and values are divided by before they are rounded to FP8, and multiplied by again in attention, in
        every layer.
    block_size : int
        Tokens per block of the cache; of its smallest blocks, where layers differ.
    num_blocks : int, optional
        Blocks of the cache, the null block included.
    kv_cache_memory_bytes : int, optional
        Memory of the cache, in the place of `num_blocks`. Without either, the cache holds `max_num_seqs` sequences of
        the longest length, or takes 1 GiB if that is less.
    max_num_seqs, max_num_batched_tokens : int, optional
        Most sequences at a time, and most tokens per step; by default those of `SchedulerConfig`.
    max_model_len : int, optional
        Longest sequence, prompt and output; by default what the model's positions allow.
    enable_prefix_caching : bool
        Whether prompts reuse the keys and values of earlier ones.
    max_plans_in_flight : int
        Steps that may be started before the oldest is committed.
    preemption_mode : {"recompute", "swap"}
        Whether what is preempted is computed again, or goes to host memory and comes back.
    host_blocks : int, optional
        Blocks of host memory for that, each as large as one of the cache; by default as many as the cache has where
        `preemption_mode` is "swap", else none.
    seed : int
        Decides the random numbers of requests without a seed of their own.

    Raises
    ------
    UnsupportedError
        If the model needs something that is not implemented; the message names it.
    InvalidArgumentError
        If an argument is out of its range.

    Notes
    -----
    A model that was given is run with another attention implementation during each step, and has its own between
    steps. An LLM belongs to one thread.

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
        *,
        kv_cache_dtype: str | torch.dtype = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        max_plans_in_flight: int = 1,
        preemption_mode: str = "recompute",
        host_blocks: int | None = None,
        seed: int = 0,
    ) -> None:
        hf_model, self._tokenizer = load_model(model, tokenizer, dtype)
        paged = TransformersModel(hf_model, kv_cache_dtype=kv_cache_dtype, k_scale=k_scale, v_scale=v_scale)
        limits = _limits(
            paged, max_model_len, max_num_seqs, max_num_batched_tokens, max_plans_in_flight, preemption_mode
        )
        groups = paged.cache_groups(limits.max_model_len)
        make_config = partial(
            CacheConfig,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            groups=groups,
            num_layer_slots=choose_layer_slots(groups),
        )
        # Two blocks are the fewest that a configuration takes.
        num_blocks = choose_num_blocks(make_config(2), limits, num_blocks, kv_cache_memory_bytes)
        if host_blocks is None:
            host_blocks = num_blocks if preemption_mode == "swap" else 0
        config = make_config(num_blocks, num_host_blocks=host_blocks)
        self._scheduler = Scheduler(config, limits)
        kv_cache = KVCache.from_config(config, limits, device=str(paged.device))
        self._kv_cache: KVCache | None = kv_cache
        self._num_requests = 0
        self._loop: EngineLoop | None = EngineLoop(
            paged,
            self._scheduler,
            kv_cache,
            limits,
            eos_token_ids=paged.eos_token_ids | _eos(self._tokenizer),
            decode=self._decode,
            seed=seed,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, to look at: block tables, reference counts, usage."""
        return self._scheduler

    @property
    def kv_cache(self) -> KVCache:
        """The memory of the cache, to look at."""
        if self._kv_cache is None:
            raise _closed()
        return self._kv_cache

    @property
    def step_hooks(self) -> list[Callable[[StepEvent], object]]:
        """Callables that are told of each step, by a `StepEvent` after its commit; add to the list or take from it."""
        return self._open_loop().step_hooks

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, or None where there is none."""
        return self._tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
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
        loop = self._open_loop()
        read = read_prompts(prompts, self._tokenizer)
        params = _params_per_prompt(sampling_params, len(read))
        order: dict[str, int] = {}
        try:
            for number, (prompt, own_params) in enumerate(zip(read, params, strict=True)):
                request_id = str(self._num_requests)
                self._num_requests += 1
                order[request_id] = number
                loop.add_request(request_id, prompt.token_ids, own_params, prompt.text)
            outputs = self._run(loop, use_tqdm, len(read))
        except BaseException:
            loop.abort(loop.request_ids)
            raise
        return sorted(outputs, key=lambda output: order[output.request_id])

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Give the memory of the cache back and let go of the model; doing so again changes nothing."""
        self._loop = None
        self._kv_cache = None

    def _run(self, loop: EngineLoop, use_tqdm: bool | Callable[..., Any], total: int) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        with Progress(use_tqdm, total) as progress:
            while loop.has_unfinished_requests:
                for output in loop.step():
                    outputs.append(output)
                    progress.add(output)
        return outputs

    def _open_loop(self) -> EngineLoop:
        if self._loop is None:
            raise _closed()
        return self._loop

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def _closed() -> StateError:
    return StateError("the LLM is closed")


def _eos(tokenizer: Any) -> frozenset[int]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if eos is None else frozenset([eos])


def _limits(
    model: TransformersModel,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_plans_in_flight: int,
    preemption_mode: str,
) -> SchedulerConfig:
    longest = model.max_model_len
    if max_model_len is None:
        max_model_len = longest
    if max_model_len is None:
        raise InvalidArgumentError("max_model_len: expected a number, because the model's configuration has none")
    if longest is not None and max_model_len > longest:
        raise InvalidArgumentError(
            f"max_model_len: expected at most {longest}, which the model's positions allow, found {max_model_len}"
        )
    defaults = SchedulerConfig()
    return SchedulerConfig(
        max_num_seqs=defaults.max_num_seqs if max_num_seqs is None else max_num_seqs,
        max_num_batched_tokens=(
            defaults.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
        ),
        max_model_len=max_model_len,
        max_plans_in_flight=max_plans_in_flight,
        preemption_mode=preemption_mode,
    )


def _params_per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        raise InvalidArgumentError(
            f"sampling_params: expected one, or one for each of {num_prompts} prompts, found {len(sampling_params)}"
        )
    return sampling_params
