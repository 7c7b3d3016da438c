"""How fast attention is: cold caches, graphs replayed, medians of 30; beside a device copy and torch's attention.

A graph holds one run over each of several layers, together many times the second-level cache, so that no layer finds
its keys there. What is reported is the time of a replay by the number of its runs.
"""

import gc
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import lines
from gpu_check.runner import write_result
from gpu_check.stages.shapes import PagedBatch, Shape

REPLAYS = 30
COPY_BYTES = 1 << 30
LARGEST_ERROR = 0.02

DECODE = Shape(32, 4096)
DECODE_FP8 = Shape(32, 4096, dtype="float8_e4m3fn")
LONG = Shape(1, 8192, num_q_heads=64, num_layers=16)
PREFILL = Shape(4, 4096, num_queries=4096, num_layers=2)


class WrongResultError(Exception):
    """What is to be timed does not compute what it should."""


def time_runs(run: Callable[[int], object], num_runs: int, replays: int = REPLAYS) -> list[float]:
    """Return the seconds of a run, once for each replay of a graph that holds all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(num_runs):  # before it is captured: kernels are loaded, memory is taken
            run(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(num_runs):
            run(number)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graph.replay()
    seconds = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / num_runs)
    return seconds


def copy_rate() -> list[float]:
    """Return the bytes per second, read and written, of a copy within the device."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    return [2 * COPY_BYTES / seconds for seconds in time_runs(lambda _: target.copy_(source), 2)]


def time_ours(shape: Shape) -> list[float]:
    """Check our attention, then time it."""
    batch = PagedBatch(shape, "cuda")
    error = batch.error(shape.num_layers - 1)
    if not error < LARGEST_ERROR:
        raise WrongResultError(f"{shape}: expected torch's result, found one that is off by {error:.2%}")
    return time_runs(batch.run, shape.num_layers)


def time_torch(shape: Shape) -> list[float]:
    """Time torch's attention over the same keys and values, in one piece per sequence."""
    batch = PagedBatch(shape, "cuda")
    arrays = [batch.dense(layer, slice(None)) for layer in range(shape.num_layers)]
    arrays = [tuple(array.contiguous() for array in of_layer) for of_layer in arrays]
    del batch
    causal = shape.num_queries > 1
    attention = torch.nn.functional.scaled_dot_product_attention
    return time_runs(lambda layer: attention(*arrays[layer], is_causal=causal, enable_gqa=True), shape.num_layers)


def measured(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with as much of the device's memory as there is."""
    gc.collect()
    torch.cuda.empty_cache()
    return function(*arguments)


def measure(report: lines.Report) -> None:
    """Add all lines to a report."""
    copy = measured(copy_rate)
    limit = statistics.median(copy)
    report.add("device_copy", "GB/s", [rate / 1e9 for rate in copy], better="higher")

    decode, decode_torch = measured(time_ours, DECODE), measured(time_torch, DECODE)
    report.add(
        "decode_bf16_32x4096",
        "GB/s",
        [DECODE.bytes_moved / seconds / 1e9 for seconds in decode],
        better="higher",
        peer=[DECODE.bytes_moved / seconds / 1e9 for seconds in decode_torch],
        peer_name="torch SDPA",
        limit=limit / 1e9,
        limit_name="device copy",
        kv_bytes=DECODE.kv_bytes,
        us=statistics.median(decode) * 1e6,
    )
    fp8 = measured(time_ours, DECODE_FP8)
    report.add(
        "decode_fp8_32x4096",
        "GB/s",
        [DECODE_FP8.bytes_moved / seconds / 1e9 for seconds in fp8],
        better="higher",
        limit=limit / 1e9,
        limit_name="device copy",
        kv_bytes=DECODE_FP8.kv_bytes,
        us=statistics.median(fp8) * 1e6,
    )
    report.add("decode_fp8_over_bf16", "x", statistics.median(decode) / statistics.median(fp8), better="higher")

    long, long_torch = measured(time_ours, LONG), measured(time_torch, LONG)
    report.add(
        "decode_bf16_1x8192",
        "us",
        [seconds * 1e6 for seconds in long],
        better="lower",
        peer=[seconds * 1e6 for seconds in long_torch],
        peer_name="torch SDPA",
        kv_bytes=LONG.kv_bytes,
    )
    prefill, prefill_torch = measured(time_ours, PREFILL), measured(time_torch, PREFILL)
    report.add(
        "prefill_bf16_4x4096",
        "TFLOP/s",
        [PREFILL.flops / seconds / 1e12 for seconds in prefill],
        better="higher",
        peer=[PREFILL.flops / seconds / 1e12 for seconds in prefill_torch],
        peer_name="torch SDPA",
        us=statistics.median(prefill) * 1e6,
    )


def main() -> int:
    """Measure, and write what there is even where the rest fails."""
    report = lines.Report("gpu_check")
    try:
        measure(report)
    finally:
        write_result(lines=report.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
