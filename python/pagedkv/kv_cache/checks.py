"""What `KVCache` refuses, by the argument's name."""

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pagedkv import _core
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kv_cache.memory import ITEM_BYTES

if TYPE_CHECKING:
    from pagedkv.kv_cache.groups import CacheGroup


def integer(argument: str, found: Any) -> int:
    """Return an integer, or say which argument is none."""
    try:
        if isinstance(found, bool):
            raise TypeError
        return operator.index(found)
    except TypeError:
        raise TypeError(f"{argument}: expected an integer, found {found!r}") from None


def size(argument: str, found: Any) -> int:
    """Return an integer from 1 on, below 2^31."""
    number = integer(argument, found)
    if number < 1:
        raise InvalidArgumentError(f"{argument}: expected at least 1, found {number}")
    if number >= 1 << 31:
        raise InvalidArgumentError(f"{argument}: expected less than 2^31, found {number}")
    return number


def check_config(argument: str, expected: str, found: Any, field: str) -> None:
    """Refuse what is no configuration, as it lacks a field of one."""
    if not hasattr(found, field):
        raise TypeError(f"{argument}: expected a {expected}, found {type(found).__name__}")


def check_apart(argument: str, tensor: _core.Tensor, other_argument: str, other: _core.Tensor) -> None:
    """Refuse memory that is a part of another argument's."""
    if tensor.overlaps(other):
        raise InvalidArgumentError(f"{argument}: expected memory of its own, found an overlap with {other_argument}")


def dtype_name(dtype: Any) -> str:
    """Return the name of an element type that a cache may hold."""
    name = str(dtype).removeprefix("torch.")
    _check_choice("dtype", name, tuple(ITEM_BYTES))
    return name


def check_place(layout: str, backend: str, device: Any) -> str:
    """Refuse an order of memory, a library or a device that is not known; return the device's name."""
    _check_choice("layout", layout, ("block", "layer"))
    _check_choice("backend", backend, ("torch", "numpy"))
    if (name := device_name(device)) != "cpu" and backend != "torch":
        raise UnsupportedError(f"backend: expected torch, which makes memory on {name}, found {backend}")
    return name


def device_name(device: Any) -> str:
    """Return the name of a device, "cpu", "cuda" or "cuda:N"; refuse one of another kind."""
    kind, _, index = (name := str(device)).partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdigit():
        raise UnsupportedError(f"device: expected cpu, cuda or cuda:N, found {name}")
    return "cpu" if kind == "cpu" else name


def check_is_there(device: str) -> None:
    """Refuse a GPU that torch does not find, by its name."""
    if device == "cpu":
        return
    import torch

    if int(device.partition(":")[2] or 0) >= (count := torch.cuda.device_count()):
        raise InvalidArgumentError(f"device: expected one of the {count} GPUs that torch finds, found {device}")


def check_packed(groups: Sequence["CacheGroup"], pool: Any, device: str) -> None:
    """Refuse a GPU, sizes in which keys can't be packed, and memory whose keys lie in an order of its own."""
    if device != "cpu":
        raise UnsupportedError(f"packed: expected False on a GPU, whose kernels read keys as they are, found {device}")
    if pool is not None:
        raise UnsupportedError("pool: expected none, because only memory that KVCache makes has packed keys, found one")
    for group in groups:
        for name, unit in (("block_size", _core.PACKED_TOKENS), ("head_dim", _core.HEAD_DIM_STEP)):
            found = getattr(group, name)
            if found % unit:
                raise InvalidArgumentError(
                    f"{name}: expected a multiple of {unit}, because keys are packed, found {found}"
                )


def check_moves(slot_moves: Any, num_slots: Sequence[int]) -> None:
    """Refuse moves of a plan in a cache group, or between slots, that are not there."""
    for group, source, destination in slot_moves.tolist():
        if not 0 <= group < len(num_slots):
            raise InvalidArgumentError(f"plan.slot_moves: expected groups below {len(num_slots)}, found {group}")
        if not (0 <= source < num_slots[group] and 0 <= destination < num_slots[group]):
            raise InvalidArgumentError(
                f"plan.slot_moves: expected slots below {num_slots[group]}, found {source} and {destination}"
            )


def import_memory(argument: str, array: Any, shape: tuple[int, ...], dtype: str) -> _core.Tensor:
    """Return memory that can be written, of that shape and type, in which every element has its own place."""
    tensor = _core.from_dlpack(array, dtype, argument=argument)
    if tensor.shape != shape:
        raise InvalidArgumentError(f"{argument}: expected shape {shape}, found {tensor.shape}")
    if tensor.readonly:
        raise InvalidArgumentError(f"{argument}: expected writable memory, found a read-only array")
    if not tensor.is_distinct:
        raise InvalidArgumentError(
            f"{argument}: expected memory that does not overlap itself, found strides {tensor.strides}"
        )
    return tensor


def _check_choice(argument: str, found: str, choices: tuple[str, ...]) -> None:
    if found not in choices:
        raise InvalidArgumentError(f"{argument}: expected one of {', '.join(choices)}, found {found!r}")
