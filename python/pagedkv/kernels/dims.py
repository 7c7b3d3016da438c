"""Checks of the arrays of one call: dimensions bound by name, so that a mismatch can name both sides."""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pagedkv.exceptions import InvalidArgumentError

if TYPE_CHECKING:
    import torch

TYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
"""Element types as the kernels number them."""
COMPUTED = ("float32", "float16", "bfloat16")
CACHED = tuple(TYPE_CODES)

LAYER = ("num_blocks", "num_kv_heads", "block_size", "head_dim")
POOL = ("num_blocks", "num_layers", "2", "num_kv_heads", "block_size", "head_dim")
TABLE = ("num_rows", "max_blocks_per_seq")


class Dims:
    """The sizes and the device seen so far in one call.

    Parameters
    ----------
    device : torch.device
        Where all arrays must lie.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._sizes: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def fix(self, name: str, size: int) -> None:
        """Fix the size of a dimension before an array has it."""
        self._sizes[name] = size

    def check(
        self,
        argument: str,
        array: "torch.Tensor",
        names: Sequence[str],
        dtypes: Collection[str],
        *,
        contiguous: int = 1,
    ) -> None:
        """Refuse an array of another device, element type or shape, or whose last dimensions are not contiguous.

        Parameters
        ----------
        argument : str
            What errors call it.
        array : torch.Tensor
            The array.
        names : sequence of str
            Its dimensions; a digit is the size itself.
        dtypes : collection of str
            What its elements may be.
        contiguous : int
            How many of the last dimensions must lie side by side: 0 or 1.
        """
        if array.device != self._device:
            raise InvalidArgumentError(f"{argument}: expected memory on {self._device}, found device {array.device}")
        dtype = dtype_name(array)
        if dtype not in dtypes:
            raise TypeError(f"{argument}: expected dtype {_either(dtypes)}, found {dtype}")
        shape = tuple(array.shape)
        if len(shape) != len(names) or any(
            self._size(name) not in (None, size) for name, size in zip(names, shape, strict=True)
        ):
            raise InvalidArgumentError(f"{argument}: expected shape {self._text(names)}, found {shape}")
        self._sizes.update(zip(names, shape, strict=True))
        if contiguous and shape[-1] > 1 and array.stride(-1) != 1:
            raise InvalidArgumentError(
                f"{argument}: expected stride 1 in the last dimension, found strides {array.stride()}"
            )

    def _size(self, name: str) -> int | None:
        return int(name) if name.isdigit() else self._sizes.get(name)

    def _text(self, names: Sequence[str]) -> str:
        parts = [
            f"{name}={self._sizes[name]}" if name in self._sizes and not name.isdigit() else name for name in names
        ]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def dtype_name(array: "torch.Tensor") -> str:
    """Return the name of an array's element type."""
    return str(array.dtype).removeprefix("torch.")


def strides(array: "torch.Tensor") -> tuple[int, ...]:
    """Return the strides of an array; of a dimension with one element, which says nothing, 0."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(array.shape, array.stride(), strict=True))


def alignment(*arrays: "torch.Tensor") -> int:
    """Return the largest power of two, up to 16, that divides all addresses of rows, in bytes."""
    whole = [16]
    for array in arrays:
        whole.append(array.data_ptr())
        whole += [stride * array.element_size() for stride in strides(array)[:-1]]
    return math.gcd(*whole)


def check_distinct(argument: str, array: "torch.Tensor") -> None:
    """Refuse an output in which elements may share their place."""
    span = 1
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.stride(), array.shape, strict=True)):
        if size > 1 and stride < span:
            raise InvalidArgumentError(
                f"{argument}: expected an output whose elements do not overlap, found strides {array.stride()}"
            )
        span += stride * (size - 1)


def check_scale(argument: str, scale: "torch.Tensor", cache: "torch.Tensor") -> None:
    """Refuse scales of a cache that is not FP8, and such as are neither one for all KV heads nor one for each."""
    if dtype_name(cache) in COMPUTED:
        raise InvalidArgumentError(
            f"{argument}: expected none beside a cache that is not FP8, found a cache of {dtype_name(cache)}"
        )
    if scale.device != cache.device:
        raise InvalidArgumentError(f"{argument}: expected memory on {cache.device}, found device {scale.device}")
    if dtype_name(scale) != "float32":
        raise TypeError(f"{argument}: expected dtype float32, found {dtype_name(scale)}")
    num_kv_heads = cache.shape[1]
    if tuple(scale.shape) not in ((1,), (num_kv_heads,)):
        raise InvalidArgumentError(
            f"{argument}: expected shape (1,) or (num_kv_heads={num_kv_heads},), found {tuple(scale.shape)}"
        )


def _either(names: Collection[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
