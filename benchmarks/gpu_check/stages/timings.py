"""How fast attention is: cold caches, graphs replayed, medians of 30; beside a device copy and torch's attention.

A graph holds one run over each of several layers, together many times the second-level cache, so that no layer finds
its keys there. What is reported is the time of a replay by the number of its runs.
"""

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import lines
from gpu_check.runner import write_result
from gpu_check.stages.shapes import PagedBatch, Shape

REPLAYS = 30
WARM_UP_SECONDS = 0.3  # until the clock has risen
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
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(num_runs):  # before it is captured: kernels are loaded, memory is taken
            run(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(num_runs):
            run(number)
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_UP_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    # All are launched before the first one is waited for, so that the device is never idle between two of them.
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    graph.replay()
    for begin, end in pairs:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 / num_runs for begin, end in pairs]


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


def attempted(function: Callable[..., list[float]], *arguments: Any) -> tuple[list[float] | None, str]:
    """Call a function as `measured` does; return None, and why, where it fails."""
    try:
        return measured(function, *arguments), ""
    except Exception as error:
        traceback.print_exc()
        return None, f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Timed:
    """A line: a shape, and its figure by the seconds of a run."""

    what: str
    unit: str
    shape: Shape
    figure: Callable[[float], float]
    better: lines.Better
    of_copy: bool = False
    beside_torch: bool = True


TIMED = (
    Timed("decode_bf16_32x4096", "GB/s", DECODE, lambda s: DECODE.bytes_moved / s / 1e9, "higher", of_copy=True),
    Timed(
        "decode_fp8_32x4096",
        "GB/s",
        DECODE_FP8,
        lambda s: DECODE_FP8.bytes_moved / s / 1e9,
        "higher",
        of_copy=True,
        beside_torch=False,
    ),
    Timed("decode_bf16_1x8192", "us", LONG, lambda s: s * 1e6, "lower"),
    Timed("prefill_bf16_4x4096", "TFLOP/s", PREFILL, lambda s: PREFILL.flops / s / 1e12, "higher"),
)


def add_line(report: lines.Report, timed: Timed, copy: list[float] | None) -> tuple[float | None, bool]:
    """Add a line, ours before torch is timed; return our seconds, if any, and whether nothing failed."""
    seconds, reason = attempted(time_ours, timed.shape)
    if seconds is None:
        report.refuse(timed.what, timed.unit, reason, better=timed.better)
        return None, False
    median = statistics.median(seconds)
    fields: dict[str, Any] = {"kv_bytes": timed.shape.kv_bytes, "us": median * 1e6}
    if timed.of_copy and copy is not None:
        fields |= {"limit": statistics.median(copy) / 1e9, "limit_name": "device copy"}
    ours = [timed.figure(each) for each in seconds]
    line = report.add(timed.what, timed.unit, ours, better=timed.better, **fields)
    write_result(lines=report.lines)  # even if torch takes the process down
    if not timed.beside_torch:
        return median, True
    of_torch, reason = attempted(time_torch, timed.shape)
    if of_torch is None:
        line["peer_refused"] = reason
        return median, False
    peer = statistics.median(timed.figure(each) for each in of_torch)
    ratio = lines.times_better(line["ours"], peer, timed.better)
    line |= {"peer": peer, "peer_name": "torch SDPA", "ratio": ratio}
    return median, True


def measure(report: lines.Report) -> bool:
    """Add all lines to a report; return whether nothing failed."""
    copy, reason = attempted(copy_rate)
    if copy is None:
        report.refuse("device_copy", "GB/s", reason, better="higher")
    else:
        report.add("device_copy", "GB/s", [rate / 1e9 for rate in copy], better="higher")
    outcomes, medians = [copy is not None], {}
    for timed in TIMED:
        medians[timed.what], is_good = add_line(report, timed, copy)
        outcomes.append(is_good)
    bf16, fp8 = medians["decode_bf16_32x4096"], medians["decode_fp8_32x4096"]
    if bf16 is not None and fp8 is not None:
        report.add("decode_fp8_over_bf16", "x", bf16 / fp8, better="higher")
    return all(outcomes)


def main() -> int:
    """Measure, and write what there is even where the rest fails."""
    report = lines.Report("gpu_check")
    try:
        is_good = measure(report)
    finally:
        write_result(lines=report.lines)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
