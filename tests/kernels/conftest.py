"""Fixtures of kernel tests: backends, caches and batches."""

import contextlib
import functools

import pytest
import torch
from backends import CUDA, CUDA_KERNELS, GPU_KERNELS, Cpu, CudaOnHost, backends, lacks
from batches import assert_matches_oracle, make_batch, make_pairs, make_pool, pack
from host_device import HostDevice
from on_gpu import CudaOnGpu

from pagedkv.attention import instruction_sets


def pytest_collection_modifyitems(config, items):
    """Leave out what the CUDA kernels refuse."""
    kept, refused = [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        (refused if lacks(params) else kept).append(item)
    if refused:
        config.hook.pytest_deselected(items=refused)
        items[:] = kept


@pytest.fixture(params=backends(instruction_sets(), CUDA_KERNELS, GPU_KERNELS))
def backend(request, monkeypatch):
    """Return each backend of attention."""
    if request.param in CUDA_KERNELS:
        kernel = CUDA_KERNELS[request.param]
        return CudaOnHost(kernel, piece=kernel and 256)
    if request.param in GPU_KERNELS:
        kernel = GPU_KERNELS[request.param]
        return CudaOnGpu(kernel, piece=kernel and 256)
    monkeypatch.setenv("PAGEDKV_CPU_ISA", request.param)
    return Cpu()


@pytest.fixture(params=backends(["cpu"], [CUDA], ["gpu"]))
def operations(request):
    """Return each backend of the cache operations."""
    return {CUDA: CudaOnHost, "gpu": CudaOnGpu}.get(request.param, Cpu)()


@pytest.fixture(params=backends([], [CUDA], ["gpu"]))
def place(request):
    """Return where operations are launched, and the name of the device there."""
    if request.param == "gpu":
        return contextlib.nullcontext(), "cuda"
    return HostDevice().in_place_of_gpu(), "cpu"


@pytest.fixture
def paged_attention(backend):
    """Return attention of each backend."""
    return backend.paged_attention


@pytest.fixture(name="assert_matches_oracle")
def assert_matches_oracle_fixture(paged_attention):
    """Return the function that compares each backend with the oracle."""
    return functools.partial(assert_matches_oracle, paged_attention)


@pytest.fixture(params=instruction_sets())
def isa(request, monkeypatch):
    """Force each instruction set that this processor has."""
    monkeypatch.setenv("PAGEDKV_CPU_ISA", request.param)
    return request.param


@pytest.fixture(name="make_batch")
def make_batch_fixture(request):
    """Return the function that makes batches, by default of a type that the backend of the test has."""
    if "backend" not in request.fixturenames:
        return make_batch
    dtype = request.getfixturevalue("backend").default_dtype
    return lambda *sequences, **sizes: make_batch(*sequences, **{"dtype": dtype} | sizes)


@pytest.fixture(name="pack")
def pack_fixture():
    """Return the function that moves a batch to a packed cache."""
    return pack


@pytest.fixture(name="make_packed_batch")
def make_packed_batch_fixture():
    """Return the function that makes batches over packed caches."""
    return lambda *sequences, **sizes: pack(make_batch(*sequences, **sizes), layout=sizes.get("layout", "block"))


@pytest.fixture(name="make_pool")
def make_pool_fixture():
    """Return the function that makes pools."""
    return make_pool


@pytest.fixture(name="make_pairs")
def make_pairs_fixture():
    """Return the function that makes pairs of blocks."""
    return make_pairs


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def dtype(request):
    """Return each element type that moves as bytes."""
    return request.param


@pytest.fixture
def part_of_memory():
    """Return memory filled with -1, and a pool that is a part of it, with gaps in four dimensions."""
    memory = torch.full((5, 3, 2, 2, 4, 10), -1.0)
    return memory, memory[:, 1:, :, :, ::2, 1:9]


@pytest.fixture
def num_threads(request, monkeypatch):
    """Set the number of threads that operations use."""
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(request.param))
    return request.param
