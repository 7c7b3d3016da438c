"""How a model's keys and values are stored: their element type in the cache, and what they are divided by there."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kv_cache.memory import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class KVStorage:
    """Element type and scales of a cache.

    Parameters
    ----------
    dtype : str
        Name of the element type.
    k_scale, v_scale : torch.Tensor, shape (1,), float32, or None
        What stored keys and values must be multiplied by; None for 1.
    """

    dtype: str
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def choose_storage(
    kv_cache_dtype: Any, k_scale: float, v_scale: float, weights_dtype: str, device: Any = "cpu"
) -> KVStorage:
    """Return how keys and values are stored, or say which argument can't be.

    Parameters
    ----------
    kv_cache_dtype : str or torch.dtype
        "auto", for the type of the weights, or a type that a cache can have.
    k_scale, v_scale : float
        What stored keys and values must be multiplied by; other than 1 in FP8 only.
    weights_dtype : str
        Element type of the weights.
    device : torch.device or str
        Where scales are wanted.

    Returns
    -------
    KVStorage
        The choice.

    Raises
    ------
    InvalidArgumentError
        If the type is none of a cache, or a scale is no finite number above 0 or stands beside another type than FP8.

    Examples
    --------
    >>> choose_storage("auto", 1.0, 1.0, "bfloat16").dtype
    'bfloat16'
    >>> choose_storage("float8_e4m3fn", 0.5, 1.0, "bfloat16").k_scale
    tensor([0.5000])
    """
    dtype = str(kv_cache_dtype).removeprefix("torch.")
    dtype = weights_dtype if dtype == "auto" else dtype
    if dtype not in ITEM_BYTES:
        expected = ", ".join(("auto", *ITEM_BYTES))
        raise InvalidArgumentError(f"kv_cache_dtype: expected one of {expected}, found {kv_cache_dtype!r}")
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return KVStorage(dtype, *(_scale(name, scale, dtype, device) for name, scale in scales.items()))


def _scale(argument: str, scale: float, dtype: str, device: Any) -> torch.Tensor | None:
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidArgumentError(f"{argument}: expected a finite number above 0, found {scale}")
    if scale == 1:
        return None
    if ITEM_BYTES[dtype] > 1:
        raise InvalidArgumentError(f"{argument}: expected 1 beside a cache that is not FP8, found {scale} and {dtype}")
    return torch.tensor([scale], dtype=torch.float32, device=device)
