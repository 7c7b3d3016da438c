"""The peers: torch's attention on contiguous keys and values, and vLLM's kernel in an environment of its own."""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from attention.table import Shape
from attention.turns import Turn, stopwatch
from attention.work import fill
from program import ROOT, Program

SDPA = "torch SDPA, contiguous"
CYCLE_BYTES = 1 << 30  # what a peer goes around in: together more than a cache holds
READ_BYTES = 1 << 29


def num_copies(kv_bytes: int) -> int:
    """Return how many layers a peer goes around in."""
    return max(1, math.ceil(CYCLE_BYTES / kv_bytes))


def num_sources(shape: Shape) -> int:
    """Return how many arrays of new keys and values are appended in turn, together more than a cache holds too."""
    return max(1, math.ceil(CYCLE_BYTES / (shape.num_seqs * shape.num_queries * shape.token_bytes)))


def sdpa(shape: Shape, dtype: str) -> Callable[[int], object]:
    """Return torch's attention over keys and values of a shape that lie contiguously, one copy after the other."""
    element = getattr(torch, dtype)
    sizes = (num_copies(shape.kv_bytes), 2, shape.num_seqs, shape.num_kv_heads, shape.seq_len, shape.head_dim)
    copies = torch.empty(sizes, dtype=element)
    fill(copies)
    q = torch.randn(shape.num_seqs, shape.num_q_heads, shape.num_queries, shape.head_dim).to(element)
    attention = torch.nn.functional.scaled_dot_product_attention
    is_causal = shape.num_queries > 1
    return lambda number: attention(q, *copies[number % len(copies)], is_causal=is_causal, enable_gqa=True)


def read() -> Callable[[int], object]:
    """Return torch's sum of a large array, of `READ_BYTES`: the plain read of the recipe that the peers come from."""
    array = torch.ones(READ_BYTES // 4)
    return lambda _: array.sum()


def product(dtype: str, size: int = 2048) -> Callable[[int], object]:
    """Return torch's product of two matrices, of `2 * size**3` floating-point operations."""
    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
    return lambda _: a @ b


class VLLM:
    """vLLM's kernel for the CPU: what it would choose on this machine, and the one of the recipe beside it."""

    def __init__(self, environment: Path) -> None:
        program = ROOT / "benchmarks" / "peers" / "vllm_cpu_attention.py"
        self._program = Program([environment / "bin" / "python", program], {**os.environ, "VLLM_TARGET_DEVICE": "cpu"})
        self._program.read("start")

    def turns(self, work: str, shape: Shape, count: int) -> tuple[list[Turn], str | None]:
        """Make ready for attention or appending; answer turns, vLLM's own choice first, and why there are none."""
        copies = num_copies(shape.kv_bytes)
        counts = {"copies": copies, "sources": num_sources(shape)}
        answer = self._ask({"prepare": work, **counts, **dataclasses.asdict(shape), "q_dtype": shape.q_dtype})
        return [self._turn(name, count) for name in answer["kernels"]], answer["refused"]

    def _turn(self, name: str, count: int) -> Turn:
        return Turn(name, lambda count: self._ask({"run": name, "count": count})["samples"], count)

    def _ask(self, question: dict[str, object]) -> dict[str, list[float]]:
        return self._program.ask(json.dumps(question))

    def close(self) -> None:
        self._program.close()


def torch_turn(name: str, run: Callable[[int], object], count: int = 1) -> Turn:
    """Return the turn of something that this process runs."""
    return Turn(name, stopwatch(run), count)
