"""How each kind of line is measured: its turns, and what the samples say."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from attention import peers, turns
from attention.machine import Machine, available_bytes, page_bytes
from attention.table import BFLOAT16_SETS, Line, Shape
from attention.turns import Samples, Turn
from attention.work import MAX_LAYERS, Append, Attention, Calls, Copy, Pool, go_around, layers_that_fit, make_pool
from lines import Report
from pagedkv.exceptions import UnsupportedError

OURS, IN_BF16, NATURAL = "ours", "ours, bfloat16 cache", "ours, natural keys"
DEEP, FLAT = "deep", "flat"
TORCH_SUM = "torch sum"
COUNT = 3  # samples of a turn that takes milliseconds
NUM_COPIES = 64  # blocks that `copy_blocks` copies at once
NUM_CALLS = 1000  # of `run` in a sample that asks what one costs
SLACK_BYTES = 3 << 29  # left for all else
GIGA = 1e9
# What the machine allows, and the field of a line that says it.
LIMITS = {
    "read_1": "read_1thread_gb_s",
    "read_2": "read_gb_s",
    "copy_2": "memcpy_gb_s",
    "fma_1": "fma_1thread_gflop_s",
    "fma_2": "fma_gflop_s",
    "dot_2": "dot_gflop_s",
}


@dataclass
class Bench:
    """What all lines share."""

    machine: Machine
    vllm: peers.VLLM | None
    report: Report
    rounds: int
    any_machine: bool

    def samples(self, line_turns: Sequence[Turn]) -> tuple[Samples, dict[str, Any]]:
        """Take turns until they count; answer the samples and what every line says of the machine."""
        all_turns = [*line_turns, peers.torch_turn(TORCH_SUM, peers.read())]
        samples, counts = turns.measure(lambda: turns.take_turns(all_turns, self.rounds), any_machine=self.any_machine)
        sizes: dict[str, Any] = {"torch_sum_gb_s": median(rates(peers.READ_BYTES, samples[TORCH_SUM]))}
        sizes |= self.machine.facts() | {"counts": counts, "scaling": turns.scaling(samples)}
        sizes |= {field: median(samples[name]) / GIGA for name, field in LIMITS.items() if name in samples}
        return samples, sizes

    def vllm_turns(self, work: str, shape: Shape) -> tuple[list[Turn], dict[str, str]]:
        """Return the turns of vLLM's kernels, its own choice first, and why there are none."""
        if self.vllm is None:
            return [], {}
        kernels, refused = self.vllm.turns(work, shape, COUNT)
        return kernels, {"vllm_refused": refused} if refused else {}

    def layers(self, shape: Shape, num_pools: int = 1) -> int:
        """Return how many layers of a shape fit beside the peers' copies."""
        peer_bytes = 2 * peers.num_copies(shape.kv_bytes) * shape.kv_bytes
        return layers_that_fit(shape, (available_bytes() - peer_bytes - SLACK_BYTES) // num_pools)

    def describe(self, line: Line, shape: Shape, pool: Pool) -> dict[str, Any]:
        """Return the sizes of the work, and what it must reach."""
        must = line.must.get(self.machine.isa)
        sizes = dataclasses.asdict(shape) | {"block_size": pool.cache.block_size, "num_layers": pool.num_layers}
        sizes |= {"kv_bytes": shape.kv_bytes, "page_bytes": page_bytes(pool.address)}
        return sizes | {"must_reach": must.text() if must else None}


class Measure(Protocol):
    """Measures a line and adds it to the report."""

    def __call__(self, bench: Bench, line: Line) -> dict[str, Any]: ...


def rates(amount: float, seconds: Sequence[float]) -> list[float]:
    """Return billions per second."""
    return [amount / GIGA / sample for sample in seconds]


def plain_read(samples: Samples, turn: str) -> list[float]:
    """Return how many bytes per second were read, by our own reader or by torch's sum, whichever was faster."""
    ours, by_torch = samples[turn], [peers.READ_BYTES / seconds for seconds in samples[TORCH_SUM]]
    return max(ours, by_torch, key=median)


def share_by_round(ours: Sequence[float], limits: Sequence[float], rounds: int) -> float:
    """Return the share of the limit that is reached, of medians in each round.

    Two cores of a virtual machine read 1.7 times as fast in some minutes as in others: medians over a whole run may
    come from different ones.
    """
    taken = [
        [samples[i * len(samples) // rounds : (i + 1) * len(samples) // rounds] for i in range(rounds)]
        for samples in (ours, limits)
    ]
    return median(median(a) / median(b) for a, b in zip(*taken, strict=True))


def decode(bench: Bench, line: Line) -> dict[str, Any]:
    """Bytes of keys and values per second; operations where arithmetic is the limit."""
    shape = line.shape.raised()
    pool, ours = attention(shape, bench.layers(shape))
    kernels, refused = bench.vllm_turns("attention", shape)
    sdpa = peers.torch_turn(peers.SDPA, peers.sdpa(shape, shape.dtype))
    by_fma = bench.machine.isa in line.fma_limits
    limit = f"{'fma' if by_fma else 'read'}_{shape.threads}"
    limits = bench.machine.turns(limit, f"read_{shape.threads}")
    samples, sizes = bench.samples([ours, *kernels, sdpa, *limits])
    amount = shape.flops if by_fma else shape.kv_bytes
    most = samples[limit] if by_fma else plain_read(samples, limit)
    figures = {turn.name: rates(amount, samples[turn.name]) for turn in (ours, *kernels, sdpa)}
    sizes |= {"kv_gb_s": median(rates(shape.kv_bytes, samples[OURS]))}
    sizes |= {"gflop_s": median(rates(shape.flops, samples[OURS]))}
    ours_rates = figures.pop(OURS)
    return bench.report.add(
        line.what,
        "GFLOP/s" if by_fma else "GB/s",
        ours_rates,
        better="higher",
        **peer_of(figures, kernels[0].name if kernels else None),
        limit=median(most) / GIGA,
        of_limit=share_by_round(ours_rates, most, bench.rounds) * GIGA,
        limit_name="FMA peak" if by_fma else "plain read",
        **sizes,
        **refused,
        **bench.describe(line, shape, pool),
    )


def quantised(bench: Bench, line: Line) -> dict[str, Any]:
    """Time beside that of the same sequences in bfloat16; the limit is a plain read of the quantised bytes."""
    shape = line.shape.raised()
    natural = dataclasses.replace(shape, keys="natural")
    wide = dataclasses.replace(natural, dtype="bfloat16")
    num_layers = bench.layers(shape, 3 + (shape != natural))  # a layer in bfloat16 takes as much as two
    pool, ours = attention(shape, num_layers)
    compared = [ours, attention(wide, num_layers, IN_BF16)[1]]
    if shape != natural:
        compared.append(attention(natural, num_layers, NATURAL)[1])
    kernels, refused = bench.vllm_turns("attention", shape)
    samples, sizes = bench.samples([*compared, *kernels, *bench.machine.turns("read_2")])
    figures = {turn.name: [1e3 * second for second in samples[turn.name]] for turn in (*compared, *kernels)}
    read = plain_read(samples, "read_2")
    sizes |= {"kv_gb_s": median(rates(shape.kv_bytes, samples[OURS]))}
    return bench.report.add(
        line.what,
        "ms",
        figures.pop(OURS),
        better="lower",
        **peer_of(figures, IN_BF16),
        limit=1e3 * shape.kv_bytes / median(read),
        of_limit=share_by_round(rates(shape.kv_bytes, samples[OURS]), read, bench.rounds) * GIGA,
        limit_name="plain read",
        **sizes,
        **refused,
        **bench.describe(line, shape, pool),
    )


def packed(bench: Bench, line: Line) -> dict[str, Any]:
    """Bytes of keys and values per second, beside those where keys lie naturally."""
    shape = line.shape.raised()
    num_layers = bench.layers(shape, 2)
    pool, ours = attention(shape, num_layers)
    _, natural = attention(dataclasses.replace(shape, keys="natural"), num_layers, NATURAL)
    samples, sizes = bench.samples([ours, natural, *bench.machine.turns("read_2")])
    figures = {turn.name: rates(shape.kv_bytes, samples[turn.name]) for turn in (ours, natural)}
    read = plain_read(samples, "read_2")
    return bench.report.add(
        line.what,
        "GB/s",
        figures.pop(OURS),
        better="higher",
        **peer_of(figures, NATURAL),
        limit=median(read) / GIGA,
        of_limit=share_by_round(rates(shape.kv_bytes, samples[OURS]), read, bench.rounds) * GIGA,
        limit_name="plain read",
        gflop_s=median(rates(shape.flops, samples[OURS])),
        **sizes,
        **bench.describe(line, shape, pool),
    )


def prefill(bench: Bench, line: Line) -> dict[str, Any]:
    """Operations per second of a prompt that sees itself; the limit is the matrix product that torch is best at."""
    shape = line.shape
    pool, ours = attention(shape, MAX_LAYERS)
    kernels, refused = bench.vllm_turns("attention", shape)
    sdpa = peers.torch_turn(peers.SDPA, peers.sdpa(shape, shape.dtype))
    in_float32 = peers.torch_turn(f"{peers.SDPA}, float32", peers.sdpa(shape, "float32"))
    products = [peers.torch_turn(f"torch {dtype} product", peers.product(dtype)) for dtype in ("bfloat16", "float32")]
    limit = products[0 if bench.machine.isa in BFLOAT16_SETS else 1].name
    measured = [ours, *kernels, sdpa, in_float32]
    samples, sizes = bench.samples([*measured, *products, *bench.machine.turns("read_2")])
    figures = {turn.name: rates(shape.flops, samples[turn.name]) for turn in measured}
    limits = {turn.name: median(rates(2 * 2048**3, samples[turn.name])) for turn in products}
    return bench.report.add(
        line.what,
        "GFLOP/s",
        figures.pop(OURS),
        better="higher",
        **peer_of(figures, peers.SDPA),
        limit=limits[limit],
        limit_name=limit,
        limits=limits,
        **sizes,
        **refused,
        **bench.describe(line, shape, pool),
    )


def append(bench: Bench, line: Line) -> dict[str, Any]:
    """Bytes of keys and values written per second."""
    shape = line.shape
    pool = make_pool(shape.raised(), bench.layers(shape.raised()))
    work = Append(shape, pool, peers.num_sources(shape))
    work.check()
    go_around(work)
    kernels, refused = bench.vllm_turns("append", shape)
    by_torch = peers.torch_turn("torch indexing", work.by_torch)
    measured = [Turn(OURS, turns.stopwatch(work), COUNT), *kernels, by_torch]
    samples, sizes = bench.samples([*measured, *bench.machine.turns("copy_2", "read_2")])
    num_bytes = len(work.slots[0]) * shape.token_bytes
    figures = {turn.name: rates(num_bytes, samples[turn.name]) for turn in measured}
    has_limit = bool(line.must)
    return bench.report.add(
        line.what,
        "GB/s",
        figures.pop(OURS),
        better="higher",
        **peer_of(figures, None),
        limit=median(samples["copy_2"]) / GIGA if has_limit else None,
        limit_name="memcpy" if has_limit else None,
        us=1e6 * median(samples[OURS]),
        **sizes,
        **refused,
        **bench.describe(line, shape, pool),
    )


def copy(bench: Bench, line: Line) -> dict[str, Any]:
    """Bytes copied per second, of blocks over all layers."""
    shape = line.shape
    pool = make_pool(shape, bench.layers(shape))
    work = Copy(pool, NUM_COPIES, peers.CYCLE_BYTES)
    work.check()
    go_around(work)
    measured = [Turn(OURS, turns.stopwatch(work), COUNT), peers.torch_turn("torch indexing", work.by_torch)]
    samples, sizes = bench.samples([*measured, *bench.machine.turns("copy_2", "read_2")])
    figures = {turn.name: rates(NUM_COPIES * work.block_bytes, samples[turn.name]) for turn in measured}
    return bench.report.add(
        line.what,
        "GB/s",
        figures.pop(OURS),
        better="higher",
        **peer_of(figures, None),
        limit=median(samples["copy_2"]) / GIGA,
        limit_name="memcpy",
        block_bytes=work.block_bytes,
        num_copies=NUM_COPIES,
        **sizes,
        **bench.describe(line, shape, pool),
    )


def layers(bench: Bench, line: Line) -> dict[str, Any]:
    """Time on the layers of one deep pool over that on pools of one layer, of turns that follow each other."""
    shape = line.shape.raised()
    num_flat = peers.num_copies(shape.kv_bytes)
    pool, deep = attention(shape, bench.layers(shape), DEEP)
    flat_works = [Attention(shape, make_pool(shape, 1)) for _ in range(num_flat)]
    for work in flat_works:
        go_around(work)
    flat = Turn(FLAT, turns.stopwatch(lambda number: flat_works[number % num_flat](number)), COUNT)
    samples, sizes = bench.samples([deep, flat, *bench.machine.turns("read_2")])
    pairs = zip(samples[DEEP], samples[FLAT], strict=True)
    return bench.report.add(
        line.what,
        "factor",
        [deep / flat for deep, flat in pairs],
        better="lower",
        deep_gb_s=median(rates(shape.kv_bytes, samples[DEEP])),
        flat_gb_s=median(rates(shape.kv_bytes, samples[FLAT])),
        num_flat_pools=num_flat,
        **sizes,
        **bench.describe(line, shape, pool),
    )


def overhead(bench: Bench, line: Line) -> dict[str, Any]:
    """Microseconds of a call that has next to nothing to compute."""
    shape = line.shape
    work = Attention(shape, make_pool(shape, MAX_LAYERS))
    work.check()
    calls = Calls(work, NUM_CALLS)
    samples, sizes = bench.samples([Turn(OURS, turns.stopwatch(calls), COUNT), *bench.machine.turns("read_2")])
    return bench.report.add(
        line.what,
        "us",
        [1e6 * second / NUM_CALLS for second in samples[OURS]],
        better="lower",
        **peer_of({}, None),
        num_calls=NUM_CALLS,
        **sizes,
        **bench.describe(line, shape, work.pool),
    )


def attention(shape: Shape, num_layers: int, name: str = OURS) -> tuple[Pool, Turn]:
    """Return a pool, and the turn of attention over its layers, whose result was compared with torch's."""
    work = Attention(shape, make_pool(shape, num_layers))
    work.check()
    go_around(work)
    return work.pool, Turn(name, turns.stopwatch(work), COUNT)


def peer_of(figures: Mapping[str, list[float]], name: str | None) -> dict[str, Any]:
    """Return the peer of that name, and the others."""
    others = {other: figure for other, figure in figures.items() if other != name}
    if name is None:
        return {"peers": others}
    return {"peer": figures[name], "peer_name": name, "peers": others}


MEASURES: dict[str, Measure] = {
    "decode": decode,
    "quantised": quantised,
    "packed": packed,
    "prefill": prefill,
    "append": append,
    "copy": copy,
    "layers": layers,
    "overhead": overhead,
}
UNITS: dict[str, tuple[str, str]] = {
    "decode": ("GB/s", "higher"),
    "quantised": ("ms", "lower"),
    "packed": ("GB/s", "higher"),
    "prefill": ("GFLOP/s", "higher"),
    "append": ("GB/s", "higher"),
    "copy": ("GB/s", "higher"),
    "layers": ("factor", "lower"),
    "overhead": ("us", "lower"),
}


def measure(bench: Bench, line: Line, set_threads: Callable[[int], None]) -> dict[str, Any]:
    """Measure a line; one that this build cannot do is refused by name, with the reason."""
    set_threads(line.shape.threads)
    try:
        return MEASURES[line.kind](bench, line)
    except UnsupportedError as error:
        unit, better = UNITS[line.kind]
        sizes = bench.machine.facts() | dataclasses.asdict(line.shape)
        return bench.report.refuse(line.what, unit, f"not available: {error}", better=better, **sizes)
