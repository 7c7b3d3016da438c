"""How many blocks a cache gets."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from pagedkv.config import CacheConfig, GroupSpec, SchedulerConfig, choose_layer_slots
from pagedkv.exceptions import InvalidArgumentError
from pagedkv.planning.layers import blocks_per_sequence

logger = logging.getLogger(__name__)

DEFAULT_KV_CACHE_BYTES = 1 << 30


def choose_cache(
    make_config: Callable[..., CacheConfig],
    groups: Sequence[GroupSpec],
    limits: SchedulerConfig,
    num_blocks: int | None,
    kv_cache_memory_bytes: int | None,
    host_blocks: int | None,
) -> CacheConfig:
    """Return the configuration of a cache: how many blocks it has, and how many more in host memory.

    Parameters
    ----------
    make_config : callable
        `CacheConfig` with all that the groups and the numbers of blocks do not decide.
    groups : sequence of GroupSpec
        The cache groups of the model.
    limits : SchedulerConfig
        Longest sequence, most sequences and tokens at a time, and what is done with those that are preempted.
    num_blocks, kv_cache_memory_bytes, host_blocks : int or None
        As for `LLMEngine`.

    Returns
    -------
    CacheConfig
        The configuration.
    """
    make_config = partial(make_config, groups=groups, num_layer_slots=choose_layer_slots(groups))
    # Two blocks are the fewest that a configuration takes.
    num_blocks = choose_num_blocks(make_config(2), limits, num_blocks, kv_cache_memory_bytes)
    if host_blocks is None:
        host_blocks = num_blocks if limits.preemption_mode == "swap" else 0
    return make_config(num_blocks, num_host_blocks=host_blocks)


def choose_num_blocks(
    cache_config: CacheConfig,
    limits: SchedulerConfig,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
) -> int:
    """Return the number of blocks, the null block included, and log what they hold.

    Parameters
    ----------
    cache_config : CacheConfig
        What a block holds; its number of blocks does not matter.
    limits : SchedulerConfig
        Longest sequence, and most sequences and tokens at a time.
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
        If both are given, or the memory does not hold one block beside the null block.

    Examples
    --------
    >>> from pagedkv.config import GroupSpec
    >>> config = CacheConfig(2, 16, groups=[GroupSpec(30, 3, 64)])
    >>> choose_num_blocks(config, SchedulerConfig(max_model_len=2048, max_num_seqs=4))
    513
    >>> choose_num_blocks(config, SchedulerConfig(max_model_len=8192, max_num_seqs=256))
    1456
    """
    if num_blocks is not None and kv_cache_memory_bytes is not None:
        raise InvalidArgumentError("kv_cache_memory_bytes: expected None beside num_blocks, found both")
    block_bytes = cache_config.block_bytes
    per_sequence = sum(blocks_per_sequence(group, limits) for group in cache_config.groups)
    if kv_cache_memory_bytes is not None:
        num_blocks = int(kv_cache_memory_bytes // block_bytes)
        if num_blocks < 2:
            expected = f"at least {2 * block_bytes}, two blocks"
            raise InvalidArgumentError(f"kv_cache_memory_bytes: expected {expected}, found {kv_cache_memory_bytes}")
    elif num_blocks is None:
        fitting = max(DEFAULT_KV_CACHE_BYTES // block_bytes, per_sequence + 1)
        num_blocks = min(limits.max_num_seqs * per_sequence + 1, fitting)
    _log_size(cache_config, num_blocks, limits.max_model_len, (num_blocks - 1) / per_sequence)
    return num_blocks


def _log_size(cache_config: CacheConfig, num_blocks: int, max_model_len: int, concurrency: float) -> None:
    block_sizes = sorted({group.block_size or 1 for group in cache_config.groups})
    logger.info(
        "KV cache size: %s tokens in blocks of %s (%.1f MiB), maximum concurrency for %s tokens per request: %.2fx",
        f"{int(concurrency * max_model_len):,}",
        " and ".join(map(str, block_sizes)),
        num_blocks * cache_config.block_bytes / 2**20,
        f"{max_model_len:,}",
        concurrency,
    )
    if len(cache_config.groups) > 1:
        windows = [group.sliding_window for group in cache_config.groups]
        logger.info(
            "%d groups of %d layers with windows %s; %.1f %% of each block is padding",
            len(cache_config.groups),
            cache_config.num_layer_slots,
            ", ".join("none" if window is None else f"{window:,}" for window in windows),
            100 * cache_config.padding,
        )
