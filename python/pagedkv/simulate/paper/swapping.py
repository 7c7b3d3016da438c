"""Figure 19 of the paper: swapping against computing again, over block sizes."""

from pagedkv.simulate.experiment import Load, Run, make_cost_model
from pagedkv.simulate.machine import Machine
from pagedkv.simulate.paper.lines import Line
from pagedkv.simulate.paper.memory import Sources

# The artifact's microbenchmark: 256 tokens, out and in again, or computed as a prompt.
NUM_TOKENS = 256
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Assumed, for neither is in the paper: PCIe 4.0 x16 at 80 %, and what one asynchronous copy costs beside its bytes.
BANDWIDTH = 25e9
COPY_SECONDS = 7e-6


def swap_seconds(block_size: int, copies_per_block: int, copy_seconds: float = COPY_SECONDS) -> float:
    """Return the seconds of 256 tokens on their way to the host and back."""
    machine = Machine(block_size=block_size)
    num_blocks = NUM_TOKENS / block_size
    one_way = num_blocks * copies_per_block * copy_seconds + NUM_TOKENS * machine.token_bytes / BANDWIDTH
    return 2 * one_way


def recompute_seconds() -> float:
    """Return the seconds in which 256 tokens are computed as a prompt."""
    return make_cost_model(("fitted", {})).step_seconds(1, 0, NUM_TOKENS)


def microbenchmark() -> list[Line]:
    """Return both over block sizes: copies layer by layer as the paper makes them, and one copy for each block."""
    again = recompute_seconds()
    lines = []
    layered = {size: swap_seconds(size, 80) for size in BLOCK_SIZES}
    spans = {size: swap_seconds(size, 1) for size in BLOCK_SIZES}
    for size in BLOCK_SIZES:
        details = {"swap_layered_ms": 1e3 * layered[size], "recompute_ms": 1e3 * again}
        note = "one copy for each block, beside 80 layer by layer, and computing again"
        what = f"swap_block_{size}"
        lines.append(Line(what, "ms", 1e3 * spans[size], note=note, better="lower", details=details))
    slower = [size for size in BLOCK_SIZES if layered[size] > again]
    crossover = float(max(slower)) if slower else 0.0
    must = "crossover shown"
    note = "largest block size at which copies layer by layer are slower than computing again"
    lines.append(Line("swap_crossover", "tokens per block", crossover, note=note, must_reach=must))
    flat = max(spans.values()) / min(spans.values())
    must = "flat: at most 1.25x"
    note = "slowest over fastest block size, one copy for each block"
    bounds = (1.0, 1.25)
    lines.append(Line("swap_flat", "times", flat, between=bounds, better="lower", must_reach=must, note=note))
    steep = max(layered.values()) / min(layered.values())
    lines.append(Line("swap_layered_steep", "times", steep, note="the same for 80 copies", better="lower"))
    return lines


def end_to_end_runs(sources: Sources) -> dict[tuple[str, str, int], Run]:
    """Return the runs: ShareGPT at 2.01 requests a second, as the artifact has it, preempted one way or the other."""
    runs = {}
    load = Load(sources.sharegpt, 2.01, 1800.0)
    for size in (8, 16, 32, 64, 128):
        for mode in ("recompute", "swap"):
            machine = Machine(block_size=size)
            runs["vllm", mode, size] = Run(load, "vllm", machine, options={"preemption": mode})
            machine = Machine(block_size=size, preemption_mode=mode)
            runs["pagedkv", mode, size] = Run(load, "pagedkv", machine)
    return runs


def end_to_end(found: dict[tuple[str, str, int], dict[str, float]]) -> list[Line]:
    """Return normalized latency with swapping over that with computing again."""
    lines = []
    for (system, mode, size), figures in found.items():
        if mode == "swap":
            again = found[system, "recompute", size]
            ratio = figures["normalized_latency"] / again["normalized_latency"]
            what = f"swap_end_to_end_{size}" + ("" if system == "vllm" else "_pagedkv")
            note = "latency with swapping over latency with computing again; about equal from 16 to 64 in the paper"
            details = {
                "swap": figures["normalized_latency"],
                "recompute": again["normalized_latency"],
                "swapped": figures["swapped"],
                "recomputed": again["recomputed"],
            }
            lines.append(Line(what, "times", ratio, note=note, better="lower", details=details))
    return lines
