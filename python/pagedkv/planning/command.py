"""Say how many tokens and requests fit into a device, what is wasted, and what limits.

The configuration of any Hugging Face decoder is enough; weights that lie beside it are counted.

    pagedkv plan --model config.json --gpu-memory 80GB
    pagedkv plan --model ./Llama-3-70B --gpu-memory 80GB --num-gpus 4 --prompt 2000 --output 500
    pagedkv plan --model config.json --gpu-memory 24GB --kv-cache-dtype float8_e4m3fn --json plan.json
"""

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pagedkv.planning.capacity import (
    DEFAULT_RESERVE,
    DEFAULT_UTILIZATION,
    Capacity,
    Effect,
    Request,
    effects,
    plan_capacity,
)
from pagedkv.planning.model_config import ModelConfig, read_model_config

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = __doc__
    parser.add_argument("--model", required=True, type=Path, metavar="CONFIG", help="a config.json, or its folder")
    parser.add_argument("--gpu-memory", required=True, type=_bytes, metavar="BYTES", help="such as 80GB or 40GiB")
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N", help="tensor parallel (default: %(default)s)")
    parser.add_argument("--weights", type=_bytes, metavar="BYTES", help="of the model; by default counted or estimated")
    parser.add_argument("--reserve", type=_bytes, default=DEFAULT_RESERVE, metavar="BYTES", help="(default: 2GiB)")
    parser.add_argument("--utilization", type=float, default=DEFAULT_UTILIZATION, help="(default: %(default)s)")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="(default: that of the weights)")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="(default: the model's)")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="seats (default: %(default)s)")
    requests = parser.add_argument_group("requests")
    requests.add_argument("--prompt", type=int, default=1024, metavar="TOKENS", help="(default: %(default)s)")
    requests.add_argument("--output", type=int, default=512, metavar="TOKENS", help="(default: %(default)s)")
    requests.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS", help="of the prompt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan and the effects to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Plan, show tables, and write the file that was asked for."""
    model = read_model_config(arguments.model)
    if arguments.weights is not None:
        model = model.with_weights(arguments.weights)
    settings = {
        "request": Request(arguments.prompt, arguments.output, arguments.shared_prefix),
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "block_size": arguments.block_size,
        "num_gpus": arguments.num_gpus,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "reserve": arguments.reserve,
        "utilization": arguments.utilization,
    }
    capacity = plan_capacity(model, arguments.gpu_memory, **settings)
    changes = effects(model, arguments.gpu_memory, **settings)
    _show(model, capacity, changes)
    if arguments.json is not None:
        content = {"plan": asdict(capacity), "effects": [asdict(effect) for effect in changes]}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return 0


def _show(model: ModelConfig, capacity: Capacity, changes: list[Effect]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"{model.name}: {capacity.dtype} in blocks of {capacity.block_size}", title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    rows = {
        "keys and values of a token": f"{capacity.token_bytes:,.0f} bytes",
        "a block": f"{capacity.block_bytes:,} bytes",
        "weights": f"{model.weight_bytes / 1e9:,.1f} GB" + (" (estimated)" if model.weights_are_estimated else ""),
        "left for the cache, each device": f"{capacity.kv_bytes / 1e9:,.2f} GB",
        "tokens that fit": f"{capacity.num_tokens:,}",
        "longest sequences that fit": f"{capacity.num_longest:,}",
        "requests that fit at their end": f"{capacity.num_requests:,}",
        "requests that fit halfway": f"{capacity.num_mean_requests:,}",
        "wasted in their blocks": f"{capacity.waste:.1%}",
        "limited by": capacity.limited_by,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    effect_table = Table(title="what would change it", title_justify="left")
    for heading in ("change", "bytes of a token", "tokens", "requests halfway", "times", "waste"):
        effect_table.add_column(heading, justify="left" if heading == "change" else "right", no_wrap=True)
    for effect in changes:
        changed = effect.capacity
        cells = [f"{changed.token_bytes:,.0f}", f"{changed.num_tokens:,}", f"{changed.num_mean_requests:,}"]
        gain = "none" if effect.gain is None else f"{effect.gain:.2f}"
        effect_table.add_row(effect.name, *cells, gain, f"{changed.waste:.1%}")
    console.print(effect_table)
    for warning in capacity.warnings:
        console.print(f"note: {warning}", highlight=False)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = None if found is None else _UNITS.get(found[2].upper())
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"expected bytes such as 80GB or 40GiB, found {text!r}")
    return int(float(found[1]) * unit)
