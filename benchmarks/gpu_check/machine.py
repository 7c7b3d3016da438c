"""The GPU and what is installed beside it; needs no package."""

import ctypes
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "cupy-cuda13x", "cuda-bindings", "nvidia-cuda-nvrtc", "transformers", "numpy", "pytest")
PACKAGES += ("flashinfer-python",)
_NAME, _VERSION, _CAPABILITY = 256, 2, (75, 76)  # bytes of a name; cuDeviceGetAttribute's compute capability


class NoGpuError(Exception):
    """There is no GPU; the message says what is missing."""


def find_gpu() -> dict[str, str]:
    """Return name, compute capability and driver of the first GPU.

    Raises
    ------
    NoGpuError
        If there is none.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoGpuError(f"no NVIDIA driver: {error}") from error
    if status := driver.cuInit(0):
        raise NoGpuError(f"the NVIDIA driver finds no GPU: cuInit gave {status}")
    count, device, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_NAME)
    driver.cuDeviceGetCount(ctypes.byref(count))
    if not count.value:
        raise NoGpuError("the NVIDIA driver finds no GPU: cuDeviceGetCount gave 0")
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, _NAME, device)
    capability = []
    for attribute in _CAPABILITY:
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    driver.cuDriverGetVersion(ctypes.byref(number))
    cuda = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    return {
        "device": name.value.decode(),
        "compute_capability": ".".join(map(str, capability)),
        "driver": f"{cuda}, {_kernel_driver()}",
    }


def describe(gpu: dict[str, str]) -> dict[str, Any]:
    """Return the GPU, and the versions of what the check uses."""
    return gpu | {"python": platform.python_version(), "packages": {name: _version(name) for name in PACKAGES}}


def _kernel_driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return "kernel module unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
