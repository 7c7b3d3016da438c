"""Figures 12, 14 and 16 of the paper: rates that systems sustain at equal normalized latency."""

from pagedkv.simulate.experiment import Load, Run
from pagedkv.simulate.machine import Machine
from pagedkv.simulate.paper.lines import Line
from pagedkv.simulate.paper.memory import SHORT, Sources
from pagedkv.simulate.sustained import THRESHOLD, Search

# Seconds of arrivals of each run in a search.
SECONDS = 1200.0
# The paper's rates at which its systems give way lie near these; a search that begins there is short.
KNEES = {"pagedkv": 2.2, "vllm": 2.2, "orca_oracle": 1.3, "orca_pow2": 1.0, "orca_max": 0.75, "fastertransformer": 0.2}
ALPACA_KNEES = {"pagedkv": 32.0, "vllm": 32.0, "orca_oracle": 22.0, "orca_pow2": 17.0, "orca_max": 5.0}
# Requests in a batch of FasterTransformer, the artifact's.
FT_BATCH = {"sharegpt": 5, "alpaca": 14}

# Kwon et al., SOSP 2023, section 6.2: how many times the rate of a baseline.
FIGURE_12 = {"orca_oracle": (1.6, 2.7), "orca_max": (2.7, 8.0), "fastertransformer": (2.0, None)}
# Section 6.4.
PREFIXES = {1: (80, 1.67), 5: (341, 3.58)}
PREFIX_SHARE = 0.25
# The blog of vLLM's launch: up to 2.2 times the rate.
SHARING_GAIN = 2.2
SHORT_NAMES = {**SHORT, "fastertransformer": "ft"}


def figure_12_searches(sources: Sources) -> dict[tuple[str, str], Search]:
    """Return the searches for ShareGPT and Alpaca on OPT-13B."""
    searches = {}
    for trace, knees in (("sharegpt", KNEES), ("alpaca", ALPACA_KNEES)):
        for system, knee in knees.items():
            options = {"batch_size": FT_BATCH[trace]} if system == "fastertransformer" else {}
            run = Run(Load(getattr(sources, trace), seconds=SECONDS), system, options=options)
            searches[trace, system] = Search(run, knee)
    return searches


def curve_runs(sources: Sources) -> dict[tuple[str, float], Run]:
    """Return the runs behind the curves of latency over rate."""
    grid = [round(0.1 + 0.2 * step, 1) for step in range(14)]
    return {
        (system, rate): Run(Load(sources.sharegpt, rate, SECONDS), system)
        for system, knee in KNEES.items()
        for rate in grid
        if rate < 1.6 * knee
    }


def figure_12(found: dict[tuple[str, str], float]) -> list[Line]:
    """Return how many times the rate of each baseline vLLM sustains, and this package's scheduler."""
    lines = []
    for system, (least, most) in FIGURE_12.items():
        for ours in ("vllm", "pagedkv"):
            rate, other = found["sharegpt", ours], found["sharegpt", system]
            must = f"{least}-{most}x" if most else f">= {least}x"
            between = (least, most or float("inf"))
            what = f"fig12_{SHORT_NAMES[system]}" + ("" if ours == "vllm" else "_pagedkv")
            details = {"rate": rate, "other_rate": other, "threshold": THRESHOLD, "seconds": SECONDS}
            lines.append(Line(what, "times the rate", rate / other, None, None, between, "higher", must, "", details))
    for system in ("orca_oracle", "orca_pow2", "orca_max"):
        rate, other = found["alpaca", "vllm"], found["alpaca", system]
        paper = 1.3 if system == "orca_oracle" else None
        note = "Alpaca's answers are made up" if paper else "the paper gives no number"
        details = {"rate": rate, "other_rate": other}
        what = f"fig12_alpaca_{SHORT_NAMES[system]}"
        lines.append(Line(what, "times the rate", rate / other, paper, note=note, details=details))
    return lines


