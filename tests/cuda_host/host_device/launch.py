"""Run a kernel on the host and say what it did, or what was wrong with it."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

SCHEDULES = {"uniform": 0, "warp-priority": 1}
MESSAGE_BYTES = 4096


class KernelFault(AssertionError):
    """A kernel broke a rule; the message says which, where and by which thread."""


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("grid_x", "grid_y", "grid_z", "threads", "shared_bytes", "count")),
        ("seed", ctypes.c_uint64),
        ("schedule", ctypes.c_int32),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("writable", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("bytes_read", "bytes_written", "sectors", "least_sectors")),
    )


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("switches", "collectives", "products", "barriers", "matrix_loads", "bank_conflicts")
    )


@dataclass(frozen=True)
class Traffic:
    """What a launch moved of a tensor; sectors are of 32 bytes, per access of a warp."""

    bytes_read: int
    bytes_written: int
    sectors: int
    least_sectors: int


@dataclass(frozen=True)
class Launched:
    """What a launch did."""

    traffic: Mapping[str, Traffic]
    products: int
    barriers: int
    matrix_loads: int
    bank_conflicts: int


def launch(kernel, params, grid, threads, shared_bytes, regions, *, seed=1, schedule="uniform", count=False):
    """Run a kernel.

    Parameters
    ----------
    kernel : ctypes.CDLL
        What `build_kernel` returned.
    params : bytes
        The kernel's parameter struct.
    grid : tuple of int
        Blocks in x, and in y and z where there are more.
    threads, shared_bytes : int
        Of a block.
    regions : sequence of Region
        The tensors that the kernel may touch.
    seed : int
        What the order of blocks and threads is drawn from.
    schedule : {"uniform", "warp-priority"}
        Any thread that can run, or one of the warp of the highest priority.
    count : bool
        Whether to count traffic.

    Raises
    ------
    KernelFault
        If the kernel broke a rule.
    """
    if len(params) != kernel.pkv_params_bytes():
        raise KernelFault(f"parameters: packed {len(params)} bytes, the kernel takes {kernel.pkv_params_bytes()}")
    x, y, z = (*grid, 1, 1)[:3]
    how = _Launch(x, y, z, threads, shared_bytes, count, seed, SCHEDULES[schedule])
    tensors = (_Tensor * len(regions))(*((r.name.encode(), r.address, r.num_bytes, r.writable) for r in regions))
    counts, message = _Counts(), ctypes.create_string_buffer(MESSAGE_BYTES)
    failed = kernel.pkv_launch(
        params, ctypes.byref(how), tensors, len(regions), ctypes.byref(counts), message, MESSAGE_BYTES
    )
    if failed:
        raise KernelFault(message.value.decode())
    traffic = {
        tensor.name.decode(): Traffic(tensor.bytes_read, tensor.bytes_written, tensor.sectors, tensor.least_sectors)
        for tensor in tensors
    }
    return Launched(traffic, counts.products, counts.barriers, counts.matrix_loads, counts.bank_conflicts)
