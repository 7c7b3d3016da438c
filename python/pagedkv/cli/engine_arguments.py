"""Arguments of the commands that run an engine."""

import argparse
import re
from typing import Any

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what decides how a model is loaded and run.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Where to add it.
    """
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, or a name that transformers knows")
    group = parser.add_argument_group("engine")
    group.add_argument("--tokenizer", help="where to load the tokenizer, if not where the model is")
    group.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    group.add_argument("--device", help="cpu, cuda or cuda:N (cpu)")
    group.add_argument("--enforce-eager", action="store_true", help="capture no graphs on a GPU")
    group.add_argument("--kv-cache-dtype", default="auto", help="auto, one of these, float8_e4m3fn or float8_e5m2")
    group.add_argument("--packed-keys", action="store_true", help="lay keys side by side: faster with FP8")
    group.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens per block (16)")
    group.add_argument("--num-blocks", type=positive, metavar="N", help="blocks of the cache")
    group.add_argument("--kv-cache-memory-bytes", type=size, metavar="SIZE", help="or its memory: 512m, 4g")
    group.add_argument("--max-model-len", type=positive, metavar="N", help="longest sequence, prompt and output")
    group.add_argument("--max-num-seqs", type=positive, metavar="N", help="most sequences at a time")
    group.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help="most tokens per step")
    group.add_argument("--no-enable-prefix-caching", action="store_true", help="reuse no prefixes")
    group.add_argument("--preemption-mode", choices=["recompute", "swap"], default="recompute")
    group.add_argument(
        "--num-speculative-tokens", type=positive, metavar="N", help="guess so many tokens from the text itself"
    )
    group.add_argument("--seed", type=int, default=0, help="of requests without one (0)")
    group.add_argument("--record-trace", metavar="FILE", help="write requests, without text, for pagedkv simulate")
    group.add_argument("--threads", type=positive, metavar="N", help="threads of torch and attention")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of an engine that arguments ask for.

    Parameters
    ----------
    arguments : argparse.Namespace
        With what `add_engine_arguments` adds.

    Returns
    -------
    dict
        For `LLMEngine`; the threads are set.
    """
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    num_speculative_tokens = arguments.num_speculative_tokens
    lookup = None if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
    return {
        "model": arguments.model,
        "tokenizer": arguments.tokenizer,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "enforce_eager": arguments.enforce_eager,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "packed_keys": arguments.packed_keys,
        "block_size": arguments.block_size,
        "num_blocks": arguments.num_blocks,
        "kv_cache_memory_bytes": arguments.kv_cache_memory_bytes,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "enable_prefix_caching": not arguments.no_enable_prefix_caching,
        "preemption_mode": arguments.preemption_mode,
        "speculative_config": lookup,
        "seed": arguments.seed,
        "record_trace": arguments.record_trace,
    }


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def size(text: str) -> int:
    """Read a number of bytes: 1000, 512m, 4g."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size like 512m or 4g, found {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])
