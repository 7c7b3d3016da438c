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
        self._reserved = []
        weakref.finalize(self, _release, self._library, self._reserved)

    def reserve(self, name, num_bytes, *, writable=False, lead=0):
        """Return a new uint8 array of zeros, which costs memory where it is touched.

        It begins `lead` bytes behind a multiple of 256.
        """
        whole = max(num_bytes + lead, 1)
        start = self._library.pkv_reserve(whole)
        if not start:
            raise MemoryError(f"no room for {name}, {num_bytes} bytes")
        self._reserved.append((start, whole))
        address = start + lead
        self.regions.append(Region(name, address, num_bytes, writable))
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        buffer.owner = self  # nothing is released while an array is in use
        return np.frombuffer(buffer, np.uint8)

    def holds(self, tensor):
        """Return whether a tensor lies in this memory."""
        at = tensor.data_ptr()
        return any(region.address <= at < region.address + region.num_bytes for region in self.regions)

    def place(self, name, tensor, *, writable=False):
        """Return a copy of a torch tensor, gaps between its elements included."""
        return self.place_all({name: tensor}, writable={name} if writable else ())[name]

    def place_all(self, tensors, *, writable=()):
        """Return copies of torch tensors by name, in which those that share memory still do.

        What shares memory is one region, from the first to the last element of any of them; parts of one memory that
        lie one behind the other are regions of their own.
        """
        by_storage = {}
        for name, tensor in tensors.items():
            key = tensor.untyped_storage().data_ptr() or name
            by_storage.setdefault(key, {})[name] = tensor
        copies = {}
        for views in by_storage.values():
            for together in _interleaved(views):
                copies |= self._place_together(together, writable=not together.keys().isdisjoint(writable))
        return {name: copies[name] for name in tensors}

    def _place_together(self, views, *, writable):
        import torch

        extents = [_extent(tensor) for tensor in views.values()]
        first, last = min(start for start, _ in extents), max(end for _, end in extents)
        # At the same place in 256 bytes as before, for alignment decides how kernels read.
        lead = first % 256
        memory = self.reserve("+".join(views), last - first, writable=writable, lead=lead)
        flat = torch.from_numpy(memory)
        storage = next(iter(views.values())).untyped_storage()
        flat.copy_(torch.empty(0, dtype=torch.uint8).set_(storage)[first:last])
        copies = {}
        for (name, tensor), (start, end) in zip(views.items(), extents, strict=True):
            part = flat[start - first : end - first].view(tensor.dtype)
            copies[name] = part.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else tensor.clone()
        return copies


def _interleaved(views):
    """Return views of one memory in groups of such as reach into one another."""
    groups, end = [], -1
    for name, tensor in sorted(views.items(), key=lambda view: _extent(view[1])):
        start, own_end = _extent(tensor)
        if not groups or start >= end:
            groups.append({})
        groups[-1][name] = tensor
        end = max(end, own_end)
    return groups


def _extent(tensor):
    """Return where a tensor begins and ends in its storage, in bytes."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + (reach * tensor.element_size() if tensor.numel() else 0)


def _reserving():
    library = CACHE / f"{build_runtime().parent.name}.so"
    if not library.is_file():
        _link([str(build_runtime())], library, ())
    loaded = ctypes.CDLL(str(library))
    loaded.pkv_reserve.restype = ctypes.c_void_p
    loaded.pkv_reserve.argtypes = [ctypes.c_uint64]
    loaded.pkv_release.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return loaded


def _release(library, reserved):
    for address, num_bytes in reserved:
        library.pkv_release(address, num_bytes)
