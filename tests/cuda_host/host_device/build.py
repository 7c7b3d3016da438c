"""Compile a variant of a kernel with g++, once, and load it."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pagedkv.kernels.compile import source_folder

HERE = Path(__file__).resolve().parents[1]
RUNTIME = HERE / "runtime"
CACHE = HERE.parents[1] / "target" / "cuda_host"

COMMON = ("-std=c++17", "-g", "-fPIC", "-march=native", "-Wall", "-Wextra", "-Werror")
RUNTIME_OPTIONS = (*COMMON, "-O3")  # never instrumented: only kernels are under test
# Unused: a kernel's unroll pragmas, and what a macro leaves out of a variant.
KERNEL_OPTIONS = (*COMMON, "-O1", "-Wno-unknown-pragmas", "-Wno-unused", "-fno-sanitize-recover=undefined")
UBSAN = ("-fsanitize=undefined",)
ASAN = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer")


def missing_tools():
    """Return why kernels can't be run on this machine, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the host shim switches fibers in x86-64 assembly; this is {platform.machine()}"
    return None if shutil.which("g++") else "needs g++"


def build_kernel(
    name: str, macros: Mapping[str, int | str] | None = None, *, edits=(), asan: bool = False, sources=None
):
    """Compile a variant, or find it, and return the library that holds it.

    An edit is a text of the kernel's file or of a header, and what takes its place; it must stand there once.
    """
    return _build(name, tuple(sorted((macros or {}).items())), tuple(edits), asan, sources)


@functools.cache
def _build(name, macros, edits, asan, sources):
    files = _edited(read_sources(name, sources), edits)
    sanitizers = ASAN if asan else UBSAN
    defines = [f"-D{macro}={value}" for macro, value in macros]
    options = [*KERNEL_OPTIONS, *sanitizers, *defines, *_entry(name)]
    runtime = build_runtime()
    folder = CACHE / f"{name}-{_key(files, options, runtime.name)}"
    library = folder / "kernel.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
        part = folder / f"{os.getpid()}.o"
        _run(["g++", *options, "-c", "entry.cpp", "-o", str(part)], folder)  # from there: short names in messages
        _link([str(part), str(runtime)], library, ASAN[:1] if asan else ())
        part.unlink()
    return ctypes.CDLL(str(library))


@functools.cache
def build_runtime() -> Path:
    """Compile the runtime, or find it, and return its object file."""
    files = {path.name: path.read_text() for path in sorted(RUNTIME.iterdir())}
    folder = CACHE / f"runtime-{_key(files, RUNTIME_OPTIONS, _compiler_version())}"
    whole = folder / "runtime.o"
    if not whole.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        parts = []
        for source in sorted(RUNTIME.glob("*.cpp")):
            parts.append(str(folder / f"{source.stem}-{os.getpid()}.o"))
            _run(["g++", *RUNTIME_OPTIONS, "-c", str(source), "-o", parts[-1]])
        unfinished = folder / f"{os.getpid()}.o"
        _run(["ld", "-r", *parts, "-o", str(unfinished)])
        unfinished.replace(whole)
    return whole


@functools.cache
def read_sources(name, folder=None):
    """Return the texts of a kernel, of its headers and of what they are compiled with, by file name.

    The kernel's folder is `cuda/` unless another one is given; the headers are always those of `cuda/include/`. Nothing
    is read twice in a process.
    """
    folder = source_folder() if folder is None else folder
    headers = [*(source_folder() / "include").glob("*.cuh"), *(HERE / "include").glob("*.cuh"), *RUNTIME.glob("*.h")]
    headers += [HERE / "entry.cpp", folder / f"{name}.cu"]
    return {path.name: path.read_text() for path in sorted(headers)}


def _entry(name):
    return [f'-DPKV_KERNEL="{name}.cu"', f"-DPKV_ENTRY={name}", '-DPKV_HOST="host.cuh"']


def _edited(files, edits):
    files = dict(files)
    for old, new in edits:
        counts = {file: text.count(old) for file, text in files.items() if old in text}
        if sum(counts.values()) != 1:
            raise ValueError(f"an edit must match once, this one matches {counts}: {old!r}")
        (file,) = counts
        files[file] = files[file].replace(old, new)
    return files


def _key(files, options, version):
    return hashlib.sha256(repr((sorted(files.items()), list(options), version)).encode()).hexdigest()[:24]


@functools.cache
def _compiler_version():
    # -march=native means another processor on another machine.
    native = subprocess.run(["g++", "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True)
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return hashlib.sha256((version.stdout + native.stdout).encode()).hexdigest()


def _link(parts, library, options):
    unfinished = library.with_suffix(f".{os.getpid()}")
    _run(["g++", "-shared", *options, *parts, "-o", str(unfinished)])
    unfinished.replace(library)


def _run(command, folder=None):
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
