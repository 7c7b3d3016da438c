"""Low-rank adapters in the folders that PEFT writes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pagedkv.exceptions import InvalidArgumentError, UnsupportedError

_ARGUMENT = "lora_request"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

# Fields of a configuration that say nothing about how the adapter computes, or are read below.
_READ_OR_IDLE = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Beginnings that leave the base model's weights as they were.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a layer: ``scale * x @ down.T @ up.T``.

    Parameters
    ----------
    down : torch.Tensor, shape (rank, num_inputs)
        The first matrix, PEFT's lora_A.
    up : torch.Tensor, shape (num_outputs, rank)
        The second, PEFT's lora_B.
    scale : float
        What the product is multiplied by.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


def read_adapter(path: str | PathLike[str]) -> dict[str, LowRank]:
    """Read an adapter that PEFT saved.

    Parameters
    ----------
    path : str or path
        The folder: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns
    -------
    dict of str to LowRank
        By the name of the layer in the base model.

    Raises
    ------
    InvalidArgumentError
        If there is no such folder, or something in it is broken.
    UnsupportedError
        If the adapter is of a kind that is not implemented; the message names the field or the tensor.
    """
    folder = Path(path).expanduser()
    config = _read_config(folder / "adapter_config.json")
    _check(config)
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise InvalidArgumentError(f"{_ARGUMENT}: expected a file {file}, found none")
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InvalidArgumentError(f"{_ARGUMENT}: expected tensors in {file}, found {error}") from error
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise UnsupportedError(
                f"{_ARGUMENT}: expected only lora_A.weight and lora_B.weight in {file}, found {name}"
            )
        sides.setdefault(found["module"], {})[found["side"]] = tensor
    return {module: _low_rank(module, matrices, config) for module, matrices in sides.items()}


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InvalidArgumentError(f"{_ARGUMENT}: expected a folder of PEFT with {file.name}, found none at {file}")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise InvalidArgumentError(f"{_ARGUMENT}: expected JSON in {file}, found {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{_ARGUMENT}: expected an object in {file}, found {config!r}")
    return config


def _check(config: dict[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise _refusal("peft_type", "'LORA'", kind)
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise _refusal("task_type", "'CAUSAL_LM'", task)
    if (bias := config.get("bias", "none")) != "none":
        raise _refusal("bias", "'none'", bias)
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_BEGINNINGS:
        raise _refusal("init_lora_weights", "one that leaves the base model as it is", start)
    for name, found in config.items():
        # Newer versions write more fields; those that are off say nothing.
        if found and name not in _READ_OR_IDLE:
            raise _refusal(name, "none, because pagedkv does not implement it", found)


def _low_rank(module: str, matrices: dict[str, torch.Tensor], config: dict[str, Any]) -> LowRank:
    down, up = matrices.get("A"), matrices.get("B")
    if down is None or up is None or down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1] or not len(down):
        shapes = {side: tuple(matrix.shape) for side, matrix in matrices.items()}
        raise InvalidArgumentError(
            f"{_ARGUMENT}: expected lora_A of (rank, inputs) and lora_B of (outputs, rank) for {module}, found {shapes}"
        )
    rank = _by_pattern(config, "rank_pattern", "r", module)
    if len(down) != rank:
        raise InvalidArgumentError(
            f"{_ARGUMENT}: expected rank {rank} for {module}, as adapter_config.json says, found {len(down)}"
        )
    if not (down.isfinite().all() and up.isfinite().all()):
        raise InvalidArgumentError(f"{_ARGUMENT}: expected finite weights for {module}, found others")
    alpha = _by_pattern(config, "alpha_pattern", "lora_alpha", module)
    return LowRank(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(config: dict[str, Any], patterns: str, default: str, module: str) -> Any:
    """Return a number of a layer: that of the first pattern that its name ends with, or the one of all others."""
    by_pattern, name, number = config.get(patterns) or {}, default, config.get(default)
    if not isinstance(by_pattern, dict):
        raise _no_number(patterns, "numbers by pattern", by_pattern)
    for pattern, found in by_pattern.items():
        try:
            is_own = re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as error:
            raise _no_number(patterns, f"regular expressions ({error})", pattern) from None
        if is_own:
            name, number = patterns, found
            break
    if not isinstance(number, int | float) or not 0 < number < math.inf:
        raise _no_number(name, "a finite number above 0", number)
    return number


def _no_number(field: str, expected: str, found: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{_ARGUMENT}: expected {field} in adapter_config.json to be {expected}, found {found!r}"
    )


def _refusal(field: str, expected: str, found: object) -> UnsupportedError:
    return UnsupportedError(f"{_ARGUMENT}: {field} in adapter_config.json: expected {expected}, found {found!r}")
