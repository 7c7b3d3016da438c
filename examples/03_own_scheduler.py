"""A scheduler of your own over `KVCacheManager`: the bookkeeping in a few calls per step, the decisions yours.

This one serves the shortest prompt first. It prefills in whole prompts, decodes everything that runs in one batch, and
starts the youngest over when there is no room. The model is a layer of random attention in NumPy; its answers equal
those to each prompt alone, without a cache. Run: python examples/03_own_scheduler.py
"""

import numpy as np

import pagedkv

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8
NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_BLOCKS = 24, 4, 8, 16
MAX_TOKENS, BUDGET = 12, 40

rng = np.random.default_rng(0)
embedding, places = rng.standard_normal((VOCABULARY, WIDTH)), rng.standard_normal((BLOCK_SIZE * MAX_BLOCKS, WIDTH))
to_q = rng.standard_normal((WIDTH, HEADS, HEAD_DIM)) / 4
to_k, to_v = rng.standard_normal((2, WIDTH, KV_HEADS, HEAD_DIM)) / 4
to_out = rng.standard_normal((HEADS * HEAD_DIM, WIDTH)) / 4


def project(token_ids, positions):
    """Hidden states of tokens, and their queries, keys and values as float32."""
    hidden = embedding[token_ids] + places[positions]
    q, k, v = (np.einsum("tw,whd->thd", hidden, to).astype(np.float32) for to in (to_q, to_k, to_v))
    return hidden, q, k, v


def choose(hidden, attended):
    """The most likely next token of each row."""
    return ((hidden + attended.reshape(len(hidden), -1) @ to_out) @ embedding.T).argmax(axis=1)


def alone(prompt):
    """What the model answers to one prompt, everything computed anew for each token."""
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        hidden, q, k, v = project(np.array(tokens), np.arange(len(tokens)))
        k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        scores = np.einsum("hd,thd->ht", q[-1], k) / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
        tokens.append(int(choose(hidden[-1:], attended[None])[0]))
    return tokens[len(prompt) :]


manager = pagedkv.KVCacheManager(pagedkv.CacheConfig(NUM_BLOCKS, BLOCK_SIZE))
sizes = {"max_num_seqs": MAX_SEQS, "max_blocks_per_seq": MAX_BLOCKS, "backend": "numpy"}
kv_cache = pagedkv.KVCache(NUM_BLOCKS, BLOCK_SIZE, 1, KV_HEADS, HEAD_DIM, **sizes)

system = rng.integers(VOCABULARY, size=12).tolist()
prompts = [system + rng.integers(VOCABULARY, size=length).tolist() for length in (9, 3, 1, 14, 5, 7, 2, 11)]
history = [list(prompt) for prompt in prompts]  # by request
waiting = sorted(range(len(prompts)), key=lambda request: len(prompts[request]))
running = []  # (request, sequence), oldest first
num_cached = num_restarts = num_steps = 0


def step(batch, num_new, computed=None):
    """Run tokens of sequences as one plan, and append what the model answers; None if there is no room."""
    sequences = np.array([sequence for _, sequence in batch], np.int64)
    plan = manager.begin_plan()
    slots = manager.allocate_slots_batch(sequences, num_new, computed)
    if slots is None:
        manager.rollback(plan)
        return False
    positions = [np.arange(end - new, end) for end, new in zip(slots.seq_lens, num_new, strict=True)]
    token_ids = [np.array(history[request])[at] for (request, _), at in zip(batch, positions, strict=True)]
    manager.write_block_table(sequences, kv_cache.block_table[0, : len(batch)])
    kv_cache.copy_blocks(slots.copies)
    hidden, q, k, v = project(np.concatenate(token_ids), np.concatenate(positions))
    kv_cache.append_kv(0, k, v, slots.slot_mapping[0])
    table = kv_cache.block_table[0, : len(batch)]
    attended = pagedkv.paged_attention(q, *kv_cache.layer(0), table, slots.seq_lens, slots.query_start_loc)
    last = slots.query_start_loc[1:] - 1
    tokens = choose(hidden[last], attended[last])
    manager.commit(plan)
    manager.append_tokens_batch(sequences, tokens.astype(np.int32))
    for (request, _), token in zip(batch, tokens.tolist(), strict=True):
        history[request].append(token)
    return True


while waiting or running:
    num_steps += 1
    # Decode what runs; the youngest gives way, and starts over with what it has already said.
    while running and not step(running, np.ones(len(running), np.int32)):
        request, sequence = running.pop()
        manager.free(sequence)
        waiting.insert(0, request)
        num_restarts += 1
    ended = [entry for entry in running if len(history[entry[0]]) == len(prompts[entry[0]]) + MAX_TOKENS]
    manager.free_batch([sequence for _, sequence in ended])
    running = [entry for entry in running if entry not in ended]
    # Admit, shortest first, what fits into the budget; each shares what was computed before it.
    budget = BUDGET
    while waiting and len(running) < MAX_SEQS:
        request = waiting[0]
        [sequence] = manager.create_batch(history[request], [0, len(history[request])]).tolist()
        computed = manager.get_computed_blocks_batch([sequence])
        num_new = len(history[request]) - computed.num_tokens
        if num_new[0] > budget or not step([(request, sequence)], num_new, computed):
            manager.free(sequence)
            break
        budget -= num_new[0]
        num_cached += int(computed.num_tokens[0])
        running.append((waiting.pop(0), sequence))

for request, prompt in enumerate(prompts):
    assert history[request][len(prompt) :][:MAX_TOKENS] == alone(prompt), request
assert manager.usage == 0.0
manager.check_integrity()
assert num_cached > 0
print(f"{len(prompts)} requests in {num_steps} steps, {num_restarts} restarts, {num_cached} tokens from the cache")
print("tokens equal those of each prompt alone")
