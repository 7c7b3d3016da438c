"""vLLM's own scheduler on one core, the model replaced by a constant token; one JSON line per workload.

usage: python vllm_scheduler.py [WORKLOAD ...]        in the environment that vllm_env.sh builds

Without names it reads them from standard input, one a line, and answers each when it comes: so `bench_scheduler.py`
keeps it waiting and asks before and after its own turn. A line is {"what", "peer", "samples"}: microseconds, per block
or request where the name says so, and for `life_2000` requests per second. `bench_scheduler.py` documents the work.
Block size 16, the cache of Llama 3 8B, prefix caching on with vLLM's default hash.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65536
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HASH = get_hash_fn_by_name("sha256")
Samples = list[float]


def make_scheduler(folder: str, max_num_seqs: int, num_blocks: int, budget: int = 8192) -> Scheduler:
    model = ModelConfig(model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(scheduler_config=limits, model_config=model, cache_config=cache)
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        block_size=BLOCK_SIZE,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )


def make_request(request_id: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=HASHER,
    )


def prompts(count: int, length: int, shared: int) -> list[list[int]]:
    rng = random.Random(0)
    head = [rng.randrange(100_000) for _ in range(shared)]
    return [head + [rng.randrange(100_000) for _ in range(length - shared)] for _ in range(count)]


def step(scheduler: Scheduler) -> tuple[float, float, SchedulerOutput]:
    """Run one step; return the seconds of `schedule` and of `update_from_output`, and the former's output."""
    start = time.perf_counter()
    out = scheduler.schedule()
    scheduled = time.perf_counter() - start
    ids = list(out.num_scheduled_tokens)
    computed = [scheduler.requests[i].num_computed_tokens >= scheduler.requests[i].num_tokens for i in ids]
    result = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=[[7] if is_computed else [] for is_computed in computed],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    start = time.perf_counter()
    scheduler.update_from_output(out, result)
    return scheduled, time.perf_counter() - start, out


def run_to_end(scheduler: Scheduler) -> None:
    while scheduler.has_unfinished_requests():
        step(scheduler)


def add(scheduler: Scheduler, request_id: str, prompt: list[int], max_tokens: int) -> float:
    """Build a request and add it; return the microseconds."""
    start = time.perf_counter()
    scheduler.add_request(make_request(request_id, prompt, max_tokens))
    return (time.perf_counter() - start) * 1e6


def mean_per_block(micros: Samples) -> Samples:
    """Return the mean of every 16 steps: one in sixteen takes a new block for each sequence."""
    return [sum(micros[i : i + BLOCK_SIZE]) / BLOCK_SIZE for i in range(0, len(micros) - BLOCK_SIZE + 1, BLOCK_SIZE)]


def steady_decode(folder: str, seats: int) -> Samples:
    scheduler = make_scheduler(folder, seats, seats * 48 + 64, budget=32768)
    for i, prompt in enumerate(prompts(seats, 512, 0)):
        add(scheduler, str(i), prompt, 160)
    samples = []
    while scheduler.has_unfinished_requests():
        scheduled, updated, out = step(scheduler)
        if out.total_num_scheduled_tokens == seats == len(out.num_scheduled_tokens):
            samples.append((scheduled + updated) * 1e6)
    return mean_per_block(samples)


def add_request_1024(folder: str) -> Samples:
    scheduler = make_scheduler(folder, 256, 100_000)
    first, *others = prompts(501, 1024, 768)
    add(scheduler, "first", first, 1)
    run_to_end(scheduler)
    return [add(scheduler, str(i), prompt, 16) for i, prompt in enumerate(others)]


def add_admit_1024(folder: str) -> Samples:
    samples = []
    first, *others = prompts(257, 1024, 768)
    for _ in range(5):
        scheduler = make_scheduler(folder, 256, 100_000, budget=256 * 1024)
        add(scheduler, "first", first, 1)
        run_to_end(scheduler)
        adding = sum(add(scheduler, str(i), prompt, 16) for i, prompt in enumerate(others))
        admitting, _, out = step(scheduler)
        assert len(out.num_scheduled_tokens) == 256
        samples.append((adding + admitting * 1e6) / 256)
    return samples


def life_2000(folder: str) -> Samples:
    scheduler = make_scheduler(folder, 256, 40_000)
    spent = sum(add(scheduler, str(i), prompt, 64) / 1e6 for i, prompt in enumerate(prompts(2000, 1024, 768)))
    while scheduler.has_unfinished_requests():
        scheduled, updated, _ = step(scheduler)
        spent += scheduled + updated
    return [2000 / spent]


