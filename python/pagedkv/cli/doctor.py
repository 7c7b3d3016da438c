"""`pagedkv doctor`: what is installed, what the machine has, and whether the parts work together."""

import argparse
import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from pagedkv.attention import paged_attention
from pagedkv.cli.engine_arguments import positive
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
    parser.add_argument(
        "--timeout", type=positive, default=60, metavar="SECONDS", help="longest that one look or check may take (60)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the status is 1 where a check fails."""
    for name, look in _FACTS.items():
        _say(f"{name:<16} {_outcome(look, arguments.timeout)[0]}")
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        state = "installed" if not missing else f'lacks {", ".join(missing)}: pip install "pagedkv[{extra}]"'
        _say(f"extra {extra:<10} {state}")
    failures = 0
    for name, check in _CHECKS.items():
        outcome, has_failed = _outcome(check, arguments.timeout)
        failures += has_failed
        _say(f"check {name:<10} {outcome}")
    return 1 if failures else 0


def _outcome(work: Callable[[], str], seconds: float) -> tuple[str, bool]:
    """Return what came of some work, and whether it failed; what takes too long is left to itself.

    Drivers may hang, and on a busy machine an import takes minutes: what follows is told all the same.
    """
    found: list[tuple[str, bool]] = []

    def run() -> None:
        try:
            found.append((work(), False))
        except Exception as error:
            found.append((f"FAILED: {type(error).__name__}: {error}", True))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else (f"FAILED: not done after {seconds} s; is the machine busy? --timeout", True)


def _cpu() -> str:
    from pagedkv._core import instruction_sets

    return f"{os.cpu_count()} cores, kernels for {', '.join(instruction_sets())}"


def _threads() -> str:
    from pagedkv._core import default_num_threads

    return str(default_num_threads())


def _bf16_product() -> str:
    if importlib.util.find_spec("torch") is None:
        return 'not looked for: pip install "pagedkv[torch]"'
    from pagedkv.models.dtypes import has_bf16_product

    return "yes" if has_bf16_product() else "no: float32 is faster here"


def _torch_threads() -> str:
    if importlib.util.find_spec("torch") is None:
        return 'not looked for: pip install "pagedkv[torch]"'
    import torch

    return str(torch.get_num_threads())


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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


_FACTS: dict[str, Callable[[], str]] = {
    "pagedkv": partial(_version, "pagedkv"),
    "python": lambda: f"{platform.python_version()} on {platform.platform()}",
    "cpu": _cpu,
    "threads": _threads,
    **{package: partial(_version, package) for package in _PACKAGES},
    "bf16 product": _bf16_product,
    "torch threads": _torch_threads,
    "gpu": _gpu,
}
_CHECKS: dict[str, Callable[[], str]] = {"scheduler": _check_scheduler, "attention": _check_attention}
