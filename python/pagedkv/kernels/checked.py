"""Calls whose arrays were checked once: until one of them differs in more than its address, nothing is checked again.

A layer's attention or append is called with arrays of the same shapes, step after step and layer after layer. What is
checked and computed of shapes, strides, types and options is kept; left to every call are the addresses, and that
outputs lie apart from inputs.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kernels.params import POINTERS, pack

if TYPE_CHECKING:
    import torch

_MOST_KEPT = 4096
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Argument:
    """An array of a call.

    Attributes
    ----------
    field : str
        Its field in the kernel's struct.
    name : str
        What the caller calls it.
    reach_bytes : int
        From its first element to the end of its last one.
    """

    field: str
    name: str
    reach_bytes: int

    @classmethod
    def of(cls, field: str, name: str, array: "torch.Tensor") -> "Argument":
        """Describe an array."""
        if array.numel() == 0:
            return cls(field, name, 0)
        reach = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True)) + 1
        return cls(field, name, reach * array.element_size())


class Parameters:
    """A kernel's struct but for its pointers, and which arrays must lie apart.

    Parameters
    ----------
    kernel : str
        The kernel.
    values : mapping of str to int, float or tuple
        All fields that are no pointers.
    written, read : list of Argument
        Outputs and inputs. No output may overlap an input, nor an output that stands before it.
    outputs_apart : bool
        Whether the latter is looked at.
    """

    def __init__(
        self,
        kernel: str,
        values: Mapping[str, Any],
        written: list[Argument],
        read: list[Argument],
        *,
        outputs_apart: bool = True,
    ) -> None:
        self._pointers = POINTERS[kernel]
        packed = pack(kernel, {**dict.fromkeys(self._pointers, 0), **values})
        self._struct = packed.dtype
        self._words = packed.view(np.uint64)  # structs are copied field by field
        self._apart = [(output, [*read, *written[: outputs_apart * at]]) for at, output in enumerate(written)]

    def pack(self, arrays: Mapping[str, "torch.Tensor | None"]) -> np.ndarray[Any, Any]:
        """Return the struct for arrays at the addresses that they have.

        Raises
        ------
        InvalidArgumentError
            If an output overlaps another array.
        """
        addresses = {field: 0 if array is None else array.data_ptr() for field, array in arrays.items()}
        for output, others in self._apart:
            start = addresses[output.field]
            end = start + output.reach_bytes
            for other in others:
                other_start = addresses[other.field]
                if other_start < end and start < other_start + other.reach_bytes:
                    raise InvalidArgumentError(
                        f"{output.name}: expected memory of its own, found an overlap with {other.name}"
                    )
        words = self._words.copy()
        words[: len(self._pointers)] = [addresses[field] for field in self._pointers]
        return words.view(self._struct)


def signature(array: "torch.Tensor | None") -> Hashable:
    """Return all that checks look at of an array: everything but its address, of which they see the alignment."""
    if array is None:
        return None
    return array.dtype, array.shape, array.stride(), array.device, array.data_ptr() % 16


class Kept(Generic[_Found]):
    """What a function finds for arrays and options, kept by the signatures of the arrays.

    Parameters
    ----------
    find : callable
        The function; what it raises is raised, and not kept.
    """

    def __init__(self, find: Callable[..., _Found]) -> None:
        self._find = find
        self._kept: dict[Hashable, _Found] = {}

    def __call__(self, arrays: "tuple[torch.Tensor | None, ...]", *options: Hashable) -> _Found:
        """Return what the function finds, called with the arrays one by one, then the options."""
        key = (*map(signature, arrays), *options)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = self._find(*arrays, *options)
        return found