def full_hit_32k(folder: str) -> Samples:
    scheduler = make_scheduler(folder, 4, 8192, budget=65536)
    prompt = prompts(1, 32768, 0)[0]
    samples = []
    for i in range(9):
        added = add(scheduler, str(i), prompt, 1)
        admitted, _, _ = step(scheduler)
        run_to_end(scheduler)
        samples.append(added + admitted * 1e6)
    return samples[1:]


def burst_256(folder: str) -> Samples:
    """Return how often the shared prefix was computed."""
    scheduler = make_scheduler(folder, 256, 4096, budget=65536)
    for i, prompt in enumerate(prompts(256, 8016, 8000)):
        add(scheduler, str(i), prompt, 1)
    num_computed = 0
    while scheduler.has_unfinished_requests():
        _, _, out = step(scheduler)
        starts = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        cached = out.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_tokens in out.num_scheduled_tokens.items():
            start = starts[request_id]
            num_computed += max(0, min(start + num_tokens, 8000) - start)
    return [num_computed / 8000]


def block_pool_cycles(folder: str) -> tuple[Samples, Samples]:
    pool = make_scheduler(folder, 4, 100_000).kv_cache_manager.block_pool
    allocated, freed = [], []
    for _ in range(300):
        start = time.perf_counter()
        blocks = pool.get_new_blocks(1024)
        middle = time.perf_counter()
        pool.free_blocks(reversed(blocks))
        freed.append((time.perf_counter() - middle) * 1e6 / 1024)
        allocated.append((middle - start) * 1e6 / 1024)
    return allocated, freed


def decode_slot(folder: str) -> Samples:
    seats = 1024
    scheduler = make_scheduler(folder, seats, seats * 48 + 64, budget=seats * 32)
    for i, prompt in enumerate(prompts(seats, 32, 0)):
        add(scheduler, str(i), prompt, 400)
    step(scheduler)
    manager, running, samples = scheduler.kv_cache_manager, list(scheduler.running), []
    for _ in range(64):
        start = time.perf_counter()
        for request in running:
            manager.allocate_slots(request, 1)
        samples.append((time.perf_counter() - start) * 1e6 / seats)
        for request in running:
            request.append_output_token_ids(7)
            request.num_computed_tokens += 1
    return mean_per_block(samples)


def block_hit(folder: str, num_blocks: int) -> Samples:
    """Return the time of `get_computed_blocks` per block of a hit of 1,024."""
    length = 1024 * BLOCK_SIZE
    scheduler = make_scheduler(folder, 4, num_blocks, budget=65536)
    work = prompts((num_blocks - 1) // 1025, length + 1, 0)
    for i, prompt in enumerate(work):
        add(scheduler, str(i), prompt, 1)
    run_to_end(scheduler)
    requests = [make_request(f"again {i}", prompt, 1) for i, prompt in enumerate(work)]
    samples = []
    for request in requests * (40 // len(requests) + 1):
        start = time.perf_counter()
        num_hit = scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        samples.append((time.perf_counter() - start) * 1e6 / 1024)
        assert num_hit == length
    return samples


WORKLOADS: dict[str, Callable[[str], Samples]] = {
    "steady_decode_256": lambda folder: steady_decode(folder, 256),
    "steady_decode_1024": lambda folder: steady_decode(folder, 1024),
    "add_request_1024": add_request_1024,
    "add_admit_1024": add_admit_1024,
    "life_2000": life_2000,
    "full_hit_32k": full_hit_32k,
    "burst_256": burst_256,
    "block_allocate": lambda folder: block_pool_cycles(folder)[0],
    "block_free": lambda folder: block_pool_cycles(folder)[1],
    "decode_slot": decode_slot,
    "block_hit_4k": lambda folder: block_hit(folder, 4096),
    "block_hit_100k": lambda folder: block_hit(folder, 100_000),
}


def answer(names: Iterable[str], folder: str) -> None:
    for name in names:
        line: dict[str, Any] = {"what": name, "peer": f"vllm {vllm.__version__}", "samples": WORKLOADS[name](folder)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    init_none_hash(HASH)
    HASHER = get_request_block_hasher(BLOCK_SIZE, HASH)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(MODEL, file)
        answer(sys.argv[1:] or (line.strip() for line in sys.stdin), folder)