def prefix_searches() -> dict[tuple[int, str], Search]:
    """Return the searches for a system prompt with one example and with five."""
    searches = {}
    for shots, (tokens, _) in PREFIXES.items():
        load = Load("translation", seconds=600.0, prefix_tokens=tokens)
        for system in ("vllm", "pagedkv", "orca_oracle"):
            machine = Machine(enable_prefix_caching=system == "pagedkv")
            start = 8.0 if system == "orca_oracle" and shots == 5 else 30.0
            searches[shots, system] = Search(Run(load, system, machine), start)
    return searches


def prefixes(found: dict[tuple[int, str], float]) -> list[Line]:
    """Return how many times Orca's rate is sustained where prompts share their beginning."""
    lines = []
    for shots, (tokens, paper) in PREFIXES.items():
        for ours in ("vllm", "pagedkv"):
            rate, other = found[shots, ours], found[shots, "orca_oracle"]
            what = f"prefix_{shots}shot" + ("" if ours == "vllm" else "_pagedkv")
            details = {"rate": rate, "other_rate": other, "prefix_tokens": tokens}
            tolerance = PREFIX_SHARE * paper
            must = "within 25 %"
            note = "lengths of WMT16 are assumed, and the cost model is OPT-13B's"
            ratio = rate / other
            lines.append(Line(what, "times the rate", ratio, paper, tolerance, None, "higher", must, note, details))
    return lines


def sharing_searches(sources: Sources, cost: str = "fitted") -> dict[tuple[str, int, str], Search]:
    """Return the searches with sharing of samples and beams, and without."""
    searches = {}
    for kind in ("parallel", "beam"):
        for n in (2, 4, 6):
            load = Load(sources.alpaca, seconds=600.0, n=n, beam=kind == "beam")
            start = 32.0 / n
            for name, system, options in (
                ("on", "vllm", {}),
                ("off", "vllm", {"sharing": False}),
                ("oracle", "orca_oracle", {}),
            ):
                run = Run(load, system, cost=(cost, {}), options=options)
                searches[kind, n, name] = Search(run, start)
    return searches


def sharing(found: dict[tuple[str, int, str], float], ending: str = "") -> list[Line]:
    """Return how many times the rate is sustained with sharing on, against off."""
    lines = []
    for kind in ("parallel", "beam"):
        for n in (2, 4, 6):
            on, off, oracle = (found[kind, n, name] for name in ("on", "off", "oracle"))
            what = f"sharing_throughput_{kind}_{n}{ending}"
            details = {"rate_on": on, "rate_off": off, "rate_orca_oracle": oracle, "times_oracle": on / oracle}
            note = "the launch blog: up to 2.2x" if kind == "beam" and n == 6 else ""
            paper = SHARING_GAIN if note else None
            lines.append(Line(what, "times the rate", on / off, paper, note=note, details=details))
    return lines


def chat_searches() -> dict[str, Search]:
    """Return the searches for conversations, whose keys and values nobody keeps between turns."""
    load = Load("chat", seconds=SECONDS)
    cached = Machine(enable_prefix_caching=True)
    runs = {system: Run(load, system) for system in ("vllm", "orca_oracle", "orca_pow2", "orca_max")}
    runs["pagedkv"] = Run(load, "pagedkv", cached)
    return {system: Search(run, 1.0) for system, run in runs.items()}


def chat(found: dict[str, float]) -> list[Line]:
    """Return how many times the rate of each Orca is sustained, twice that of all by the paper."""
    lines = []
    for ours in ("vllm", "pagedkv"):
        for system in ("orca_oracle", "orca_pow2", "orca_max"):
            what = f"chat_{SHORT[system]}" + ("" if ours == "vllm" else "_pagedkv")
            note = "conversations are made up" + ("; with the prefix cache" if ours == "pagedkv" else "")
            details = {"rate": found[ours], "other_rate": found[system]}
            ratio = found[ours] / found[system]
            lines.append(Line(what, "times the rate", ratio, 2.0, note=note, details=details))
    return lines
