"""Launches on an NVIDIA GPU: cubins of our own cache, loaded and launched by CuPy on torch's current stream."""

import functools
import logging
import os
from typing import Any

import torch

from pagedkv.exceptions import KernelNotCompiledError, UnsupportedError
from pagedkv.kernels.compile import Cubin, compile_kernel, find_kernel
from pagedkv.kernels.launch import Launch
from pagedkv.kernels.variants import Variant
from pagedkv.kernels.warmup import arch_of_capability

_log = logging.getLogger("pagedkv.kernels")

# Dynamic shared memory that a kernel has without asking: CUDA C++ Programming Guide, "Shared Memory".
_SHARED_BYTES_UNASKED = 48 * 1024
_OLDEST = (8, 0)


@functools.cache
def launcher_of_device(index: int) -> "CudaLauncher":
    """Return the launcher of a device, the same one every time."""
    return CudaLauncher(index)


class _Stream:
    """What CuPy asks of a stream: its handle."""

    __slots__ = ("ptr",)

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class CudaLauncher:
    """Launches on one GPU.

    Parameters
    ----------
    index : int
        The device, as torch counts.

    Raises
    ------
    ImportError
        If CuPy is not installed.
    UnsupportedError
        If the device is older than the instructions that the kernels use.

    Notes
    -----
    A kernel is loaded when it is first launched. If it is not on disk then, it is compiled, which takes up to two
    seconds and is told to the log `pagedkv.kernels` as a warning; `pagedkv warmup` does it beforehand. With
    `PAGEDKV_COMPILE=never` in the environment, and while a graph is being captured, it is an error instead.
    """

    def __init__(self, index: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise ImportError('kernels on a GPU need CuPy: pip install "pagedkv[cuda13]" (or cuda12)') from error
        self._cupy = cupy
        self._index = index
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        if capability < _OLDEST:
            found = f"{capability[0]}.{capability[1]} in cuda:{index}"
            raise UnsupportedError(f"device: expected compute capability 8.0 or later, found {found}")
        self.arch = arch_of_capability(f"{capability[0]}{capability[1]}")
        self.num_multiprocessors: int = properties.multi_processor_count
        self._kernels: dict[Variant, Any] = {}

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def launch(self, launch: Launch) -> None:
        """Run a kernel on torch's current stream of the device.

        Raises
        ------
        KernelNotCompiledError
            If the kernel would have to be compiled, and must not be.
        cupy.cuda.driver.CUDADriverError
            If the launch failed.
        """
        stream = _Stream(torch.cuda.current_stream(self._index).cuda_stream)
        if self._cupy.cuda.runtime.getDevice() == self._index:
            self._launch(launch, stream)
            return
        with self._cupy.cuda.Device(self._index):
            self._launch(launch, stream)

    def _launch(self, launch: Launch, stream: _Stream) -> None:
        variant = launch.variant
        kernel = self._kernels.get(variant)
        if kernel is None:
            kernel = self._load(variant)
        kernel((launch.grid,), (variant.threads,), (launch.params,), shared_mem=variant.shared_bytes, stream=stream)

    def load(self, variant: Variant) -> None:
        """Load a kernel now, and not at its first launch.

        Raises
        ------
        KernelNotCompiledError
            As for `launch`.
        """
        with self._cupy.cuda.Device(self._index):
            if variant not in self._kernels:
                self._load(variant)

    def _load(self, variant: Variant) -> Any:
        if self.is_capturing():
            raise KernelNotCompiledError(
                f"{variant.name}: expected a kernel that was loaded before a graph is captured, found one that was not"
            )
        kernel = self._cupy.RawModule(path=str(self._cubin(variant).path)).get_function(variant.kernel)
        if variant.shared_bytes > _SHARED_BYTES_UNASKED:
            kernel.max_dynamic_shared_size_bytes = variant.shared_bytes
        self._kernels[variant] = kernel
        return kernel

    def _cubin(self, variant: Variant) -> Cubin:
        found = find_kernel(variant.kernel, self.arch, variant.macros)
        if found is not None:
            return found
        if os.environ.get("PAGEDKV_COMPILE") == "never":
            raise KernelNotCompiledError(
                f"{variant.name}: expected to be compiled for {self.arch}, because PAGEDKV_COMPILE=never, found not: "
                f"`pagedkv warmup --arch {self.arch}` does it"
            )
        _log.warning("compiling %s for %s, which `pagedkv warmup` would have done", variant.name, self.arch)
        return compile_kernel(variant.kernel, self.arch, variant.macros)
