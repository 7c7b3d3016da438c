"""Options of an engine, and the limits of its scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from pagedkv.config import SchedulerConfig
from pagedkv.exceptions import InvalidArgumentError

if TYPE_CHECKING:
    from os import PathLike

    import torch

    from pagedkv.engine.lora import LoRARequest
    from pagedkv.models import GGUFLlama, TransformersModel


class EngineOptions(TypedDict, total=False):
    """The keywords of `LLMEngine`, where they are explained."""

    device: str | torch.device | None
    enforce_eager: bool
    kv_cache_dtype: str | torch.dtype
    k_scale: float
    v_scale: float
    packed_keys: bool
    block_size: int
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    enable_prefix_caching: bool
    max_plans_in_flight: int
    preemption_mode: str
    host_blocks: int | None
    scheduling_policy: str
    tenant_weights: Mapping[str, float] | None
    speculative_config: Any
    enable_lora: bool
    seed: int
    record_trace: str | PathLike[str] | None


class RequestOptions(TypedDict, total=False):
    """The keywords of `LLMEngine.add_request`, where they are explained."""

    priority: int
    tenant: str | None
    lora_request: LoRARequest | None


def scheduler_limits(
    model: TransformersModel | GGUFLlama,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    **others: Any,
) -> SchedulerConfig:
    """Return the limits of a scheduler, with those of the core where nothing is asked for.

    Parameters
    ----------
    model : TransformersModel or GGUFLlama
        Its positions bound the longest sequence.
    max_model_len, max_num_seqs, max_num_batched_tokens : int or None
        As for `LLMEngine`.
    **others
        Further keywords of `SchedulerConfig`.

    Returns
    -------
    SchedulerConfig
        The limits.
    """
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
        **others,
    )
