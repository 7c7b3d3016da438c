"""From prompts to texts: continuous batching of a transformers model over a paged KV cache."""

from pagedkv.engine.async_engine import AsyncLLMEngine
from pagedkv.engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from pagedkv.engine.llm import LLM
from pagedkv.engine.llm_engine import LLMEngine
from pagedkv.engine.logprobs import Logprob
from pagedkv.engine.loop import StepEvent
from pagedkv.engine.lora import LoRARequest
from pagedkv.engine.outputs import CompletionOutput, RequestOutput
from pagedkv.engine.sampling_params import RequestOutputKind, SamplingParams
from pagedkv.engine.transformers_cache import PagedCache

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PagedCache",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StepEvent",
]
