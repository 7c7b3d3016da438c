"""What this package adds to the paper: FP8, prefix caching on a trace, longest prefix first, tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.simulate import Workload, simulate
from pagedkv.simulate.experiment import Load, Run, make_cost_model
from pagedkv.simulate.machine import NUM_SLOTS, Machine
from pagedkv.simulate.paper.lines import Line
from pagedkv.simulate.paper.memory import Sources
from pagedkv.simulate.sustained import Search

# Blocks of the length that Mooncake's trace hashes, so that a hit is one of the trace's own.
TRACE_BLOCK = 512
TRACE_LONGEST = 131_072
POLICIES = ("fcfs", "priority", "fair")
CACHE_TOKENS = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000)
# A model like Llama 3 8B on four H100: 1,024 KV elements a layer in 32 layers of bfloat16.
LLAMA_8B: dict[str, Any] = {
    "bandwidth": 4 * 3.35e12,
    "flops": 4 * 989e12,
    "active_parameters": 8.03e9,
    "weight_bytes": 16.1e9,
    "kv_token_bytes": 131_072.0,
    "attention_width": 32.0 * 4096,
}


def fp8_searches(sources: Sources) -> dict[str, Search]:
    """Return the searches: the paper's pool, and one of as many bytes with half as many for each token."""
    load = Load(sources.sharegpt, seconds=1200.0)
    halved = {"per_context_token": 0.315e-6, "per_copied_token": 0.63e-6}
    machine = Machine(2 * NUM_SLOTS, token_bytes=409_600)
    return {
        "float16": Search(Run(load, "pagedkv"), 2.2),
        "fp8": Search(Run(load, "pagedkv", machine, ("fitted", halved)), 3.0),
    }


def fp8(found: dict[str, float]) -> list[Line]:
    """Return how many times the rate is sustained with FP8."""
    ratio = found["fp8"] / found["float16"]
    note = "twice the tokens in the pool, half the bytes to read; scales, some thousandths, left out"
    return [Line("fp8_rate", "times the rate", ratio, note=note, details={**found})]


def trace_upper_bound(workload: Workload, block_size: int = TRACE_BLOCK) -> float:
    """Return the share of prompt tokens in whole blocks that came before, if nothing were ever forgotten."""
    seen: set[int] = set()
    hits = total = 0
    for index in range(len(workload)):
        prompt = workload.prompt(index)
        total += len(prompt)
        known = True
        # The last token of a prompt is always computed.
        for start in range(0, len(prompt) - block_size + 1, block_size):
            block = hash(prompt[start : start + block_size].tobytes())
            known = known and block in seen and start + block_size < len(prompt)
            hits += block_size * known
            seen.add(block)
    return hits / total


def run_trace(task: tuple[Path, int, str, str]) -> dict[str, float]:
    """Run Mooncake's trace on a cache of so many tokens, with an order of requests and an order of eviction."""
    path, tokens, policy, eviction = task
    workload = Workload.read_jsonl(path)
    machine = Machine(
        tokens,
        TRACE_BLOCK,
        TRACE_LONGEST,
        16_384,
        256,
        token_bytes=131_072,
        host_bytes=0,
        enable_prefix_caching=True,
        policy=policy,
        eviction_policy=eviction,
    )
    configs = machine.cache_config(), machine.scheduler_config("pagedkv")
    simulation = simulate(workload, "pagedkv", *configs, make_cost_model(("roofline", LLAMA_8B)))
    first = simulation.first_token - workload.arrivals
    return {
        "hit_rate": float(simulation.cached_tokens.sum()) / float(workload.prompt_tokens.sum()),
        "first_token_mean": float(first.mean()),
        "first_token_p99": float(np.quantile(first, 0.99)),
        "seconds": simulation.seconds,
    }


def trace_tasks(path: Path) -> list[tuple[Path, int, str, str]]:
    """Return the runs of the trace."""
    tasks = [(path, tokens, "fcfs", "lru") for tokens in CACHE_TOKENS]
    tasks += [(path, CACHE_TOKENS[1], "fcfs", "slru"), (path, CACHE_TOKENS[1], "lpm", "lru")]
    return tasks


def trace_lines(tasks: list[tuple[Path, int, str, str]], found: list[dict[str, float]], bound: float) -> list[Line]:
    """Return the hit rates, and times to the first token."""
    lines = []
    for (_, tokens, policy, eviction), figures in zip(tasks, found, strict=True):
        ending = "" if (policy, eviction) == ("fcfs", "lru") else f"_{policy if policy != 'fcfs' else eviction}"
        what = f"mooncake_{tokens // 1_000_000}m{ending}"
        details = {"upper_bound": 100 * bound, **figures}
        note = "share of the trace's own upper bound: " + f"{figures['hit_rate'] / bound:.1%}"
        lines.append(Line(what, "% of the prompt tokens", 100 * figures["hit_rate"], note=note, details=details))
    return lines


def run_tenants(policy: str) -> dict[str, float]:
    """Run a tenant that sends bursts of long work beside one that talks, in an order of requests."""
    talking = Workload.sharegpt(1800, 1.0, seed=1)
    rng = np.random.default_rng(2)
    bursts = np.repeat(np.arange(6) * 300.0 + 30.0, 100)
    prompts = np.concatenate([talking.prompt_tokens, rng.integers(500, 1000, bursts.size)])
    answers = np.concatenate([talking.output_tokens, rng.integers(100, 400, bursts.size)])
    arrivals = np.concatenate([talking.arrivals, bursts])
    order = np.argsort(arrivals, kind="stable")
    is_burst = np.concatenate([np.zeros(len(talking), bool), np.ones(bursts.size, bool)])[order]
    lengths = prompts[order].astype(np.int32), answers[order].astype(np.int32)
    workload = Workload.from_lengths(*lengths, arrivals[order].tolist())
    workload = workload.with_tenants((1 + is_burst).astype(np.int32), is_burst.astype(np.int32))
    machine = Machine(policy=policy)
    configs = machine.cache_config(), machine.scheduler_config("pagedkv")
    simulation = simulate(workload, "pagedkv", *configs)
    first = simulation.first_token - workload.arrivals
    return {
        "talk_first_token_p99": float(np.quantile(first[~is_burst], 0.99)),
        "talk_first_token_mean": float(first[~is_burst].mean()),
        "burst_first_token_mean": float(first[is_burst].mean()),
        "seconds": simulation.seconds,
    }


def tenants(found: dict[str, dict[str, float]]) -> list[Line]:
    """Return how long the tenant that talks waits for its first tokens, by the order of requests."""
    note = "100 long requests at once every five minutes from one tenant, one short one a second from the other"
    return [
        Line(f"tenants_{policy}", "s", figures["talk_first_token_p99"], note=note, better="lower", details=figures)
        for policy, figures in found.items()
    ]
