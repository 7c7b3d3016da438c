"""Plots of the paper's experiments."""

from collections.abc import Callable
from pathlib import Path

from pagedkv.simulate.paper import Experiment, beyond, memory, swapping
from pagedkv.simulate.plots import draw_bars, draw_curves

Draw = Callable[[Path, Experiment], None]


def draw_experiments(experiments: list[Experiment], folder: Path, suffix: str = ".svg") -> list[Path]:
    """Draw those experiments that have a plot into a folder, and return the files."""
    drawn = []
    for experiment in experiments:
        if experiment.name in _DRAWINGS and experiment.answers:
            path = folder / f"{experiment.name}{suffix}"
            _DRAWINGS[experiment.name](path, experiment)
            drawn.append(path)
    return drawn


def _memory(path: Path, experiment: Experiment) -> None:
    shares = {memory.SHORT[name]: memory.breakdown(figures) for name, figures in experiment.answers.items()}
    series = {
        part: [share[part] for share in shares.values()] for part in ("token", "reservation", "internal", "external")
    }
    draw_bars(path, list(shares), series, y="% of the pool", title="what memory holds (Fig. 2)", stacked=True)


def _batches(path: Path, experiment: Experiment) -> None:
    systems = list(memory.SHORT)
    series = {
        trace: [experiment.answers[trace, system]["mean_requests"] for system in systems]
        for trace in ("sharegpt", "alpaca")
    }
    names = [memory.SHORT[system] for system in systems]
    draw_bars(path, names, series, y="requests at once", title="average batch (Fig. 13)", stacked=False)


def _latency(path: Path, experiment: Experiment) -> None:
    curves: dict[str, list[tuple[float, float]]] = {}
    for (system, rate), figures in experiment.answers.items():
        curves.setdefault(system, []).append((rate, figures["normalized_latency"]))
    title = "ShareGPT, OPT-13B (Fig. 12)"
    draw_curves(path, curves, x="requests a second", y="normalized latency, s a token", title=title, top=1.0)


def _savings(path: Path, experiment: Experiment) -> None:
    series: dict[str, list[float]] = {}
    for (system, kind, _), figures in experiment.answers.items():
        series.setdefault(f"{kind}, {system}", []).append(100 * figures["saving"])
    title = "blocks saved by sharing (Fig. 15)"
    draw_bars(path, ["2", "4", "6"], series, y="% of the blocks", title=title, stacked=False)


def _block_sizes(path: Path, experiment: Experiment) -> None:
    curves: dict[str, list[tuple[float, float]]] = {}
    for (trace, size), figures in experiment.answers.items():
        curves.setdefault(trace, []).append((size, 100 * figures["token_share"]))
    title = "share of the pool that holds tokens"
    draw_curves(path, curves, x="tokens per block", y="%", title=title, top=100, log_x=True)


def _swap(path: Path, experiment: Experiment) -> None:
    again = 1e3 * swapping.recompute_seconds()
    sizes = swapping.BLOCK_SIZES
    curves = {
        "swap, one copy a block": [(float(size), 1e3 * swapping.swap_seconds(size, 1)) for size in sizes],
        "swap, 80 copies a block": [(float(size), 1e3 * swapping.swap_seconds(size, 80)) for size in sizes],
        "compute again": [(float(size), again) for size in sizes],
    }
    title = "256 tokens out and in, or computed again (Fig. 19)"
    draw_curves(path, curves, x="tokens per block", y="ms", title=title, top=150, log_x=True)


def _hits(path: Path, experiment: Experiment) -> None:
    points = [
        (tokens / 1e6, 100 * figures["hit_rate"])
        for (tokens, policy, eviction), figures in experiment.answers.items()
        if (policy, eviction) == ("fcfs", "lru")
    ]
    title = "prefix hits on Mooncake's conversations"
    draw_curves(path, {"lru": points}, x="million tokens of cache", y="% of the prompt tokens", title=title, log_x=True)


def _tenants(path: Path, experiment: Experiment) -> None:
    policies = list(beyond.POLICIES)
    series = {
        "99th percentile": [experiment.answers[policy]["talk_first_token_p99"] for policy in policies],
        "mean": [experiment.answers[policy]["talk_first_token_mean"] for policy in policies],
    }
    title = "a tenant that talks beside one that sends bursts"
    draw_bars(path, policies, series, y="s to the first token", title=title, stacked=False)


_DRAWINGS: dict[str, Draw] = {
    "fig2": _memory,
    "fig13": _batches,
    "fig12_curves": _latency,
    "fig15": _savings,
    "fig15_sharegpt": _savings,
    "block_size": _block_sizes,
    "swap": _swap,
    "mooncake": _hits,
    "tenants": _tenants,
}
