"""From prompts to texts: continuous batching of a transformers model over a paged KV cache."""

from pagedkv.engine.llm import LLM
from pagedkv.engine.loop import StepEvent
from pagedkv.engine.outputs import CompletionOutput, RequestOutput
from pagedkv.engine.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StepEvent"]
