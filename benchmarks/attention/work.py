"""Our side: caches of many layers in shuffled blocks, and what is done to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

import pagedkv
from attention.table import BLOCK_SIZE, Shape
from pagedkv.kv_cache import from_dlpack

MAX_LAYERS = 32
# Random numbers that are laid out again and again to fill a pool; no multiple of a block, so that blocks differ.
FILL_ELEMENTS = (1 << 24) + 40
FILL_TOKENS = (1 << 13) + 5


class WrongResultError(Exception):
    """What is to be measured does not compute what it should."""


@dataclass(frozen=True)
class Pool:
    """A cache of several layers whose blocks a table names in shuffled order."""

    cache: pagedkv.KVCache
    block_table: torch.Tensor
    tokens: torch.Tensor | None = None  # keys and values that the slots of packed layers hold again and again

    @property
    def num_layers(self) -> int:
        return self.cache.num_layers

    @property
    def address(self) -> int:
        """An address in the middle of its memory."""
        start = self.cache.pool if self.tokens is None else torch.from_dlpack(self.cache.layer_tensors(0)[1])
        return start.data_ptr() + self.cache.num_bytes // 2


def layers_that_fit(shape: Shape, budget_bytes: int) -> int:
    """Return how many layers of a shape's keys and values fit; at least one, at most `MAX_LAYERS`."""
    return max(1, min(MAX_LAYERS, budget_bytes // shape.kv_bytes))


def make_pool(shape: Shape, num_layers: int) -> Pool:
    """Make a cache for the sequences of a shape, filled with random numbers; block 0 is in no table."""
    per_seq = -(-shape.seq_len // BLOCK_SIZE)
    num_blocks = shape.num_seqs * per_seq + 1
    sizes = (num_blocks, BLOCK_SIZE, num_layers, shape.num_kv_heads, shape.head_dim)
    packed = {"packed": True} if shape.keys == "packed" else {}
    cache = pagedkv.KVCache(*sizes, shape.dtype, max_num_seqs=shape.num_seqs, max_blocks_per_seq=per_seq, **packed)
    torch.manual_seed(0)
    tokens = fill_slots(cache) if packed else fill(cache.pool)
    table = torch.randperm(num_blocks - 1).add(1).int().reshape(shape.num_seqs, per_seq)
    return Pool(cache, table, tokens)


def fill(array: torch.Tensor) -> None:
    """Fill contiguous memory with normally distributed numbers."""
    random = torch.randn(FILL_ELEMENTS).to(array.dtype)
    for part in array.view(-1).split(FILL_ELEMENTS):
        part.copy_(random[: len(part)])


class Work(Protocol):
    """Something that is done in one place after the other, over and over."""

    @property
    def num_places(self) -> int: ...

    def __call__(self, number: int) -> None: ...


def go_around(work: Work) -> None:
    """Do the work everywhere once: a virtual machine's memory is half as fast where it was never used so."""
    for number in range(work.num_places):
        work(number)


def fill_slots(cache: pagedkv.KVCache) -> torch.Tensor:
    """Fill every slot of every layer with normally distributed keys and values; return them."""
    sizes = (2, FILL_TOKENS, cache.num_kv_heads, cache.head_dim)
    tokens = torch.randn(sizes).to(getattr(torch, cache.dtype))
    for slots in torch.arange(cache.num_blocks * cache.block_size).split(FILL_TOKENS):
        k, v = tokens[:, : len(slots)]
        for layer in range(cache.num_layers):
            cache.append_kv(layer, k, v, slots)
    return tokens


class Attention:
    """Attention of the last queries of every sequence, over one layer of a pool after the other."""

    def __init__(self, shape: Shape, pool: Pool) -> None:
        self.shape = shape
        self.pool = pool
        dtype = getattr(torch, shape.q_dtype)
        num_tokens = shape.num_seqs * shape.num_queries
        self.q = torch.randn(num_tokens, shape.num_q_heads, shape.head_dim).to(dtype)
        self.out = torch.empty_like(self.q)
        layer_of = pool.cache.layer if pool.tokens is None else pool.cache.layer_tensors
        self.layers = [layer_of(layer) for layer in range(pool.num_layers)]
        seq_lens = torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32)
        query_start_loc = torch.arange(0, num_tokens + 1, shape.num_queries, dtype=torch.int32)
        self.run = plan(shape, (pool.block_table, seq_lens, query_start_loc))

    @property
    def num_places(self) -> int:
        return len(self.layers)

    def __call__(self, number: int) -> None:
        self.run(self.q, *self.layers[number % len(self.layers)], out=self.out)

    def check(self) -> None:
        """Compare the first sequence with torch, on keys and values that torch itself looks up in the table."""
        last = len(self.layers) - 1
        self(last)
        shape = self.shape
        k, v = (self._of_first_sequence(last, side) for side in (0, 1))
        q, out = (array[: shape.num_queries].float().transpose(0, 1) for array in (self.q, self.out))
        attention = torch.nn.functional.scaled_dot_product_attention
        wanted = attention(q, k, v, is_causal=shape.num_queries > 1, enable_gqa=True)
        error = float((out - wanted).norm() / wanted.norm())
        if not error < 0.02:
            raise WrongResultError(f"expected the attention that torch computes, found one that is off by {error:.2%}")

    def _of_first_sequence(self, layer: int, side: int) -> torch.Tensor:
        table = self.pool.block_table[0].long()
        if self.pool.tokens is not None:
            slots = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
            tokens = self.pool.tokens[side, slots % len(self.pool.tokens[side])].float().transpose(0, 1)
        else:
            blocks = self.layers[layer][side][table].float()
            tokens = blocks.transpose(0, 1).reshape(self.shape.num_kv_heads, -1, self.shape.head_dim)
        return tokens[:, : self.shape.seq_len]


class Calls:
    """Many calls of attention on imported tensors, which cost least, one layer of a pool after the other."""

    def __init__(self, work: Attention, num_calls: int) -> None:
        cache = work.pool.cache
        self.num_calls = num_calls
        self._run = work.run
        self._q, self._out = (from_dlpack(array) for array in (work.q, work.out))
        self._layers = [cache.layer_tensors(layer) for layer in range(cache.num_layers)]

    def __call__(self, number: int) -> None:
        run, q, out, layers = self._run, self._q, self._out, self._layers
        for call in range(self.num_calls):
            k_cache, v_cache = layers[call % len(layers)]
            run(q, k_cache, v_cache, out=out)


def plan(shape: Shape, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Callable[..., object]:
    """Plan a batch outside of what is timed, as a step does; a build without plans does it in each call."""
    planned = getattr(pagedkv, "PagedAttention", None)
    if planned is None:
        return lambda q, k_cache, v_cache, out: pagedkv.paged_attention(q, k_cache, v_cache, *batch, out=out)
    attention = planned(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    attention.plan(*batch)
    return attention.run


class Append:
    """Writes new tokens of every sequence into its blocks: in one layer after the other, then at other positions."""

    def __init__(self, shape: Shape, pool: Pool, num_sources: int) -> None:
        self.pool = pool
        self.slots = slots_from_the_end(shape, pool.block_table)
        sizes = (num_sources, 2, len(self.slots[0]), shape.num_kv_heads, shape.head_dim)
        self.sources = torch.empty(sizes, dtype=getattr(torch, shape.dtype))
        fill(self.sources)

    @property
    def num_places(self) -> int:
        return self.pool.num_layers * len(self.slots)

    def _at(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return the layer, the slots, and keys and values."""
        turn, layer = divmod(number, self.pool.num_layers)
        return layer, self.slots[turn % len(self.slots)], self.sources[number % len(self.sources)]

    def __call__(self, number: int) -> None:
        layer, slots, source = self._at(number)
        self.pool.cache.append_kv(layer, *source, slots)

    def by_torch(self, number: int) -> None:
        """Do the same by torch's indexing."""
        layer, slots, sources = self._at(number)
        blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        for cache, source in zip(self.pool.cache.layer(layer), sources, strict=True):
            cache[blocks, :, offsets] = source

    def check(self) -> None:
        """Look the tokens up where they should be."""
        self(0)
        layer, slots, sources = self._at(0)
        blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        for cache, source in zip(self.pool.cache.layer(layer), sources, strict=True):
            if not torch.equal(cache[blocks, :, offsets], source):
                raise WrongResultError("expected the appended tokens in their slots, found others")


def slots_from_the_end(shape: Shape, block_table: torch.Tensor) -> list[torch.Tensor]:
    """Return the slots of the last `num_queries` tokens of each sequence, of those before them, and so on."""
    blocks = block_table[: shape.num_seqs].long().repeat_interleave(BLOCK_SIZE, dim=1)
    positions = torch.arange(shape.seq_len)
    slots = blocks[:, : shape.seq_len] * BLOCK_SIZE + positions % BLOCK_SIZE
    whole = slots[:, shape.seq_len % shape.num_queries :].split(shape.num_queries, dim=1)
    return [part.flatten() for part in reversed(whole)]


class Copy:
    """Copies whole blocks over all layers, other ones each time, in about as many bytes as the limit goes around in."""

    def __init__(self, pool: Pool, num_pairs: int, cycle_bytes: int) -> None:
        self.pool = pool
        order = pool.block_table.flatten()
        num_copies = max(1, min(len(order) // (2 * num_pairs), cycle_bytes // (2 * num_pairs * self.block_bytes)))
        chosen = order[: num_copies * 2 * num_pairs].split(2 * num_pairs)
        self.pairs = [pairs.reshape(2, -1).T.contiguous() for pairs in chosen]

    @property
    def block_bytes(self) -> int:
        return self.pool.cache.num_bytes // self.pool.cache.num_blocks

    @property
    def num_places(self) -> int:
        return len(self.pairs)

    def __call__(self, number: int) -> None:
        self.pool.cache.copy_blocks(self.pairs[number % len(self.pairs)])

    def by_torch(self, number: int) -> None:
        """Do the same by torch's indexing."""
        sources, destinations = self.pairs[number % len(self.pairs)].long().T
        self.pool.cache.pool[destinations] = self.pool.cache.pool[sources]

    def check(self) -> None:
        """Compare source and destination."""
        self(0)
        sources, destinations = self.pairs[0].long().T
        blocks = self.pool.cache.pool
        if not torch.equal(blocks[sources], blocks[destinations]):
            raise WrongResultError("expected copies of blocks, found others")
