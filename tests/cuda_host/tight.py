"""Batches in which everything ends where it must: the last block of the pool and the last table entry are used."""

import torch
from batches import Batch


def make_tight_batch(
    sequences, *, group=4, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float16, q_dtype=None
):
    """Return a batch of sequences given as (length, queries), the longest last; unused slots hold NaN.

    The table has no column and the pool no block to spare, a row ends where the next one begins, and block 0 is the
    last block of the last sequence.
    """
    generator = torch.Generator().manual_seed(len(sequences) + head_dim)
    counts = [-(-length // block_size) for length, _ in sequences]
    pool = torch.full((sum(counts), 2, num_kv_heads, block_size, head_dim), torch.nan).to(dtype)
    ids = torch.arange(sum(counts) - 1, -1, -1, dtype=torch.int32)
    table = torch.full((len(sequences), max(counts)), 2**30, dtype=torch.int32)
    for row, (own, (length, _)) in enumerate(zip(ids.split(counts), sequences, strict=True)):
        table[row, : len(own)] = own
        for position in range(length):
            tokens = torch.randn((2, num_kv_heads, head_dim), generator=generator).to(dtype)
            pool[own[position // block_size], :, :, position % block_size] = tokens
    queries = [count for _, count in sequences]
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn((sum(queries), group * num_kv_heads, head_dim), generator=generator).to(q_dtype or dtype)
    lens = torch.tensor([length for length, _ in sequences], dtype=torch.int32)
    rows = torch.arange(len(sequences), dtype=torch.int32)
    return Batch(q, pool[:, 0], pool[:, 1], table, lens, starts, rows, pool)
