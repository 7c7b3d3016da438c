"""The compile step: what is kept on disk, when it is made anew, and what its errors say."""

import dataclasses
import os
import shutil
import sys

import pytest

from pagedkv.kernels import compile as kernels
from pagedkv.kernels import nvrtc

COPY = {"PKV_ELEMENTS": 0, "PKV_VECTOR_BYTES": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture(scope="module")
def compiler():
    try:
        return nvrtc.load_compiler()
    except nvrtc.NvrtcNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def sources(tmp_path):
    """Return a copy of the sources that a test may edit."""
    return shutil.copytree(kernels.source_folder(), tmp_path / "cuda")


@pytest.mark.usefixtures("compiler")
def test_cubin_comes_from_disk_when_nothing_changed(cache):
    first = kernels.compile_kernel("append_kv", "sm_80", COPY)
    written = {path: path.stat().st_ino for path in cache.iterdir()}
    again = kernels.compile_kernel("append_kv", "sm_80", dict(reversed(COPY.items())))
    assert again == first
    assert {path: path.stat().st_ino for path in cache.iterdir()} == written
    assert sorted(path.suffix for path in written) == [".cubin", ".log"]


@pytest.mark.parametrize("file", ["append_kv.cu", "include/paged_kv.cuh", "include/device.cuh", "include/ptx.cuh"])
@pytest.mark.usefixtures("compiler")
def test_kernel_is_compiled_anew_when_source_or_header_changed(sources, file):
    before = kernels.compile_kernel("append_kv", "sm_80", COPY, sources=sources)
    with (sources / file).open("a") as source:
        source.write("// edited\n")
    assert kernels.compile_kernel("append_kv", "sm_80", COPY, sources=sources).path != before.path


def test_kernel_is_compiled_anew_when_macros_architecture_or_compiler_changed(compiler, monkeypatch):
    paths = {
        kernels.compile_kernel("append_kv", "sm_80", COPY).path,
        kernels.compile_kernel("append_kv", "sm_80", COPY | {"PKV_VECTOR_BYTES": 8}).path,
        kernels.compile_kernel("append_kv", "sm_90a", COPY).path,
    }
    other = dataclasses.replace(compiler, version="99.0")
    monkeypatch.setattr(kernels, "load_compiler", lambda: other)
    paths.add(kernels.compile_kernel("append_kv", "sm_80", COPY).path)
    assert len(paths) == 4


@pytest.mark.parametrize("header", ["<cuda_fp16.h>", "<cstdint>", '"elsewhere.cuh"'])
@pytest.mark.usefixtures("compiler")
def test_compile_error_holds_the_log_when_a_kernel_includes_foreign_headers(sources, cache, header):
    (sources / "greedy.cu").write_text(f'#include {header}\nextern "C" __global__ void greedy() {{}}\n')
    with pytest.raises(nvrtc.CompileError, match=r"greedy\.cu.*sm_80(.|\n)*open source file"):
        kernels.compile_kernel("greedy", "sm_80", sources=sources)
    assert not cache.exists()


@pytest.mark.usefixtures("compiler")
def test_compile_error_says_why_when_nothing_is_to_be_moved():
    with pytest.raises(nvrtc.CompileError, match="elements are converted or vectors moved"):
        kernels.compile_kernel("append_kv", "sm_80", {"PKV_ELEMENTS": 0, "PKV_VECTOR_BYTES": 0})


@pytest.mark.usefixtures("compiler")
def test_nothing_stays_on_disk_when_writing_is_cut_short(cache, monkeypatch):
    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels.compile_kernel("append_kv", "sm_80", COPY)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("arch", ["sm80", "compute_80", "sm_90b", "sm_80 -G", ""])
def test_value_error_names_the_architecture_when_it_is_none(arch):
    with pytest.raises(ValueError, match="arch must be like"):
        kernels.compile_kernel("append_kv", arch, COPY)


@pytest.mark.parametrize("name", ["append", "include/device", "../README"])
def test_value_error_names_the_kernel_when_there_is_none(name):
    with pytest.raises(ValueError, match=f"no kernel '{name}'"):
        kernels.compile_kernel(name, "sm_80", COPY)


def test_missing_nvrtc_names_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(nvrtc.NvrtcNotFoundError, match=r"pagedkv\[cuda13\]"):
        nvrtc.load_compiler.__wrapped__()


@pytest.mark.usefixtures("compiler")
def test_kernel_is_found_only_after_it_was_compiled(cache):
    assert kernels.find_kernel("append_kv", "sm_80", COPY) is None
    assert not cache.exists()
    compiled = kernels.compile_kernel("append_kv", "sm_80", COPY)
    assert kernels.find_kernel("append_kv", "sm_80", COPY) == compiled


def test_kernel_is_found_without_nvrtc_when_its_version_is_named(compiler, monkeypatch):
    compiled = kernels.compile_kernel("append_kv", "sm_80", COPY)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setenv("PAGEDKV_NVRTC_VERSION", compiler.version)
    monkeypatch.setattr(kernels, "load_compiler", nvrtc.load_compiler.__wrapped__)
    assert kernels.find_kernel("append_kv", "sm_80", COPY) == compiled
