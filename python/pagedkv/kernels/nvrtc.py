"""NVRTC, NVIDIA's runtime compiler, as far as `compile.py` needs it: source text in, a cubin and a log out.

The library is asked directly and not through CuPy, because CuPy compiles for `sm_90` where a kernel needs `sm_90a`,
wants a device before it compiles, always adds `-ftz=true`, and forgets the headers in its cache key.
"""

import ctypes
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class NvrtcNotFoundError(ImportError):
    """The NVRTC library, or the package that finds it, is not installed."""


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


@dataclass(frozen=True)
class Compiler:
    """An NVRTC library that has been loaded.

    Attributes
    ----------
    path : str
        The library's file.
    version : str
        "major.minor", and the library's size in bytes: NVRTC itself tells no patch level.
    """

    path: str
    version: str
    _library: ctypes.CDLL

    def compile(self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
        """Compile one source to a cubin. No device and no driver is needed.

        Parameters
        ----------
        source : str
            The text of the source.
        name : str
            Its name in the log.
        headers : mapping of str to str
            Text of every header that it may include, by the name that `#include` gives.
        options : sequence of str
            NVRTC options; `-arch=sm_XX` must be among them, else there is no cubin.

        Returns
        -------
        cubin : bytes
            The compiled code.
        log : str
            What NVRTC and ptxas said.

        Raises
        ------
        CompileError
            If the source does not compile.
        """
        with self._program(source, name, headers) as program:
            encoded = [option.encode() for option in options]
            status = self._library.nvrtcCompileProgram(program, len(encoded), _strings(encoded))
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status != 0:
                raise CompileError(f"{name} with {' '.join(options)}: {self._error(status)}\n{log}")
            return self._output(program, "CUBIN"), log

    @contextmanager
    def _program(self, source: str, name: str, headers: Mapping[str, str]) -> Iterator[ctypes.c_void_p]:
        program = ctypes.c_void_p()
        texts = _strings([text.encode() for text in headers.values()])
        names = _strings([header.encode() for header in headers])
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
            )
        )
        try:
            yield program
        finally:
            self._check(self._library.nvrtcDestroyProgram(ctypes.byref(program)))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(self._library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(self._library[f"nvrtcGet{what}"](program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"NVRTC failed: {self._error(status)}")

    def _error(self, status: int) -> str:
        describe = self._library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        text: bytes = describe(status)
        return text.decode()


@functools.cache
def load_compiler() -> Compiler:
    """Find and load NVRTC: from the CUDA wheels, a conda environment or a CUDA toolkit.

    Raises
    ------
    NvrtcNotFoundError
        If there is none. The `cuda12` and `cuda13` extras bring it, and so do torch's CUDA wheels.
    """
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as error:
        raise NvrtcNotFoundError(_MISSING) from error
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError as error:
        raise NvrtcNotFoundError(_MISSING) from error
    library = ctypes.CDLL(path)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return Compiler(path, f"{major.value}.{minor.value}, {os.stat(path).st_size} bytes", library)


_MISSING = 'compiling CUDA kernels needs NVRTC: pip install "pagedkv[cuda13]" (or "pagedkv[cuda12]")'


def _strings(values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)
