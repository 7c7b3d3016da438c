"""One captured graph, many plans: attention is captured once and replayed after each new plan of a batch."""

import sys
from collections.abc import Callable
from typing import Any

import torch

import pagedkv
from gpu_check.runner import write_result
from pagedkv.attention import paged_attention

BLOCK_SIZE, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 16, 8, 2, 64, 2
NUM_SEQS, WIDTH = 8, 128
# Lengths of the sequences in step after step: short, long enough to be cut, unequal, and seats that are empty.
STEPS = (
    (3, 17, 40, 1, 9, 33, 64, 5),
    (1500, 1, 700, 16, 2048, 31, 900, 1),
    (5, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 2000, 0, 0, 0, 0, 3),
    (128, 256, 512, 1024, 2048, 64, 32, 16),
)


class Decoding:
    """A batch of one query per sequence, whose plan changes while its arrays stay where they are."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        num_blocks = NUM_SEQS * WIDTH + 1
        sizes = (num_blocks, BLOCK_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, "bfloat16")
        cache = pagedkv.KVCache(*sizes, max_num_seqs=NUM_SEQS, max_blocks_per_seq=WIDTH, device=device)
        self.layers = [cache.layer(layer) for layer in range(NUM_LAYERS)]
        for array in (array for k_and_v in self.layers for array in k_and_v):
            array.copy_(torch.randn(array.shape, dtype=torch.bfloat16))
        self.table = (torch.randperm(num_blocks - 1) + 1).int().reshape(NUM_SEQS, WIDTH).to(device)
        self.q = torch.zeros(NUM_SEQS, NUM_Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.out = [torch.empty_like(self.q) for _ in self.layers]
        self.attention = pagedkv.PagedAttention(NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        self.attention.reserve(self.table, num_seqs=NUM_SEQS, num_tokens=NUM_SEQS)

    def plan(self, lengths: tuple[int, ...]) -> list[torch.Tensor]:
        """Plan a step; an empty seat has no query. Returns the arrays of the batch."""
        queries = torch.tensor([int(length > 0) for length in lengths])
        starts = torch.cat([torch.zeros(1), queries.cumsum(0)]).int()
        arrays = [torch.tensor(lengths, dtype=torch.int32), starts]
        self.attention.plan(self.table, *arrays)
        self.q.copy_(torch.randn(self.q.shape, dtype=torch.bfloat16))
        return arrays

    def run(self) -> None:
        """Compute the attention of all layers."""
        for out, k_and_v in zip(self.out, self.layers, strict=True):
            self.attention.run(self.q, *k_and_v, out=out)

    def errors(self, arrays: list[torch.Tensor]) -> float:
        """Return the largest difference from attention that was planned for this step alone, padding included."""
        most = 0.0
        for out, k_and_v in zip(self.out, self.layers, strict=True):
            want = paged_attention(self.q, *k_and_v, self.table, *arrays)
            most = max(most, float((out.float() - want.float()).abs().max()))
        return most


def captured(decoding: Decoding) -> Callable[[], Any]:
    """Return what replays a graph of all layers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decoding.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoding.run()
    return graph.replay


def check(device: str, capture: Callable[[Decoding], Callable[[], Any]] = captured) -> int:
    """Capture the first step; replay all."""
    decoding = Decoding(device)
    decoding.plan(STEPS[0])
    replay = capture(decoding)
    errors = []
    for lengths in STEPS:
        arrays = decoding.plan(lengths)
        for out in decoding.out:
            out.fill_(torch.nan)
        replay()
        errors.append(decoding.errors(arrays))
    write_result(largest_differences=[str(error) for error in errors])
    # The same cuts of the same keys: only where a cut differs may a result be rounded otherwise.
    wrong = [f"step {number}: off by {error}" for number, error in enumerate(errors) if not error <= 2**-6]
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(check("cuda"))
