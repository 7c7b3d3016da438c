"""vLLM's CPU attention kernel on one layer after the other, kept waiting by `bench_attention.py` for its turns.

usage: python vllm_cpu_attention.py        in the environment that vllm_env.sh builds

It writes {"peer"} when it is ready, then answers lines of JSON:

{"prepare": "attention" or "append", "copies", "sources", "num_seqs", "seq_len", "num_q_heads", "num_kv_heads",
 "head_dim", "dtype", "q_dtype", "num_queries", "threads"} -> {"kernels": [names], "refused": null or why there is none}
{"run": name, "count": n}                          -> {"samples": [n times in seconds]}

A kernel goes by vLLM's name of an instruction set. The first is the one that vLLM chooses for itself on this machine
("amx" where there is one), then comes "vec"; both have blocks of 32 tokens, which vLLM asks for. Each has been run
in every layer. The plan (`cpu_attn_get_scheduler_metadata`) is made once per preparation, outside of what is timed.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
import vllm._custom_ops as ops
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from attention.turns import stopwatch

BLOCK_SIZE = 32
FP8 = "float8_e4m3fn"
Run = Callable[[int], None]
Timed = Callable[[int], list[float]]


class Layers:
    """Keys and values of several layers in shuffled blocks, as vLLM's backend lays them out."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self.sizes = sizes
        self.fp8 = sizes["dtype"] == FP8
        self.dtype = getattr(torch, sizes["q_dtype"])
        self.cache_dtype = "fp8" if self.fp8 else "auto"
        self.heads, self.head_dim = sizes["num_kv_heads"], sizes["head_dim"]
        per_seq = -(-sizes["seq_len"] // BLOCK_SIZE)
        num_blocks = sizes["num_seqs"] * per_seq
        self.layers = [self._layer(num_blocks) for _ in range(sizes["copies"])]
        self.table = torch.randperm(num_blocks, dtype=torch.int32).view(sizes["num_seqs"], per_seq).contiguous()

    def _layer(self, num_blocks: int) -> tuple[torch.Tensor, ...]:
        kv = torch.empty(num_blocks, self.heads, BLOCK_SIZE * 2, self.head_dim, dtype=self.dtype)
        random = torch.randn(1 << 22).to(self.dtype)
        for part in kv.view(-1).split(len(random)):
            part.copy_(random[: len(part)])
        kv = kv.to(torch.float8_e4m3fn).view(torch.uint8) if self.fp8 else kv
        return kv.chunk(2, dim=2)

    def kernels(self) -> list[str]:
        own = _get_attn_isa(self.dtype, BLOCK_SIZE, self.head_dim, self.cache_dtype)
        return list(dict.fromkeys([own, "vec"]))

    def attention(self, kernel: str) -> Run:
        sizes = self.sizes
        num_seqs, queries, heads = sizes["num_seqs"], sizes["num_queries"], sizes["num_q_heads"]
        query = torch.randn(num_seqs * queries, heads, self.head_dim).to(self.dtype)
        out = torch.empty_like(query)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * queries
        lens = torch.full((num_seqs,), sizes["seq_len"], dtype=torch.int32)
        shape = (num_seqs, heads, self.heads, self.head_dim, lens, self.dtype, starts, True, -1, kernel, True, None)
        plan = ops.cpu_attn_get_scheduler_metadata(*shape, self.cache_dtype)
        scale = 1 / math.sqrt(self.head_dim)
        rest = (starts, lens, scale, True, None, -1, self.table, 0.0, plan, None, None, 1.0, 1.0, self.cache_dtype)

        def run(number: int) -> None:
            k_cache, v_cache = self.layers[number % len(self.layers)]
            ops.cpu_attention_with_kv_cache(query, k_cache, v_cache, out, *rest)

        return run

    def append(self, kernel: str) -> Run:
        sizes = self.sizes
        seq_len, num_queries = sizes["seq_len"], sizes["num_queries"]
        positions = torch.arange(seq_len % num_queries, seq_len).split(num_queries)
        blocks = self.table.long()
        slots = [(blocks[:, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE).flatten() for p in reversed(positions)]
        shape = (sizes["sources"], 2, len(slots[0]), self.heads, self.head_dim)
        sources = torch.randn(shape).to(self.dtype)

        def run(number: int) -> None:
            turn, layer = divmod(number, len(self.layers))
            source, places = sources[number % len(sources)], slots[turn % len(slots)]
            ops.cpu_attn_reshape_and_cache(*source, *self.layers[layer], places, kernel)

        return run


def prepare(sizes: dict[str, Any]) -> tuple[dict[str, Timed], str | None]:
    """Make the kernels of some work and run each once; say why there is none."""
    torch.set_num_threads(sizes["threads"])
    torch.manual_seed(0)
    prepared: dict[str, Timed] = {}
    refused = None
    try:
        layers = Layers(sizes)
        for kernel in layers.kernels():
            run = layers.attention(kernel) if sizes["prepare"] == "attention" else layers.append(kernel)
            for number in range(len(layers.layers)):
                run(number)
            prepared[f"vllm {vllm.__version__} ({kernel}, block {BLOCK_SIZE})"] = stopwatch(run)
    except (NotImplementedError, RuntimeError) as error:
        refused = str(error).splitlines()[0]
    return prepared, refused


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    CpuPlatform.import_kernels()
    torch.cpu._init_amx()  # the system's permission, without which AMX is illegal; a model's products ask for it too
    say({"peer": f"vllm {vllm.__version__}"})
    prepared: dict[str, Timed] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "prepare" in question:
            prepared.clear()
            prepared, refused = prepare(question)
            say({"kernels": list(prepared), "refused": refused})
            continue
        say({"samples": prepared[question["run"]](question["count"])})


if __name__ == "__main__":
    main()
