"""Every kernel once, on shapes so small that a sanitizer is soon done with them."""

import itertools
import sys

import torch

import pagedkv
from pagedkv.attention import merge_states, paged_attention
from pagedkv.kv_cache import gather_kv, move_kv

# Lengths and queries: decode, a whole prompt, a chunk, nothing, and a sequence that is cut into pieces.
SEQUENCES = ((17, 1), (40, 40), (70, 9), (0, 0), (900, 1))
BLOCK_SIZE, NUM_KV_HEADS, GROUP = 16, 2, 4
FEATURES = {"soft_cap": 20.0}


def fill(cache: pagedkv.KVCache, table: torch.Tensor, q_dtype: torch.dtype, device: str) -> None:
    """Write the keys and values of all sequences."""
    for row, (length, _) in enumerate(SEQUENCES):
        first_slots = table[row].long() * BLOCK_SIZE
        slots = (first_slots[:, None] + torch.arange(BLOCK_SIZE)).flatten()[:length]
        k, v = torch.randn(2, length, NUM_KV_HEADS, cache.head_dim, dtype=q_dtype).to(device)
        cache.append_kv(0, k, v, slots.to(device))


def attend(cache: pagedkv.KVCache, q_dtype: torch.dtype, device: str, features: dict[str, float]) -> None:
    """Write keys and values, attend over them, collect, copy and move them."""
    torch.manual_seed(0)
    lengths, queries = (torch.tensor(column, dtype=torch.int32) for column in zip(*SEQUENCES, strict=True))
    width = int(-(-lengths.max() // BLOCK_SIZE))
    table = (torch.randperm(len(SEQUENCES) * width) + 1).int().reshape(len(SEQUENCES), width)
    fill(cache, table, q_dtype, device)
    starts = torch.cat([torch.zeros(1), queries.cumsum(0)]).int()
    q = torch.randn(int(starts[-1]), GROUP * NUM_KV_HEADS, cache.head_dim, dtype=q_dtype).to(device)
    k_cache, v_cache = cache.layer(0)
    table, lengths, starts = (array.to(device) for array in (table, lengths, starts))
    out, lse = paged_attention(q, k_cache, v_cache, table, lengths, starts, return_lse=True, **features)
    merge_states(out, lse, out, lse)
    if not torch.isfinite(out).all():
        raise SystemExit("expected finite results, found others")
    shape = (int(lengths.sum()), NUM_KV_HEADS, cache.head_dim)
    collected = [torch.empty(shape, dtype=k_cache.dtype, device=device) for _ in range(2)]
    gather_kv(k_cache, v_cache, table, lengths, out=collected)
    cache.copy_blocks(torch.tensor([[1, 0]], dtype=torch.int32))
    move_kv(cache.pool, torch.tensor([[0, 16, 3]]))


def main(device: str = "cuda", head_dims: tuple[int, ...] = (64, 256)) -> int:
    """Run all of it for types, head dimensions and features."""
    num_blocks = len(SEQUENCES) * -(-max(length for length, _ in SEQUENCES) // BLOCK_SIZE) + 1
    for head_dim, dtype, features in itertools.product(head_dims, ("bfloat16", "float8_e4m3fn"), ({}, FEATURES)):
        sizes = (num_blocks, BLOCK_SIZE, 2, NUM_KV_HEADS, head_dim, dtype)
        cache = pagedkv.KVCache(*sizes, max_num_seqs=8, max_blocks_per_seq=64, device=device)
        attend(cache, torch.bfloat16, device, features)
    if device == "cuda":
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
