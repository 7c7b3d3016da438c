"""Caches and batches for kernel tests: every slot and table entry that must not be read is poisoned."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pagedkv import KVCache, reference

NUM_LAYERS = 3
LAYER = 1
POISONED_IDS = (-1, 2**31 - 1, -(2**31))
LAYOUTS = ("block", "layer")


def make_pool(num_blocks, num_kv_heads, block_size, head_dim, dtype=torch.float32, layout="block", fill=torch.nan):
    """Return a pool of three layers, every element `fill`."""
    sizes = (2, num_kv_heads, block_size, head_dim)
    if layout == "block":
        return torch.full((num_blocks, NUM_LAYERS, *sizes), fill, dtype=dtype)
    return torch.full((NUM_LAYERS, num_blocks, *sizes), fill, dtype=dtype).transpose(0, 1)


def make_pairs(*pairs):
    """Return pairs of a source and a destination block."""
    return torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)


@dataclass
class Batch:
    """A ragged batch over one layer of a pool, as torch tensors."""

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    rows: Any
    pool: Any = field(repr=False)

    def arrays(self):
        """Return the arguments of an operation."""
        tables = (self.block_table, self.seq_lens, self.query_start_loc, self.rows)
        return (self.q, self.k_cache, self.v_cache, *tables)

    def oracle_arrays(self):
        """Return the same arguments as float64 NumPy arrays, which the oracle takes."""
        floats = [array.double().numpy() for array in (self.q, self.k_cache, self.v_cache)]
        return (
            *floats,
            *(array.numpy() for array in (self.block_table, self.seq_lens, self.query_start_loc, self.rows)),
        )

    def used(self, cache):
        """Return the rows of the slots that hold tokens."""
        block_size = cache.shape[2]
        parts = []
        for row, length in zip(self.rows.tolist(), self.seq_lens.tolist(), strict=True):
            blocks = self.block_table[row, : -(-length // block_size)].long()
            parts.append(cache[blocks].transpose(1, 2).flatten(0, 1)[:length])
        return torch.cat(parts) if parts else torch.zeros(0)


def make_batch(
    sequences,
    *,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=torch.float32,
    q_dtype=None,
    layout="block",
    fill=torch.nan,
    seed=0,
):
    """Return a batch of sequences given as (length, queries), in shuffled blocks and rows."""
    torch.manual_seed(seed)
    counts = [-(-length // block_size) for length, _ in sequences]
    num_blocks = sum(counts) + 3
    pool = make_pool(num_blocks, num_kv_heads, block_size, head_dim, dtype, layout, fill)
    k_cache, v_cache = pool[:, LAYER, 0], pool[:, LAYER, 1]
    num_rows = len(sequences) + 2
    rows = torch.randperm(num_rows)[: len(sequences)].int()
    columns = max(counts, default=0) + 2
    poison = torch.tensor([num_blocks, *POISONED_IDS]).repeat(num_rows * columns)
    table = poison[: num_rows * columns].reshape(num_rows, columns).int()
    blocks = torch.randperm(num_blocks).int().split([*counts, 3])
    for row, ids, (length, _) in zip(rows.tolist(), blocks, sequences, strict=False):
        table[row, : len(ids)] = ids
        for position in range(length):
            block, offset = ids[position // block_size], position % block_size
            k_cache[block, :, offset] = torch.randn(num_kv_heads, head_dim).to(dtype)
            v_cache[block, :, offset] = torch.randn(num_kv_heads, head_dim).to(dtype)
    num_queries = [queries for _, queries in sequences]
    q = torch.randn(sum(num_queries), num_q_heads, head_dim).to(q_dtype or dtype)
    query_start_loc = torch.tensor(np.cumsum([0, *num_queries]), dtype=torch.int32)
    seq_lens = torch.tensor([length for length, _ in sequences], dtype=torch.int32)
    return Batch(q, k_cache, v_cache, table, seq_lens, query_start_loc, rows, pool)


@dataclass
class PackedBatch(Batch):
    """The same batch over a packed cache; the arrays that it has itself are what the oracle sees."""

    cache: Any = field(default=None, repr=False)

    def arrays(self):
        """Return the arguments of an operation."""
        return (self.q, *self.cache.layer_tensors(LAYER), *super().arrays()[3:])


def pack(batch, **options):
    """Return a batch over a packed cache that holds what its pool does, poison included."""
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = batch.pool.shape
    sizes = (num_blocks, block_size, num_layers, num_kv_heads, head_dim, batch.pool.dtype)
    cache = KVCache(*sizes, max_num_seqs=1, max_blocks_per_seq=1, packed=True, **options)
    for layer in range(num_layers):
        k, v = (batch.pool[:, layer, side].transpose(1, 2).flatten(0, 1) for side in (0, 1))
        cache.append_kv(layer, k, v, torch.arange(num_blocks * block_size))
    of_batch = {item.name: getattr(batch, item.name) for item in dataclasses.fields(Batch)}
    return PackedBatch(**of_batch, cache=cache)


def name(dtype):
    """Return the name of a torch element type."""
    return str(dtype).removeprefix("torch.")


def assert_matches_oracle(paged_attention, batch, **options):
    """Compare an implementation with float64, within twice the error of the same precision and four roundings.

    FP8 says how keys and values are stored; weights are as exact as queries.
    """
    out, lse = paged_attention(*batch.arrays(), return_lse=True, **options)
    arrays = batch.oracle_arrays()
    options = {key: value.double().numpy() if torch.is_tensor(value) else value for key, value in options.items()}
    want, want_lse = reference.paged_attention(*arrays, return_lse=True, **options)
    stored = batch.k_cache.dtype
    precision = name(batch.q.dtype if stored.itemsize == 1 else stored)
    same = reference.paged_attention_same_precision(*arrays, dtype=precision, **options)
    v = batch.used(batch.v_cache.double()).numpy() * np.abs(options.get("v_scale", np.ones(1))).max()
    tolerance = reference.attention_tolerance(want, same, v, name(out.dtype))
    np.testing.assert_allclose(out.double().numpy(), want, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-5, atol=1e-5)
