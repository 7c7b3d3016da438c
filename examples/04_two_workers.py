"""One scheduler, two workers: a plan travels as one buffer, and each worker holds half of the KV heads.

The scheduler knows no model. It broadcasts each plan over gloo; the workers rebuild it, run their heads, add up their
parts, and one of them sends the sampled tokens back. The tokens equal those of one process with all heads. An empty
buffer ends the workers, and so does the end of the scheduler: nobody waits longer than the timeout.
Run: python examples/04_two_workers.py
"""

import datetime as dt
import multiprocessing
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist

import pagedkv

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 32, 4, 2, 8, 2
NUM_WORKERS, TIMEOUT = 2, dt.timedelta(seconds=300)
LIMITS = pagedkv.SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
CACHE = pagedkv.CacheConfig(64, block_size=8)
PROMPTS = [[*range(20), 1, 2], [*range(20), 9], [5, 6, 7]]


class Shard:
    """The query and KV heads of worker `rank` of `size`, with weights that every process makes the same."""

    def __init__(self, rank, size):
        made = torch.Generator().manual_seed(0)

        def weights(*shape):
            return torch.randn(shape, generator=made) / 4

        self.embedding, self.places = weights(VOCABULARY, WIDTH) * 4, weights(LIMITS.max_model_len, WIDTH) * 4
        part = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        kv_part = slice(rank * KV_HEADS // size, (rank + 1) * KV_HEADS // size)
        self.layers = []
        for _ in range(LAYERS):
            q, k, v = (weights(WIDTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            self.layers.append((q[:, part], k[:, kv_part], v[:, kv_part], weights(HEADS, HEAD_DIM, WIDTH)[part]))
        group = pagedkv.GroupSpec(LAYERS, KV_HEADS // size, HEAD_DIM)
        config = pagedkv.CacheConfig(CACHE.num_blocks, CACHE.block_size, groups=[group])
        self.kv_cache = pagedkv.KVCache.from_config(config, LIMITS)

    def forward(self, plan, add_up=lambda part: part):
        """The token that follows each of the plan's samples."""
        self.kv_cache.apply(plan)
        ids, positions = torch.tensor(plan.token_ids), torch.tensor(plan.positions)
        hidden = self.embedding[ids] + self.places[positions]
        for layer, (to_q, to_k, to_v, to_out) in enumerate(self.layers):
            q, k, v = (torch.einsum("tw,whd->thd", hidden, to) for to in (to_q, to_k, to_v))
            self.kv_cache.append_kv(layer, k, v, plan.slot_mapping[0])
            table = self.kv_cache.block_table[0]
            keys, values = self.kv_cache.layer(layer)
            attended = pagedkv.paged_attention(
                q, keys, values, table, plan.seq_lens, plan.query_start_loc, rows=plan.rows
            )
            hidden = hidden + add_up(torch.einsum("thd,hdw->tw", attended, to_out))
        return (hidden[torch.tensor(plan.sample_rows).long()] @ self.embedding.T).argmax(-1).int()


def serve(run):
    """Generate for all prompts; `run` has a plan executed and returns its tokens."""
    scheduler = pagedkv.Scheduler(CACHE, LIMITS)
    handles = [scheduler.add_request(str(i), prompt, max_tokens=8) for i, prompt in enumerate(PROMPTS)]
    outputs = {handle: [] for handle in handles}
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        tokens = run(plan)
        result = scheduler.commit(plan, tokens)
        for handle, token in zip(result.handles.tolist(), tokens.tolist(), strict=True):
            outputs[handle].append(token)
    return [outputs[handle] for handle in handles]


def join(path, rank):
    """Meet the others; rank 0 is the scheduler. Returns the group of the workers."""
    dist.init_process_group("gloo", f"file://{path}", timeout=TIMEOUT, rank=rank, world_size=NUM_WORKERS + 1)
    return dist.new_group(list(range(1, NUM_WORKERS + 1)), timeout=TIMEOUT)


def work(path, rank):
    """A worker: plans in, tokens out, until an empty buffer comes."""
    torch.set_num_threads(1)
    workers = join(path, rank)
    shard = Shard(rank - 1, NUM_WORKERS)

    def add_up(part):
        dist.all_reduce(part, group=workers)
        return part

    size = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(size, 0)
        if size.item() == 0:
            break
        buffer = torch.empty(size.item(), dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        tokens = shard.forward(pagedkv.StepPlan.from_buffer(buffer.numpy()), add_up)
        if rank == 1:
            dist.send(tokens, 0)
    dist.destroy_process_group()


def execute(plan):
    """Have the workers run a plan."""
    buffer = torch.from_numpy(np.array(plan.buffer))
    dist.broadcast(torch.tensor([len(buffer)]), 0)
    dist.broadcast(buffer, 0)
    tokens = torch.empty(plan.num_samples, dtype=torch.int32)
    dist.recv(tokens, 1)
    return tokens


def main():
    """Compare two workers with one process."""
    torch.set_num_threads(1)
    single = Shard(0, 1)
    expected = serve(single.forward)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "meeting")
        workers = [spawn.Process(target=work, args=(path, rank + 1), daemon=True) for rank in range(NUM_WORKERS)]
        for worker in workers:
            worker.start()
        try:
            join(path, 0)
            outputs = serve(execute)
            dist.broadcast(torch.zeros(1, dtype=torch.int64), 0)
            for worker in workers:
                worker.join(TIMEOUT.total_seconds())
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()
                    worker.join()
            if dist.is_initialized():
                dist.destroy_process_group()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert outputs == expected
    print(f"{len(PROMPTS)} requests through two workers, each with {KV_HEADS // NUM_WORKERS} of {KV_HEADS} KV heads")
    print("tokens equal those of one process")


if __name__ == "__main__":
    main()
