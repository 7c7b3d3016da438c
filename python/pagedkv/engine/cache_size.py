"""How many blocks a cache gets."""

import logging

from pagedkv.config import CacheConfig, GroupSpec, SchedulerConfig
from pagedkv.exceptions import InvalidArgumentError

logger = logging.getLogger(__name__)

DEFAULT_KV_CACHE_BYTES = 1 << 30


def choose_num_blocks(
    group: GroupSpec,
    block_size: int,
    limits: SchedulerConfig,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
) -> int:
    """Return the number of blocks, the null block included, and log what they hold.

    Parameters
    ----------
    group : GroupSpec
        What a token takes.
    block_size : int
        Tokens per block.
    limits : SchedulerConfig
        Longest sequence, and most sequences at a time.
    num_blocks : int, optional
        The answer, if the caller knows it.
    kv_cache_memory_bytes : int, optional
        Memory to fill; not with `num_blocks`.

    Returns
    -------
    int
        By default enough for `max_num_seqs` of the longest sequences, or what fits into 1 GiB if that is less, but room
        for one of them at least.

    Raises
    ------
    InvalidArgumentError
        If both are given, a block has no tokens, or the memory does not hold one block beside the null block.

    Examples
    --------
    >>> group = GroupSpec(30, 3, 64)
    >>> choose_num_blocks(group, 16, SchedulerConfig(max_model_len=2048, max_num_seqs=4))
    513
    >>> choose_num_blocks(group, 16, SchedulerConfig(max_model_len=8192, max_num_seqs=256))
    1456
    """
    if num_blocks is not None and kv_cache_memory_bytes is not None:
        raise InvalidArgumentError("kv_cache_memory_bytes: expected None beside num_blocks, found both")
    if block_size < 1:
        raise InvalidArgumentError(f"block_size: expected at least 1, found {block_size}")
    block_bytes = CacheConfig(2, block_size, groups=[group]).block_bytes
    if kv_cache_memory_bytes is not None:
        num_blocks = int(kv_cache_memory_bytes // block_bytes)
        if num_blocks < 2:
            expected = f"at least {2 * block_bytes}, two blocks"
            raise InvalidArgumentError(f"kv_cache_memory_bytes: expected {expected}, found {kv_cache_memory_bytes}")
    elif num_blocks is None:
        blocks_per_sequence = -(-limits.max_model_len // block_size)
        fitting = max(DEFAULT_KV_CACHE_BYTES // block_bytes, blocks_per_sequence + 1)
        num_blocks = min(limits.max_num_seqs * blocks_per_sequence + 1, fitting)
    num_tokens = (num_blocks - 1) * block_size
    logger.info(
        "KV cache size: %s tokens in blocks of %d (%.1f MiB), maximum concurrency for %s tokens per request: %.2fx",
        f"{num_tokens:,}",
        block_size,
        num_blocks * block_bytes / 2**20,
        f"{limits.max_model_len:,}",
        num_tokens / limits.max_model_len,
    )
    return num_blocks
