"""A `Cache` of transformers on paged blocks, for people who stay with `model.generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pagedkv.config import CacheConfig
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kv_cache import KVCache
from pagedkv.kv_cache.ops import gather_kv
from pagedkv.pool import KVCacheManager

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PagedCache(Cache):
    """Keys and values of `model.generate` in blocks that beams share.

    Give it to `generate` as ``cache`` (``past_key_values`` before transformers 5.24). When beams are reordered, those
    that go on from one parent share its blocks, and a block is copied when one of them first writes into it; a cache of
    transformers is copied as a whole each time.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's configuration, for its number of layers.
    num_blocks : int
        Blocks, the null block included.
    block_size : int
        Tokens per block.

    Attributes
    ----------
    num_copies : int
        Blocks that were copied before they were written.

    Raises
    ------
    UnsupportedError
        If layers differ in shape or type.

    Notes
    -----
    Attention stays the model's own: it gets keys and values gathered from the blocks, in each layer and step. Layers
    with a window keep all tokens. For attention that reads the blocks in place use `LLM`.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> config = LlamaConfig(vocab_size=32, intermediate_size=64, eos_token_id=None, **sizes)
    >>> cache = PagedCache(config, num_blocks=64, block_size=4)
    >>> ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    >>> options = dict(num_beams=4, max_new_tokens=6, do_sample=False, pad_token_id=0)
    >>> model = LlamaForCausalLM(config).eval()
    >>> tuple(model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **options).shape)
    (1, 12)
    """

    def __init__(self, config: Any, num_blocks: int, block_size: int = 16) -> None:
        decoder = config.get_text_config(decoder=True)
        self._config = CacheConfig(num_blocks, block_size, enable_prefix_caching=False)
        self._manager = KVCacheManager(self._config)
        self._sequences: NDArray[np.int64] = np.empty(0, np.int64)
        self._kv_cache: KVCache | None = None
        self._table = np.zeros((0, 0), np.int32)
        self._slots: NDArray[np.int64] = np.empty(0, np.int64)
        self.num_tokens = 0
        self.num_copies = 0
        self._layers = [_PagedLayer(self, number) for number in range(decoder.num_hidden_layers)]
        super().__init__(layers=list(self._layers))

    @property
    def num_held_blocks(self) -> int:
        """Blocks that sequences hold."""
        return int(self._manager.num_blocks_by_state[2])

    @property
    def kv_cache(self) -> KVCache:
        """The memory; there is none before the first forward pass, which says its shape and type."""
        if self._kv_cache is None:
            raise InvalidArgumentError("kv_cache: expected a forward pass before, found none")
        return self._kv_cache

    @property
    def batch_size(self) -> int:
        """Sequences, or -1 before the first forward pass."""
        return len(self._sequences) or -1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each beam go on from another: a fork of its blocks."""
        self._select(beam_idx.cpu().numpy())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences."""
        self._select(np.arange(len(self._sequences))[indices.cpu().numpy()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each sequence several times; they share its blocks."""
        self._select(np.repeat(np.arange(len(self._sequences)), repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens away from the ends of all sequences; the number is negative, as in transformers."""
        if tokens_to_remove > 0:
            raise InvalidArgumentError(f"tokens_to_remove: expected a negative number, found {tokens_to_remove}")
        left = max(self.num_tokens + tokens_to_remove, 0)
        if left == 0:
            self.reset()
            return
        for sequence in self._sequences.tolist():
            self._manager.truncate(sequence, left)
        self._set_length(left)

    def reset(self) -> None:
        """Forget all sequences."""
        self._manager.free_batch(self._sequences)
        self._sequences = np.empty(0, np.int64)
        self._set_length(0)

    def grow(self, keys: torch.Tensor) -> None:
        """Make room for the new tokens of a forward pass; its first layer calls this.

        Parameters
        ----------
        keys : torch.Tensor, shape (batch_size, num_kv_heads, num_new_tokens, head_dim)
            The new keys of that layer.
        """
        batch_size, num_kv_heads, num_new, head_dim = keys.shape
        if self._kv_cache is None:
            sizes = (self._config.num_blocks, self._config.block_size, len(self.layers), num_kv_heads, head_dim)
            self._kv_cache = KVCache(*sizes, dtype=keys.dtype, max_num_seqs=1, max_blocks_per_seq=1)
        # What the tokens are does not matter where nothing is looked up.
        tokens = np.zeros(batch_size * num_new, np.int32)
        starts = np.arange(0, batch_size * num_new + 1, num_new)
        is_first = not len(self._sequences)
        if is_first:
            self._sequences = self._manager.create_batch(tokens, starts, use_prefix_cache=False)
        elif len(self._sequences) != batch_size:
            raise InvalidArgumentError(f"batch: expected {len(self._sequences)} sequences, found {batch_size}")
        else:
            self._manager.append_tokens_batch(self._sequences, tokens, starts)
        plan = self._manager.begin_plan()
        slots = self._manager.allocate_slots_batch(self._sequences, np.full(batch_size, num_new, np.int32))
        if slots is None:
            self._manager.rollback(plan)
            found = self._manager.num_blocks_by_state[0]
            raise InvalidArgumentError(
                f"num_blocks: expected room for {num_new} more tokens of {batch_size} sequences,"
                f" found {found} blocks free"
            )
        self._kv_cache.copy_blocks(slots.copies)
        self._manager.commit(plan)
        self.num_copies += len(slots.copies)
        self._slots = slots.slot_mapping[0]
        self._set_length(self.num_tokens + num_new, of_layers=False)
        self._table = np.zeros((batch_size, -(-self.num_tokens // self._config.block_size)), np.int32)
        self._manager.write_block_table(self._sequences, self._table)

    def put(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values of a layer; return all of it, as the model's attention takes them."""
        cache = self.kv_cache
        batch_size, num_kv_heads, _, head_dim = keys.shape
        expected = (cache.num_kv_heads, cache.head_dim)
        if (num_kv_heads, head_dim) != expected or keys.shape != values.shape or cache.dtype != _name(keys.dtype):
            raise UnsupportedError(
                f"layer {layer}: expected keys and values of {expected} heads and elements in {cache.dtype},"
                f" as in the first layer, found {tuple(keys.shape)} and {tuple(values.shape)} in {_name(keys.dtype)}"
            )
        cache.append_kv(layer, _by_token(keys), _by_token(values), self._slots)
        shape = (batch_size * self.num_tokens, num_kv_heads, head_dim)
        found = torch.empty(shape, dtype=keys.dtype), torch.empty(shape, dtype=keys.dtype)
        lengths = np.full(batch_size, self.num_tokens, np.int32)
        gather_kv(*cache.layer_tensors(layer), self._table, lengths, out=found)
        gathered = [x.view(batch_size, self.num_tokens, num_kv_heads, head_dim).transpose(1, 2) for x in found]
        return gathered[0], gathered[1]

    def _select(self, indices: NDArray[np.int64]) -> None:
        old = self._sequences
        self._sequences = self._manager.fork_batch(old[indices])
        self._manager.free_batch(old)

    def _set_length(self, num_tokens: int, *, of_layers: bool = True) -> None:
        self.num_tokens = num_tokens
        if of_layers:
            for layer in self._layers:
                layer.num_tokens = num_tokens


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `PagedCache`."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_tokens = 0
        self._cache = cache
        self._number = number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_initialized = True
        if self.num_tokens == self._cache.num_tokens:
            self._cache.grow(key_states)
        self.num_tokens = self._cache.num_tokens
        return self._cache.put(self._number, key_states.detach(), value_states.detach())

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Up to transformers 5.0 these are positions, of which only the number counts.
        num_new = query_length if isinstance(query_length, int) else len(query_length)
        return self.num_tokens + num_new, 0

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """Turn (batch, heads, tokens, head_dim) into (batch * tokens, heads, head_dim)."""
    return heads.transpose(1, 2).reshape(-1, heads.shape[1], heads.shape[3])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
