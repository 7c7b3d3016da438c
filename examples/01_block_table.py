"""The smallest lesson: 40 tokens in blocks that lie anywhere, read back through the block table.

A pool of 64 blocks of 16 slots is shared by everyone. Blocks are taken wherever they are free; the block table says
which block holds which tokens, and reading goes through it. Run: python examples/01_block_table.py
"""

import numpy as np

import pagedkv

NUM_TOKENS, BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM = 40, 16, 64, 8
RESERVATION = 2048  # what a cache without paging sets aside for a sequence that may grow to its limit

pool = pagedkv.BlockPool(NUM_BLOCKS)
cache = pagedkv.KVCache(NUM_BLOCKS, BLOCK_SIZE, 1, 1, HEAD_DIM, max_num_seqs=1, max_blocks_per_seq=4, backend="numpy")

# Others have come and gone, so the free blocks do not lie side by side.
others = pool.allocate(30)
pool.free(others[[4, 21, 11]])

num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
block_table = pool.allocate(num_blocks)
print(f"block table of {NUM_TOKENS} tokens: {block_table.tolist()}")

positions = np.arange(NUM_TOKENS)
slot_mapping = block_table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
keys = np.random.default_rng(0).standard_normal((NUM_TOKENS, 1, HEAD_DIM), dtype=np.float32)
cache.append_kv(0, keys, -keys, slot_mapping)

cache.block_table[0, 0, :num_blocks] = block_table
read_keys, read_values = cache.gather_kv(0, np.array([NUM_TOKENS], np.int32))
assert np.array_equal(read_keys, keys)
assert np.array_equal(read_values, -keys)
print("keys and values read back through the table equal what was written")

paged = num_blocks * BLOCK_SIZE - NUM_TOKENS
reserved = RESERVATION - NUM_TOKENS
print(f"unused slots: {paged} with blocks, {reserved:,} with a reservation of {RESERVATION:,} per sequence")

pool.free(block_table)
pool.free(np.delete(others, [4, 21, 11]))
assert pool.num_free_blocks == NUM_BLOCKS - 1
