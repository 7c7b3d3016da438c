"""Kernels of `cuda/` on the CPU: compiled by g++ with a checked vocabulary, run thread by thread.

`build_kernel` compiles a variant, `Memory` holds tensors far apart, `launch` runs a kernel or raises `KernelFault`.
"""

from host_device.build import build_kernel, missing_tools
from host_device.device import HostDevice
from host_device.launch import KernelFault, Launched, launch
from host_device.memory import Memory

__all__ = ["HostDevice", "KernelFault", "Launched", "Memory", "build_kernel", "launch", "missing_tools"]
