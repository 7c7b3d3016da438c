"""The last step to a GPU, with CuPy and torch's devices replaced: what is loaded when, and what is handed on."""

import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagedkv.exceptions import KernelNotCompiledError, UnsupportedError
from pagedkv.kernels import cuda_launcher
from pagedkv.kernels.cuda_launcher import CudaLauncher
from pagedkv.kernels.launch import Launch
from pagedkv.kernels.params import PARAMS
from pagedkv.kernels.variants import copying, paged_decode

SMALL = copying("copy_blocks", 16)
LARGE = paged_decode("bfloat16", "bfloat16", 128, features=False)


class Kernel:
    """Records how it is launched."""

    def __init__(self, path, name):
        self.path, self.name = path, name
        self.launched = []
        self.max_dynamic_shared_size_bytes = None

    def __call__(self, grid, block, arguments, *, shared_mem, stream):
        self.launched.append((grid, block, arguments, shared_mem, stream.ptr))


class Machine:
    """Two GPUs, their streams, and the kernels that were loaded, by device."""

    def __init__(self):
        self.current, self.capability, self.capturing = 0, (9, 0), False
        self.loaded, self.on_disk, self.compiled = [], True, []

    def module(self, path):
        return SimpleNamespace(get_function=lambda name: self._load(path, name))

    def _load(self, path, name):
        self.loaded.append((self.current, Kernel(path, name)))
        return self.loaded[-1][1]

    def device(self, index):
        machine = self

        class Current:
            def __enter__(self):
                self.before, machine.current = machine.current, index

            def __exit__(self, *_):
                machine.current = self.before

        return Current()

    def find(self, kernel, arch, macros):
        return SimpleNamespace(path=f"{kernel}-{arch}.cubin") if self.on_disk else None

    def compile(self, kernel, arch, macros):
        self.compiled.append((kernel, arch))
        return SimpleNamespace(path=f"new-{kernel}-{arch}.cubin")


@pytest.fixture
def machine(monkeypatch):
    """Return a machine in the place of this one's GPUs."""
    machine = Machine()
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: machine.current), Device=machine.device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=machine.module))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(major=machine.capability[0], minor=machine.capability[1], multi_processor_count=132),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=1000 + index))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    monkeypatch.setattr(cuda_launcher, "find_kernel", machine.find)
    monkeypatch.setattr(cuda_launcher, "compile_kernel", machine.compile)
    monkeypatch.delenv("PAGEDKV_COMPILE", raising=False)
    return machine


def launch_of(variant, grid=7):
    return Launch(variant, grid, np.zeros(1, PARAMS[variant.kernel]), {}, frozenset())


def test_launch_hands_on_the_struct_and_the_shape_on_torchs_stream_of_the_device(machine):
    launcher, launch = CudaLauncher(1), launch_of(LARGE)
    launcher.launch(launch)
    ((device, kernel),) = machine.loaded
    ((grid, block, arguments, shared_bytes, stream),) = kernel.launched
    assert (device, kernel.name, kernel.path) == (1, "paged_decode", "paged_decode-sm_90a.cubin")
    assert (grid, block, shared_bytes, stream) == ((7,), (LARGE.threads,), LARGE.shared_bytes, 1001)
    assert arguments == (launch.params,)
    assert machine.current == 0


def test_kernel_is_loaded_once_and_asks_for_its_shared_memory(machine):
    launcher = CudaLauncher(0)
    for variant in (LARGE, SMALL, LARGE):
        launcher.launch(launch_of(variant))
    kernels = {kernel.name: kernel for _, kernel in machine.loaded}
    assert len(machine.loaded) == len(kernels) == 2
    assert kernels["paged_decode"].max_dynamic_shared_size_bytes == LARGE.shared_bytes > 48 * 1024
    assert kernels["copy_blocks"].max_dynamic_shared_size_bytes is None
    assert machine.compiled == []


def test_kernel_that_was_loaded_ahead_is_launched_without_another_look(machine):
    launcher = CudaLauncher(1)
    launcher.load(SMALL)
    launcher.load(SMALL)
    machine.on_disk = False
    launcher.launch(launch_of(SMALL))
    ((device, kernel),) = machine.loaded
    assert (device, len(kernel.launched), machine.compiled) == (1, 1, [])


def test_each_device_loads_its_own(machine):
    for index in (0, 1):
        CudaLauncher(index).launch(launch_of(SMALL))
    assert [device for device, _ in machine.loaded] == [0, 1]


def test_kernel_that_is_not_on_disk_is_compiled_and_the_log_says_so(machine, caplog):
    machine.on_disk = False
    with caplog.at_level(logging.WARNING, "pagedkv.kernels"):
        CudaLauncher(0).launch(launch_of(SMALL))
    assert machine.compiled == [("copy_blocks", "sm_90a")]
    assert machine.loaded[0][1].path == "new-copy_blocks-sm_90a.cubin"
    assert "compiling copy_blocks-16 for sm_90a, which `pagedkv warmup` would have done" in caplog.text


def test_kernel_that_is_not_on_disk_is_an_error_where_compiling_is_forbidden(machine, monkeypatch):
    machine.on_disk = False
    monkeypatch.setenv("PAGEDKV_COMPILE", "never")
    with pytest.raises(KernelNotCompiledError, match="copy_blocks-16: .* `pagedkv warmup --arch sm_90a`"):
        CudaLauncher(0).launch(launch_of(SMALL))
    assert machine.compiled == machine.loaded == []


def test_kernel_is_loaded_before_a_graph_is_captured_or_not_at_all(machine):
    launcher = CudaLauncher(0)
    launcher.launch(launch_of(LARGE))
    machine.capturing = True
    launcher.launch(launch_of(LARGE))
    with pytest.raises(
        KernelNotCompiledError, match="copy_blocks-16: expected a kernel that was loaded before a graph"
    ):
        launcher.launch(launch_of(SMALL))
    assert [kernel.name for _, kernel in machine.loaded] == ["paged_decode"]


def test_error_of_the_driver_reaches_the_caller(machine, monkeypatch):
    def refuse(*_arguments, **_options):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")

    monkeypatch.setattr(Kernel, "__call__", refuse)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        CudaLauncher(0).launch(launch_of(SMALL))


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((8, 7), "sm_86"), ((9, 0), "sm_90a")])
def test_launcher_takes_code_that_the_device_runs(machine, capability, arch):
    machine.capability = capability
    assert CudaLauncher(0).arch == arch


def test_device_before_ampere_is_refused_by_its_capability(machine):
    machine.capability = (7, 5)
    with pytest.raises(UnsupportedError, match="expected compute capability 8.0 or later, found 7.5 in cuda:0"):
        CudaLauncher(0)


def test_cupy_that_is_missing_is_named_with_the_extra_that_brings_it(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"pagedkv\[cuda13\]"):
        CudaLauncher(0)
