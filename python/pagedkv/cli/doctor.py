"""`pagedkv doctor`: what is installed, what the machine has, and whether the parts work together."""

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from pagedkv.attention import paged_attention
from pagedkv.config import CacheConfig, GroupSpec, SchedulerConfig
from pagedkv.kv_cache import KVCache
from pagedkv.reference import paged_attention as reference_attention
from pagedkv.scheduling import Scheduler

_EXTRAS = {
    "torch": ["torch"],
    "hf": ["torch", "transformers", "accelerate", "gguf"],
    "server": ["starlette", "uvicorn", "pydantic", "prometheus_client"],
    "cuda13": ["cupy"],
    "bench": ["rich"],
    "viz": ["rich", "matplotlib"],
}
_PACKAGES = ("numpy", "torch", "transformers", "gguf", "cupy-cuda13x", "cupy-cuda12x", "starlette", "uvicorn")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = "Say what is installed, what the machine has, and whether the parts work together."


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the status is 1 where a check fails."""
    for name, found in _facts():
        _say(f"{name:<16} {found}")
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        state = "installed" if not missing else f'lacks {", ".join(missing)}: pip install "pagedkv[{extra}]"'
        _say(f"extra {extra:<10} {state}")
    failures = 0
    for name, check in _CHECKS.items():
        try:
            outcome = check()
        except Exception as error:
            failures += 1
            outcome = f"FAILED: {type(error).__name__}: {error}"
        _say(f"check {name:<10} {outcome}")
    return 1 if failures else 0


def _facts() -> list[tuple[str, str]]:
    from pagedkv._core import default_num_threads, instruction_sets

    facts = [
        ("pagedkv", _version("pagedkv")),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("cpu", f"{os.cpu_count()} cores, kernels for {', '.join(instruction_sets())}"),
        ("threads", str(default_num_threads())),
    ]
    facts += [(package, _version(package)) for package in _PACKAGES]
    if importlib.util.find_spec("torch") is not None:
        import torch

        from pagedkv.models.dtypes import has_bf16_product

        bf16 = "yes" if has_bf16_product() else "no: float32 is faster here"
        facts += [("bf16 product", bf16), ("torch threads", str(torch.get_num_threads()))]
    facts.append(("gpu", _gpu()))
    return facts


def _gpu() -> str:
    if importlib.util.find_spec("cupy") is None:
        return 'not looked for: pip install "pagedkv[cuda13]"'
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(number)["name"].decode() for number in range(count)]
        return ", ".join(names) or "none"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"none: {error}"


def _check_scheduler() -> str:
    scheduler = Scheduler(CacheConfig(16, 4), SchedulerConfig(4, 64, 64))
    scheduler.add_request("a", np.arange(10, dtype=np.int32), max_tokens=4, n=3)
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        scheduler.commit(plan, [1] * plan.num_samples)
    scheduler.check_integrity()
    if scheduler.usage:
        raise RuntimeError(f"expected no block held after the last request, found usage {scheduler.usage}")
    return "ok: three samples shared a prompt, and every block came back"


def _check_attention() -> str:
    config = CacheConfig(8, 4, groups=[GroupSpec(1, 2, 16, "float32")])
    cache = KVCache.from_config(config, SchedulerConfig(2, 64, 16), backend="numpy")
    generator = np.random.default_rng(0)
    lengths, slots = np.array([7], np.int32), np.arange(4, 11, dtype=np.int64)
    k, v = (generator.standard_normal((7, 2, 16), dtype=np.float32) for _ in range(2))
    cache.append_kv(0, k, v, slots)
    q = generator.standard_normal((1, 4, 16), dtype=np.float32)
    table, starts = np.array([[1, 2]], np.int32), np.array([0, 1], np.int32)
    k_cache, v_cache = cache.layer(0)
    found = np.asarray(paged_attention(q, k_cache, v_cache, table, lengths, starts))
    expected = reference_attention(q, np.asarray(k_cache), np.asarray(v_cache), table, lengths, starts)
    error = float(np.abs(found - np.asarray(expected)).max())
    if error > 1e-5:
        raise RuntimeError(f"expected the result of the reference, found a difference of {error:.2g}")
    return f"ok: differs from the reference by {error:.1g}"


_CHECKS: dict[str, Callable[[], str]] = {"scheduler": _check_scheduler, "attention": _check_attention}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
