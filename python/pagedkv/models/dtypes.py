"""Which element type of weights a machine multiplies fastest."""

import logging

import torch

logger = logging.getLogger(__name__)


def has_bf16_product() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware; without, torch takes some hundred times as long."""
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2", "DEFAULT")
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()) if is_x86 else False


def fastest_dtype() -> torch.dtype:
    """Return the type in which a small model decodes fastest here, and log why.

    Returns
    -------
    torch.dtype
        bfloat16 where the CPU multiplies it, else float32.
    """
    dtype = torch.bfloat16 if has_bf16_product() else torch.float32
    reason = "has" if dtype is torch.bfloat16 else "has not"
    logger.info("weights in %s, because the CPU %s products of bfloat16", str(dtype).removeprefix("torch."), reason)
    return dtype
