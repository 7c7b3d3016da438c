"""Weights and sizes in a GGUF file."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from pagedkv.exceptions import InvalidArgumentError, UnsupportedError


class GGUFFile:
    """A GGUF file, read where something of it is asked for.

    Parameters
    ----------
    path : str or path
        The file.
    dtype : torch.dtype
        Element type of the weights that it gives.

    Attributes
    ----------
    architecture : str
        What the file calls its model.

    Raises
    ------
    InvalidArgumentError
        If there is no such file, or it is no GGUF file.
    """

    def __init__(self, path: str | PathLike[str], dtype: torch.dtype) -> None:
        try:
            self._reader = GGUFReader(path)
        except (ArithmeticError, LookupError, MemoryError, OSError, ValueError) as error:  # whatever broken bytes do
            raise InvalidArgumentError(
                f"model: expected a GGUF file at {path}, found what can't be read: {error}"
            ) from error
        self._dtype = dtype
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._unread = set(self._tensors)
        self.architecture: str = self.field("general.architecture", "")

    def field(self, name: str, default: Any = None) -> Any:
        """Return a field of the file's header, or a default where it has none."""
        found = self._reader.fields.get(name)
        return default if found is None else found.contents()

    def size(self, name: str, default: Any = None) -> Any:
        """Return a field of the architecture; without a default it must be there."""
        found = self.field(f"{self.architecture}.{name}", default)
        if found is None:
            raise UnsupportedError(f"model: expected {self.architecture}.{name} in the GGUF file, found none")
        return found

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._tensors

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor, unpacked.

        Parameters
        ----------
        name : str
            Its name in the file.
        dtype : torch.dtype, optional
            Its element type, by default that of the weights.

        Returns
        -------
        torch.Tensor
            With the dimensions in torch's order.
        """
        found = self._tensors.get(name)
        if found is None:
            raise UnsupportedError(f"model: expected a tensor {name} in the GGUF file, found none")
        self._unread.discard(name)
        shape = [int(size) for size in reversed(found.shape)]
        # A copy: what the file is mapped to can't be written, and torch wants what it can write.
        values = np.array(dequantize(found.data, found.tensor_type), np.float32).reshape(shape)
        return torch.from_numpy(values).to(dtype or self._dtype)

    def check_all_read(self) -> None:
        """Refuse a file of which some tensors were not asked for: its model is another."""
        if self._unread:
            raise UnsupportedError(f"model: expected no tensor {min(self._unread)} in the GGUF file, found one")


def architecture(path: str | PathLike[str]) -> str:
    """Return what a GGUF file calls its model."""
    return GGUFFile(path, torch.float32).architecture
