"""The machine of the paper: OPT-13B on an A100 with 40 GB, and the limits of its schedulers."""

from dataclasses import dataclass

from pagedkv.config import CacheConfig, GroupSpec, SchedulerConfig
from pagedkv.exceptions import InvalidArgumentError

# Slots for 15.7 thousand tokens (the paper's Table 1): what 0.95 of 42.3e9 bytes leaves beside weights, activations and
# 1 GiB of workspace, by the artifact's formula.
NUM_BLOCKS = 983
BLOCK_SIZE = 16
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
MAX_MODEL_LEN = 2048
MAX_NUM_BATCHED_TOKENS = 2560
# The artifact's limits: 2,048 sequences for vLLM, 256 for Orca.
MAX_NUM_SEQS = {"vllm": 2048, "pagedkv": 2048}
HOST_BYTES = 20 << 30
WATERMARK = 0.01
OPT_13B = GroupSpec(40, 40, 128, "float16")
# Two copies for each of 40 layers, keys and values, where layers lie apart; one where a block is one span.
COPIES_PER_BLOCK = {"vllm": 80, "pagedkv": 1}


@dataclass(frozen=True)
class Machine:
    """Sizes of a simulated machine; by default the paper's.

    Parameters
    ----------
    num_slots : int
        Tokens that the cache has room for.
    block_size : int
        Tokens per block.
    max_model_len, max_num_batched_tokens : int
        Longest sequence, and tokens per step.
    max_num_seqs : int, optional
        Seats; by default the artifact's for each system.
    token_bytes : int
        Bytes of a token's keys and values.
    host_bytes : int
        Memory of the host tier.
    copies_per_block : int, optional
        Copies that a block takes on its way to the host; by default 80 for "vllm" and 1 for "pagedkv".
    enable_prefix_caching : bool
        Whether "pagedkv" caches prefixes.
    policy : str
        Order of requests in "pagedkv".
    preemption_mode : str
        "recompute" or "swap", in "pagedkv".
    """

    num_slots: int = NUM_SLOTS
    block_size: int = BLOCK_SIZE
    max_model_len: int = MAX_MODEL_LEN
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    max_num_seqs: int | None = None
    token_bytes: int = 2 * 40 * 40 * 128 * 2
    host_bytes: int = HOST_BYTES
    copies_per_block: int | None = None
    enable_prefix_caching: bool = False
    policy: str = "fcfs"
    preemption_mode: str = "recompute"
    ageing: int | None = 256
    eviction_policy: str = "lru"

    def __post_init__(self) -> None:
        """Check that the pool has a block."""
        if not 1 <= self.block_size <= self.num_slots:
            expected = f"1 to {self.num_slots}, the slots of the pool"
            raise InvalidArgumentError(f"block_size: expected {expected}, found {self.block_size}")

    def cache_config(self) -> CacheConfig:
        """Return the pool, the null block besides."""
        return CacheConfig(
            self.num_slots // self.block_size + 1,
            self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            num_host_blocks=self.host_bytes // self.block_bytes,
            eviction_policy=self.eviction_policy,
        )

    def scheduler_config(self, system: str) -> SchedulerConfig:
        """Return the limits of a system's steps."""
        return SchedulerConfig(
            self.max_num_seqs or MAX_NUM_SEQS.get(system, 256),
            self.max_num_batched_tokens,
            self.max_model_len,
            watermark=WATERMARK,
            policy=self.policy,
            preemption_mode=self.preemption_mode,
            ageing=self.ageing,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_size * self.token_bytes

    def copies(self, system: str) -> int:
        """Return how many copies a block takes on its way to the host."""
        return self.copies_per_block or COPIES_PER_BLOCK.get(system, 1)
