"""Attention on the CPU: how fast keys and values are read, against what memory gives and against torch.

Decode is bound by memory: the rate is bytes of keys and values over time, the limit is the rate at which torch sums a
large float32 array with the same threads, and the peer is torch's scaled_dot_product_attention over the same keys and
values laid out contiguously. Prefill is bound by arithmetic; its peer is torch's on the same sizes. Layers of a pool of
32 layers are run through one after another, as a model does, and beside them a pool of one layer each time.
"""

import statistics
import time
from collections.abc import Callable

import torch

import lines
import pagedkv

BLOCK_SIZE = 16
NUM_LAYERS = 32
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE_SEQS, DECODE_LEN = 4, 1024
PREFILL_LEN = 512
NUM_COPIES = 4  # of what torch reads, and of one-layer pools: together larger than a cache
REPEATS = 20
READ_BYTES = 1 << 28


class Work:
    """Sequences of equal length in shuffled blocks of a pool, and the same keys and values laid out for torch."""

    def __init__(self, num_seqs: int, seq_len: int, num_queries: int, dtype: str, num_layers: int) -> None:
        torch.manual_seed(0)
        blocks_per_seq = seq_len // BLOCK_SIZE
        num_blocks = num_seqs * blocks_per_seq + 1
        sizes = (num_blocks, BLOCK_SIZE, num_layers, NUM_KV_HEADS, HEAD_DIM)
        self.cache = pagedkv.KVCache(*sizes, dtype, max_num_seqs=num_seqs, max_blocks_per_seq=blocks_per_seq)
        torch_dtype = self.cache.pool.dtype
        self.q = torch.randn(num_seqs * num_queries, NUM_Q_HEADS, HEAD_DIM).to(torch_dtype)
        table = torch.randperm(num_blocks - 1).add(1)[: num_seqs * blocks_per_seq].reshape(num_seqs, -1)
        self.block_table = table.int()
        self.seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)
        self.query_start_loc = torch.arange(0, len(self.q) + 1, num_queries, dtype=torch.int32)
        self.layers = [self._fill(layer) for layer in range(num_layers)]
        self.torch_q = self.q.reshape(num_seqs, num_queries, NUM_Q_HEADS, HEAD_DIM).transpose(1, 2)
        shape = (NUM_COPIES, 2, num_seqs, NUM_KV_HEADS, seq_len, HEAD_DIM)
        self.torch_kv = torch.randn(shape).to(torch_dtype)

    def _fill(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = self.cache.layer(layer)
        k_cache.normal_()
        v_cache.normal_()
        return k_cache, v_cache

    def ours(self, layer: int) -> torch.Tensor:
        """Attend over the blocks of a layer."""
        caches = self.layers[layer % len(self.layers)]
        return pagedkv.paged_attention(self.q, *caches, self.block_table, self.seq_lens, self.query_start_loc)

    def torch(self, copy: int) -> torch.Tensor:
        """Attend over contiguous keys and values."""
        causal = self.torch_q.shape[2] > 1
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(self.torch_q, *self.torch_kv[copy % NUM_COPIES], is_causal=causal, enable_gqa=True)


def seconds(run: Callable[[int], object]) -> list[float]:
    """Return how long each of the repeats took, after one that does not count."""
    run(0)
    samples = []
    for repeat in range(REPEATS):
        start = time.perf_counter()
        run(repeat + 1)
        samples.append(time.perf_counter() - start)
    return samples


def read_rate() -> float:
    """Return the bytes per second at which torch sums a large array."""
    array = torch.ones(READ_BYTES // 4)
    return READ_BYTES / statistics.median(seconds(lambda _: array.sum()))


def add_decode(report: lines.Report, dtype: str, limit: float) -> None:
    work = Work(DECODE_SEQS, DECODE_LEN, 1, dtype, NUM_LAYERS)
    num_bytes = work.torch_kv[0].nbytes
    report.add(
        f"decode_{dtype}",
        "GB/s of keys and values",
        [num_bytes / 1e9 / s for s in seconds(work.ours)],
        better="higher",
        peer=[num_bytes / 1e9 / s for s in seconds(work.torch)],
        peer_name="torch SDPA, contiguous",
        limit=limit / 1e9,
        limit_name="torch sum",
        num_seqs=DECODE_SEQS,
        seq_len=DECODE_LEN,
        num_layers=NUM_LAYERS,
    )


def add_prefill(report: lines.Report, dtype: str) -> None:
    work = Work(1, PREFILL_LEN, PREFILL_LEN, dtype, 1)
    flops = 2 * NUM_Q_HEADS * HEAD_DIM * PREFILL_LEN * (PREFILL_LEN + 1)
    report.add(
        f"prefill_{dtype}",
        "GFLOP/s",
        [flops / 1e9 / s for s in seconds(work.ours)],
        better="higher",
        peer=[flops / 1e9 / s for s in seconds(work.torch)],
        peer_name="torch SDPA, contiguous",
        seq_len=PREFILL_LEN,
    )


def add_layers(report: lines.Report) -> None:
    """Compare layers of a deep pool with one-layer pools, taking turns: the machine may change its mind between."""
    deep = Work(DECODE_SEQS, DECODE_LEN, 1, "bfloat16", NUM_LAYERS)
    flat = [Work(DECODE_SEQS, DECODE_LEN, 1, "bfloat16", 1) for _ in range(NUM_COPIES)]
    deep_ms, flat_ms = [], []
    for _ in range(4):
        deep_ms += [1e3 * s for s in seconds(deep.ours)]
        flat_ms += [1e3 * s for s in seconds(lambda repeat: flat[repeat % NUM_COPIES].ours(0))]
    name = "one-layer pools"
    report.add("decode_32_layers", "ms a layer", deep_ms, better="lower", peer=flat_ms, peer_name=name)


def main() -> None:
    arguments = lines.parser(__doc__).parse_args()
    report = lines.Report("paged_attention on the CPU", arguments.json)
    limit = read_rate()
    for dtype in ("bfloat16", "float16", "float32"):
        add_decode(report, dtype, limit)
    add_prefill(report, "float32")
    add_layers(report)
    report.show()


if __name__ == "__main__":
    main()
