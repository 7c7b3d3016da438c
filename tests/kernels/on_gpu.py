"""The package on a real GPU, for tests whose tensors lie on the CPU: what operations touch goes over and comes back."""

import contextlib
import functools

import torch
from host_device import attention

import pagedkv.attention
import pagedkv.kv_cache


class Copies:
    """Tensors on another device that lie in their memory, and share it, as the originals do.

    Parameters
    ----------
    device : str
        Where the copies are.
    """

    def __init__(self, device="cuda"):
        self._device = device
        self._storages = {}

    def of(self, array):
        """Return the copy of a tensor or of an array of NumPy; of anything else itself."""
        if not hasattr(array, "shape"):
            return array
        tensor = torch.as_tensor(array)
        if tensor.numel() == 0:
            return tensor.to(self._device)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage.data_ptr()] = whole, whole.to(self._device, copy=True)
        _, copy = self._storages[storage.data_ptr()]
        view = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return view.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def bring_back(self):
        """Write the memory of all copies to that of the originals."""
        for whole, copy in self._storages.values():
            whole.copy_(copy)


class CudaOnGpu:
    """The package itself, with tensors on the GPU; or attention by one kernel, keys cut at multiples of `piece`."""

    default_dtype = torch.bfloat16

    def __init__(self, kernel=None, piece=None, device="cuda"):
        self._kernel = kernel
        self._piece = piece
        self._device = device

    def in_place_of_gpu(self):
        """Change nothing: the GPU is there."""
        return contextlib.nullcontext()

    def paged_attention(self, *arrays, out=None, **options):
        """Compute attention; arrays may be NumPy's."""
        attend = functools.partial(attention.paged_attention, self, kernel=self._kernel, piece=self._piece)
        copies = Copies(self._device)
        # The block table goes over; lengths, starts and rows are the host's, and trees too.
        moved = [copies.of(array) for array in arrays[:4]]
        moved += [None if array is None else torch.as_tensor(array) for array in arrays[4:]]
        options = {name: value if "tree" in name else copies.of(value) for name, value in options.items()}
        result = attend(*moved, out=copies.of(out), **options)
        if out is not None:
            copies.bring_back()
        if isinstance(result, tuple):
            return tuple(part.cpu() for part in result) if out is None else (out, result[1].cpu())
        return result.cpu() if out is None else out

    def merge_states(self, *states):
        """Join the results of two attentions."""
        copies = Copies(self._device)
        return tuple(part.cpu() for part in pagedkv.attention.merge_states(*map(copies.of, states)))

    def append_kv(self, *arrays, **options):
        """Write keys and values."""
        self._in_place(pagedkv.kv_cache.append_kv, arrays, options)

    def copy_blocks(self, *arrays):
        """Copy blocks."""
        self._in_place(pagedkv.kv_cache.copy_blocks, arrays, {})

    def move_kv(self, *arrays, **options):
        """Move tokens."""
        self._in_place(pagedkv.kv_cache.move_kv, arrays, options)

    def gather_kv(self, *arrays, out=None, **options):
        """Collect keys and values."""
        copies = Copies(self._device)
        options = {name: copies.of(value) for name, value in options.items()}
        if out is None:
            return tuple(part.cpu() for part in pagedkv.kv_cache.gather_kv(*map(copies.of, arrays), **options))
        pagedkv.kv_cache.gather_kv(*map(copies.of, arrays), **options, out=[copies.of(part) for part in out])
        copies.bring_back()
        return tuple(out)

    def _in_place(self, operation, arrays, options):
        copies = Copies(self._device)
        operation(*map(copies.of, arrays), **{name: copies.of(value) for name, value in options.items()})
        copies.bring_back()
