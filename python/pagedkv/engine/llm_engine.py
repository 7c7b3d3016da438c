"""An engine that is driven step by step: requests in, outputs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from pagedkv.config import CacheConfig
from pagedkv.engine.cache_size import choose_cache
from pagedkv.engine.loop import EngineLoop, StepEvent
from pagedkv.engine.lora import LoadedAdapters, LoRARequest
from pagedkv.engine.options import scheduler_limits
from pagedkv.engine.periodic_log import PeriodicLog
from pagedkv.engine.prompt_lookup import PromptLookup
from pagedkv.engine.prompts import Prompt, read_prompt
from pagedkv.engine.request_trace import RequestTrace
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.text import TextCodec
from pagedkv.exceptions import InvalidArgumentError, StateError
from pagedkv.kv_cache import KVCache
from pagedkv.models import TransformersModel, open_model
from pagedkv.scheduling import Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from pagedkv.config import SchedulerConfig
    from pagedkv.engine.beam_search import BeamSearchParams
    from pagedkv.engine.outputs import RequestOutput
    from pagedkv.scheduling import SchedulerStats


class LLMEngine:
    """A model of transformers, a scheduler and a paged cache, advanced by `step`.

    Parameters
    ----------
    model : transformers.PreTrainedModel, str or path
        A model; or the folder of one, a ``.gguf`` file, or a name that transformers knows.
    tokenizer : tokenizer, str or path, optional
        A tokenizer, or where to load one; by default it comes from where the model is loaded. Without one, prompts are
        token ids and outputs have no text.
    dtype : str or torch.dtype
        Element type of the weights: "auto", "float32", "float16" or "bfloat16".
    device : str or torch.device, optional
        Where the model and the cache are: "cpu", "cuda" or "cuda:N"; by default where a given model is, and the CPU for
        others. A GPU takes float16 and bfloat16.
    enforce_eager : bool
        Whether a GPU runs every step by launches from Python, where else those of one token per sequence are captured
        graphs, one for each size of a batch. With adapters every step is.
    kv_cache_dtype : str or torch.dtype
        Element type of keys and values in the cache: "auto" for that of the weights, one of its names, or FP8:
        "float8_e4m3fn" or "float8_e5m2".
    k_scale, v_scale : float
        What keys and values are divided by before they are rounded to FP8, and multiplied by again in attention, in
        every layer.
    packed_keys : bool
        Whether keys are packed as in `KVCache(packed=True)`: blocks of multiples of 16 tokens, read faster on the CPU
        where the cache is FP8 or many query heads share a KV head, and written slower.
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
    scheduling_policy : {"fcfs", "priority", "lpm", "fair"}
        The order of requests: by arrival, by `priority`, by cached prefix, or by fair shares of tenants.
    tenant_weights : mapping of str to float, optional
        Shares of tenants for "fair"; 1 for those that it does not name.
    speculative_config : mapping, optional
        ``{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}`` guesses
        tokens from the text itself and checks several per step. What is drawn does not change.
    enable_lora : bool
        Whether requests may run with low-rank adapters; transformers then runs the model, GGUF files too.
    seed : int
        Decides the random numbers of requests without a seed of their own.
    record_trace : path, optional
        File for a trace of the requests that `pagedkv simulate` replays: one JSON line for each that ends, with its
        arrival, its lengths and keyed hashes of its prefixes, and no text. One that is there is replaced.

    Raises
    ------
    UnsupportedError
        If the model needs something that is not implemented; the message names it.
    InvalidArgumentError
        If an argument is out of its range.

    Notes
    -----
    A model that was given is run with another attention implementation during each step, and has its own between
    steps. An engine belongs to one thread, and so does an `LLM`.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> config = LlamaConfig(vocab_size=32, intermediate_size=64, max_position_embeddings=128, **sizes)
    >>> with LLMEngine(LlamaForCausalLM(config).eval()) as engine:
    ...     engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    ...     while engine.has_unfinished_requests():
    ...         [output] = engine.step()
    ...         print(len(output.outputs[0].token_ids), output.finished)
    1 False
    2 False
    3 True
    """

    def __init__(
        self,
        model: PreTrainedModel | str | PathLike[str],
        tokenizer: Any = None,
        dtype: str | torch.dtype = "auto",
        *,
        device: str | torch.device | None = None,
        enforce_eager: bool = False,
        kv_cache_dtype: str | torch.dtype = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        packed_keys: bool = False,
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
        scheduling_policy: str = "fcfs",
        tenant_weights: Mapping[str, float] | None = None,
        speculative_config: Any = None,
        enable_lora: bool = False,
        seed: int = 0,
        record_trace: str | PathLike[str] | None = None,
    ) -> None:
        lookup = PromptLookup.read(speculative_config)
        if lookup is not None and max_plans_in_flight != 1:
            raise InvalidArgumentError(
                f"max_plans_in_flight: expected 1 beside speculative_config, found {max_plans_in_flight}"
            )
        storage: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
        paged, tokenizer = open_model(model, tokenizer, dtype, device=device, for_adapters=enable_lora, **storage)
        self._limits = scheduler_limits(
            paged,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            max_plans_in_flight=max_plans_in_flight,
            preemption_mode=preemption_mode,
            policy=scheduling_policy,
            tenant_weights=tenant_weights,
            lookahead=0 if lookup is None else lookup.num_speculative_tokens,
        )
        groups = paged.cache_groups(self._limits.max_model_len)
        make_config = partial(CacheConfig, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
        config = choose_cache(make_config, groups, self._limits, num_blocks, kv_cache_memory_bytes, host_blocks)
        self._scheduler = Scheduler(config, self._limits)
        kv_cache = KVCache.from_config(config, self._limits, device=str(paged.device), packed=packed_keys)
        self._kv_cache: KVCache | None = kv_cache
        module = paged.module if enable_lora and isinstance(paged, TransformersModel) else None
        self._adapters = LoadedAdapters(module, self._scheduler)
        if paged.device.type == "cuda" and isinstance(paged, TransformersModel):
            paged.load_kernels()
            # A graph would go on with the adapters that it was captured with.
            if not (enforce_eager or enable_lora):
                paged.capture_decoding(kv_cache, self._limits.max_num_seqs)
        self._text = TextCodec(tokenizer)
        self._vocab_size = paged.vocab_size
        self._loop: EngineLoop | None = EngineLoop(
            paged,
            self._scheduler,
            kv_cache,
            self._limits,
            eos_token_ids=paged.eos_token_ids | _eos(tokenizer),
            text=self._text,
            seed=seed,
            lookup=lookup,
            adapters=self._adapters.layers,
        )
        self._loop.step_hooks.append(PeriodicLog(self._scheduler))
        self._trace = None if record_trace is None else RequestTrace(record_trace, block_size)

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
    def limits(self) -> SchedulerConfig:
        """What the scheduler was made with."""
        return self._limits

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

    @property
    def forward_seconds(self) -> float:
        """Time spent in the model's forward passes so far."""
        return self._open_loop().forward_seconds

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self._vocab_size

    @property
    def text(self) -> TextCodec:
        """What turns text into tokens and back."""
        return self._text

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, or None where there is none."""
        return self._text.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Add a request; the next `step` takes it up.

        Parameters
        ----------
        request_id : str
            Its name, unique among those that have not ended.
        prompt : str, list of int, dict or Prompt
            Text, token ids, or ``{"prompt": ..., "prompt_token_ids": [...], "cache_salt": ...}``.
        params : SamplingParams or BeamSearchParams, optional
            How tokens are drawn; by default ``SamplingParams()``.
        priority : int
            Lower comes first, where `scheduling_policy` is "priority".
        tenant : str, optional
            On whose share it runs, where `scheduling_policy` is "fair".
        lora_request : LoRARequest, optional
            The adapter that it runs with, where `enable_lora` is true; it is loaded if it is not.

        Raises
        ------
        InvalidArgumentError, NeverFitsError
            If the request can never run; then nothing was added.
        UnsupportedError
            If the adapter needs something that is not implemented.
        """
        loop = self._open_loop()
        if not isinstance(request_id, str):
            raise InvalidArgumentError(f"request_id: expected a str, found {request_id!r}")
        if priority and self._limits.policy != "priority":
            raise InvalidArgumentError(
                f"priority: expected 0, because scheduling_policy is {self._limits.policy!r}, found {priority}"
            )
        params = SamplingParams() if params is None else params
        read = prompt if isinstance(prompt, Prompt) else read_prompt(prompt, self._text.tokenizer)
        token_ids = self._truncated(read.token_ids, params)
        options: dict[str, Any] = {"priority": priority, "tenant": tenant, "cache_salt": read.cache_salt}
        with self._adapters.loaded(lora_request) as options["lora_id"]:
            loop.add_request(request_id, token_ids, params, read.text, **options)
        if self._trace is not None:
            self._trace.added(request_id, token_ids, params, **options)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request needs it; return whether it was not loaded yet."""
        before = self.list_loras()
        return self._adapters.load(lora_request) not in before

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter that no request runs with, and its cached prefixes; return whether it was loaded."""
        loop = self._open_loop()
        # 0 is what requests without an adapter run with.
        if lora_id > 0 and loop.runs_adapter(lora_id):
            raise StateError(f"lora_id: expected an adapter that no request runs with, found {lora_id}")
        return self._adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the adapters that are loaded."""
        self._open_loop()
        return self._adapters.numbers()

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns
        -------
        list of RequestOutput
            Of requests that ended, and of those that are streamed, by their `output_kind`, what there is so far.

        Notes
        -----
        Where anything raises, the step is undone: requests are as they were before it, and may go on or be aborted.
        """
        outputs = self._open_loop().step()
        if self._trace is not None:
            self._trace.told(outputs)
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """End requests; what they have so far is dropped, and their blocks are free with the next step.

        Parameters
        ----------
        request_ids : str or iterable of str
            Their names. Those that have ended are passed over.

        Returns
        -------
        list of str
            Those that had not ended.
        """
        found = self._open_loop().abort([request_ids] if isinstance(request_ids, str) else request_ids)
        if self._trace is not None:
            self._trace.aborted(found)
        return found

    def has_unfinished_requests(self) -> bool:
        """Whether a request was added and has not ended."""
        return self._open_loop().has_unfinished_requests

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests were added and have not ended."""
        return len(self._open_loop().request_ids)

    def unfinished_request_ids(self) -> list[str]:
        """Return the names of the requests that have not ended."""
        return self._open_loop().request_ids

    def get_metrics(self) -> SchedulerStats:
        """Return counts and times since the engine was made."""
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Give the memory of the cache back and let go of the model; doing so again changes nothing."""
        self._adapters.close()
        self._loop = None
        self._kv_cache = None
        if self._trace is not None:
            self._trace.close()

    def _open_loop(self) -> EngineLoop:
        if self._loop is None:
            raise _closed()
        return self._loop

    def _truncated(self, token_ids: list[int], params: SamplingParams | BeamSearchParams) -> list[int]:
        kept = getattr(params, "truncate_prompt_tokens", None)
        if kept is None:
            return token_ids
        if kept < 0:
            kept = max(1, self._limits.max_model_len - (params.max_tokens or 1))
        return token_ids[-kept:]


def _closed() -> StateError:
    return StateError("the engine is closed")


def _eos(tokenizer: Any) -> frozenset[int]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if eos is None else frozenset([eos])
