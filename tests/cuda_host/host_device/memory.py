"""Tensors in memory that is only reserved: far apart, each with its exact bounds."""

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np

from host_device.build import CACHE, _link, build_runtime


@dataclass(frozen=True)
class Region:
    """The memory of a tensor."""

    name: str
    address: int
    num_bytes: int
    writable: bool


class Memory:
    """The tensors of some launches.

    Kernels may read all of them and write those that are said to be writable.
    """

    def __init__(self):
        self.regions = []
        self._library = _reserving()
        weakref.finalize(self, _release, self._library, self.regions)

    def reserve(self, name, num_bytes, *, writable=False):
        """Return a new uint8 array of zeros, which costs memory where it is touched."""
        address = self._library.pkv_reserve(max(num_bytes, 1))
        if not address:
            raise MemoryError(f"no room for {name}, {num_bytes} bytes")
        self.regions.append(Region(name, address, num_bytes, writable))
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        buffer.owner = self  # nothing is released while an array is in use
        return np.frombuffer(buffer, np.uint8)

    def place(self, name, tensor, *, writable=False):
        """Return a copy of a torch tensor, gaps between its elements included."""
        import torch

        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        num_bytes = (reach if tensor.numel() else 0) * tensor.element_size()
        if not num_bytes:
            self.reserve(name, 0, writable=writable)
            return tensor.clone()
        flat = torch.from_numpy(self.reserve(name, num_bytes, writable=writable)).view(tensor.dtype)
        source = tensor.as_strided((reach,), (1,))
        flat.copy_(source)
        return flat.as_strided(tensor.shape, tensor.stride())


def _reserving():
    library = CACHE / f"{build_runtime().parent.name}.so"
    if not library.is_file():
        _link([str(build_runtime())], library, ())
    loaded = ctypes.CDLL(str(library))
    loaded.pkv_reserve.restype = ctypes.c_void_p
    loaded.pkv_reserve.argtypes = [ctypes.c_uint64]
    loaded.pkv_release.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return loaded


def _release(library, regions):
    for region in regions:
        library.pkv_release(region.address, max(region.num_bytes, 1))
