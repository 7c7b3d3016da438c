"""Paged KV cache for LLM inference: block bookkeeping, continuous batching, and attention that reads blocks in place.

Importing the package imports neither torch nor CuPy. What needs them is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pagedkv.attention import PagedAttention, paged_attention
from pagedkv.config import CacheConfig, GroupSpec, SchedulerConfig
from pagedkv.exceptions import PagedKVError
from pagedkv.kv_cache import KVCache
from pagedkv.pool import (
    AllBlocksCleared,
    AllocatedSlots,
    BatchSlots,
    BlockPool,
    BlockRemoved,
    BlockStored,
    ComputedBlocks,
    ComputedBlocksBatch,
    KVCacheManager,
    KVEventBatch,
    chain_hashes,
)
from pagedkv.scheduling import FinishedRequest, Scheduler, StepPlan, StepResult

if TYPE_CHECKING:
    from pagedkv.engine import LLM as LLM
    from pagedkv.engine import AsyncLLMEngine as AsyncLLMEngine
    from pagedkv.engine import BeamSearchParams as BeamSearchParams
    from pagedkv.engine import CompletionOutput as CompletionOutput
    from pagedkv.engine import LLMEngine as LLMEngine
    from pagedkv.engine import LoRARequest as LoRARequest
    from pagedkv.engine import PagedCache as PagedCache
    from pagedkv.engine import RequestOutput as RequestOutput
    from pagedkv.engine import RequestOutputKind as RequestOutputKind
    from pagedkv.engine import SamplingParams as SamplingParams

__all__ = [
    "AllBlocksCleared",
    "AllocatedSlots",
    "BatchSlots",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheConfig",
    "ComputedBlocks",
    "ComputedBlocksBatch",
    "FinishedRequest",
    "GroupSpec",
    "KVCache",
    "KVCacheManager",
    "KVEventBatch",
    "PagedAttention",
    "PagedKVError",
    "Scheduler",
    "SchedulerConfig",
    "StepPlan",
    "StepResult",
    "__version__",
    "chain_hashes",
    "paged_attention",
]

_ENGINE = (
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "LLMEngine",
    "LoRARequest",
    "PagedCache",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
)


def __getattr__(name: str) -> Any:
    if name in _ENGINE:
        return getattr(importlib.import_module("pagedkv.engine"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("pagedkv")
    raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ENGINE])
