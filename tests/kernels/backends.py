"""Who computes: the package on the CPU, with each instruction set, or with CUDA kernels on a host that checks them.

A backend has the operations of the package, with their names and arguments.
"""

import functools

import pytest
import torch
from host_device import HostDevice, attention, cache_operations, missing_tools

import pagedkv.attention
import pagedkv.kv_cache

# The package on a GPU, and the same kernel alone: tests marked `gpu`.
GPU_KERNELS = {"gpu": None, "gpu-prefill": "paged_prefill"}
# The package with kernels launched on the host, and the kernel that it seldom chooses, which can compute any batch.
CUDA = "cuda"
CUDA_KERNELS = {CUDA: None, "cuda-prefill": "paged_prefill"}
FLOATS = {torch.float32, torch.float16, torch.bfloat16}
SCHEDULES = ("uniform", "warp-priority")


class Cpu:
    """The package itself."""

    default_dtype = torch.float32
    paged_attention = staticmethod(pagedkv.attention.paged_attention)
    merge_states = staticmethod(pagedkv.attention.merge_states)
    append_kv = staticmethod(pagedkv.kv_cache.append_kv)
    copy_blocks = staticmethod(pagedkv.kv_cache.copy_blocks)
    move_kv = staticmethod(pagedkv.kv_cache.move_kv)
    gather_kv = staticmethod(pagedkv.kv_cache.gather_kv)


class CudaOnHost:
    """The package with kernels launched on the host, under both schedules, which must give the same bits.

    Attention is computed as the package cuts a batch, or by one kernel.
    """

    default_dtype = torch.bfloat16

    def __init__(self, kernel=None, piece=None, **device):
        self._kernel = kernel
        self._piece = piece  # of keys, at whose multiples long sequences are cut
        self._device = device

    def paged_attention(self, *arrays, out=None, **options):
        """Compute attention; arrays may be NumPy's."""
        q, *others = (torch.as_tensor(array) for array in arrays)
        options = {name: _as_vector(value) for name, value in options.items()}
        out = torch.empty_like(q) if out is None else out
        again = self._attend(out.clone(), q, *others, schedule=SCHEDULES[1], **options)
        first = self._attend(out, q, *others, **options)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(_bits(one), _bits(other))
        return first if options.get("return_lse") else first[0]

    def _attend(self, out, *arrays, schedule=SCHEDULES[0], **options):
        device = HostDevice(schedule=schedule, **self._device)
        options |= {"kernel": self._kernel, "piece": self._piece}
        result = attention.paged_attention(device, *arrays, out=out, **options)
        return result if isinstance(result, tuple) else (result,)

    def append_kv(self, *arrays, **options):
        """Write keys and values; caches are modified under the second schedule only where the first agrees."""
        self._twice(functools.partial(cache_operations.append_kv, **options), arrays, (2, 3))

    def merge_states(self, *states):
        """Join the results of two attentions."""
        return self._both(lambda device: attention.merge_states(device, *states))

    def gather_kv(self, *arrays, out=None, **options):
        """Collect keys and values."""
        results = self._both(lambda device: cache_operations.gather_kv(device, *arrays, **options, **_like(out)))
        if out is None:
            return results
        for to, values in zip(out, results, strict=True):
            to.copy_(values)
        return tuple(out)

    def copy_blocks(self, pool, pairs):
        """Copy blocks."""
        self._twice(cache_operations.copy_blocks, (pool, pairs), (0,))

    def move_kv(self, pool, slot_moves, group=0):
        """Move tokens."""
        self._twice(cache_operations.move_kv, (pool, slot_moves, group), (0,))

    def _both(self, operation):
        first, again = (operation(HostDevice(schedule=schedule, **self._device)) for schedule in SCHEDULES)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(_bits(one), _bits(other))
        return tuple(first)

    def _twice(self, operation, arrays, modified):
        arrays = [torch.as_tensor(a) if hasattr(a, "shape") else a for a in arrays]
        before = [arrays[i].clone() for i in modified]
        results = []
        for schedule in SCHEDULES:
            for i, values in zip(modified, before, strict=True):
                arrays[i].copy_(values)
            operation(HostDevice(schedule=schedule, **self._device), *arrays)
            results.append([arrays[i].clone() for i in modified])
        for one, other in zip(*results, strict=True):
            assert torch.equal(_bits(one), _bits(other))


def backends(cpu, cuda, gpu):
    """Return the names of all backends; those that this machine can't run are skipped with the reason."""
    reason = missing_tools()
    skipped = pytest.mark.skipif(reason is not None, reason=str(reason))
    on_host = (pytest.param(name, marks=skipped) for name in cuda)
    return [*cpu, *on_host, *(pytest.param(name, marks=pytest.mark.gpu) for name in gpu)]


def lacks(params):
    """Whether a test's parameters ask of the CUDA kernels what they refuse."""
    stored, of_input = params.get("dtype"), params.get("q_dtype")
    if (
        params.get("backend") in CUDA_KERNELS | GPU_KERNELS
    ):  # attention: no float32, no two float types, no longer heads
        other_float = of_input is not None and {stored, of_input} <= FLOATS and stored != of_input
        return other_float or torch.float32 in (stored, of_input) or params.get("head_dim", 0) > 256
    return False


def _as_vector(value):
    return torch.as_tensor(value).contiguous() if hasattr(value, "shape") else value


def _like(out):
    """Return outputs that lie as those that were given, so that these stay as they are."""
    return {} if out is None else {"out": [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype) for o in out]}


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8)
