"""Compiles a small model and prints, as one line of JSON, what it did to memory, to numbers and to its own code.

Run by `test_torch_ops.py` in a process of its own, whose peak of memory it can take.
"""

import gc
import json
import sys
from pathlib import Path

import torch

from pagedkv import KVCache, PagedAttention
from pagedkv.attention import torch_ops

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3, 4, 2, 64, 16
NUM_BLOCKS, NUM_ROWS, NUM_COLUMNS = 8192, 8, 16
# Sequences as (length, queries): first a prefill, then what it is compiled for must do for any other.
COMPILED = [(40, 40), (7, 7)]
OTHERS = [[(41, 1), (8, 1)], [(42, 1), (9, 1), (90, 90)], [(200, 200)], [(43, 1), (10, 1), (91, 1), (5, 5), (6, 2)]]


class Layer(torch.nn.Module):
    """Attention with its projections."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.qkv = torch.nn.Linear(NUM_Q_HEADS * HEAD_DIM, (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        self.out = torch.nn.Linear(NUM_Q_HEADS * HEAD_DIM, NUM_Q_HEADS * HEAD_DIM)

    def forward(self, x, pool, slot_mapping, plan):
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1)
        torch_ops.append_kv(k, v, pool, self.number, slot_mapping)
        return x + self.out(torch_ops.paged_attention(q, pool, self.number, plan).flatten(1))


class Model(torch.nn.Module):
    """Some layers over one pool."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(number) for number in range(NUM_LAYERS))

    def forward(self, x, pool, slot_mapping, plan):
        for layer in self.layers:
            x = layer(x, pool, slot_mapping, plan)
        return x


def inputs(sequences):
    """Return hidden states, slots and a packed plan for sequences in blocks of their own."""
    table = torch.arange(1, 1 + NUM_ROWS * NUM_COLUMNS, dtype=torch.int32).reshape(NUM_ROWS, NUM_COLUMNS)
    lens, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*sequences, strict=True))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    attention = PagedAttention(NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    attention.plan(table, lens, starts)
    slots = []
    for row, (length, count) in zip(table, sequences, strict=False):
        positions = torch.arange(length - count, length)
        slots.append(row[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
    x = torch.randn(int(starts[-1]), NUM_Q_HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(len(sequences)))
    return x, torch.cat(slots), attention.pack()


def run(model, pool, sequences):
    """Run one step."""
    x, slot_mapping, plan = inputs(sequences)
    with torch.inference_mode():
        return model(x, pool, slot_mapping, plan)


def peak_bytes(work):
    """Return the most memory that the process held while it did something."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    kept = work()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    del kept
    return int(status["VmHWM"].split()[0]) << 10


def report(layout):
    """Return what compiling did, for one layout of the pool."""
    sizes = (NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
    tables = {"max_num_seqs": NUM_ROWS, "max_blocks_per_seq": NUM_COLUMNS}
    eager_pool, pool = (KVCache(*sizes, layout=layout, **tables).pool.zero_() for _ in range(2))
    torch.manual_seed(0)
    model = Model().eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    differences = [(run(model, eager_pool, COMPILED) - run(compiled, pool, COMPILED)).abs().max().item()]
    with torch.compiler.set_stance("fail_on_recompile"):
        for sequences in OTHERS:
            want, got = run(model, eager_pool, sequences), run(compiled, pool, sequences)
            differences.append((want - got).abs().max().item())
        return {
            "differences": differences,
            "same_cache": torch.allclose(eager_pool, pool, atol=1e-5),
            "pool_bytes": pool.nbytes,
            "eager_bytes": peak_bytes(lambda: run(model, pool, COMPILED)),
            "compiled_bytes": peak_bytes(lambda: run(compiled, pool, COMPILED)),
            "clone_bytes": peak_bytes(pool.clone),
        }


if __name__ == "__main__":
    json.dump({layout: report(layout) for layout in sys.argv[1:]}, sys.stdout)
