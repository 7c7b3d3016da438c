"""NVRTC, NVIDIA's runtime compiler, as far as `compile.py` needs it: source text in, a cubin and a log out.

It is asked through `cuda.bindings` and not through CuPy, because CuPy compiles for `sm_90` where a kernel needs
`sm_90a`, wants a device before it compiles, always adds `-ftz=true`, and forgets the headers in its cache key.
"""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class NvrtcNotFoundError(ImportError):
    """The NVRTC library, or a package that finds and calls it, is not installed."""


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
    _nvrtc: Any

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
            status, *_ = self._nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status != 0:
                raise CompileError(f"{name} with {' '.join(options)}: {status.name}\n{log}")
            # NVRTC 13.2 gives a cubin that is one byte short of what its header says, which some tools refuse.
            return self._output(program, "CUBIN") + b"\0", log

    @contextmanager
    def _program(self, source: str, name: str, headers: Mapping[str, str]) -> Iterator[Any]:
        texts = [text.encode() for text in headers.values()]
        names = [header.encode() for header in headers]
        program = self._call("nvrtcCreateProgram", source.encode(), name.encode(), len(headers), texts, names)
        try:
            yield program
        finally:
            self._call("nvrtcDestroyProgram", program)

    def _output(self, program: Any, what: str) -> bytes:
        buffer = bytearray(self._call(f"nvrtcGet{what}Size", program))
        self._call(f"nvrtcGet{what}", program, buffer)
        return bytes(buffer)

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *results = getattr(self._nvrtc, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function} failed: {status.name}")
        return results[0] if results else None


@functools.cache
def load_compiler() -> Compiler:
    """Find and load NVRTC: from the CUDA wheels, a conda environment or a CUDA toolkit.

    Raises
    ------
    NvrtcNotFoundError
        If there is none. The `cuda12` and `cuda13` extras bring it, and so do torch's CUDA wheels.
    """
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as error:
        raise NvrtcNotFoundError(_MISSING) from error
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError as error:
        raise NvrtcNotFoundError(_MISSING) from error
    _, major, minor = nvrtc.nvrtcVersion()
    return Compiler(path, f"{major}.{minor}, {os.stat(path).st_size} bytes", nvrtc)


_MISSING = 'compiling CUDA kernels needs NVRTC: pip install "pagedkv[cuda13]" (or "pagedkv[cuda12]")'
