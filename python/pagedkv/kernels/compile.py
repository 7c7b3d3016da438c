"""Compile a kernel of `cuda/` to a cubin and keep it on disk.

A kernel is one file `cuda/NAME.cu` with one `extern "C"` entry NAME, specialised by macros; a variant is a set of
macro values. What a cubin depends on is in the name of its file: the source, *all* headers, the options and the
compiler. So an edited header is never answered with stale code, and nothing has to be invalidated.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pagedkv.kernels.cubin import Resources, read_resources
from pagedkv.kernels.nvrtc import Compiler, load_compiler

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")

OPTIONS = ("-std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes
    ----------
    kernel : str
        The kernel, its entry.
    path : Path
        The cubin, for `cupy.RawModule(path=...)` or `cuModuleLoad`.
    log : str
        What the compiler said, ptxas's resource usage included.
    """

    kernel: str
    path: Path
    log: str

    @cached_property
    def registers(self) -> int:
        """Registers per thread."""
        return self._count("Used {} registers")

    @cached_property
    def spill_bytes(self) -> int:
        """Bytes per thread that did not fit into registers: stores and loads together."""
        return self._count("{} bytes spill stores") + self._count("{} bytes spill loads")

    @cached_property
    def resources(self) -> Resources:
        """What the cubin itself says that the kernel uses."""
        return read_resources(self.path.read_bytes(), self.kernel)

    def _count(self, phrase: str) -> int:
        found = re.search(phrase.format(r"(\d+)"), self.log)
        if found is None:
            raise ValueError(f"the compiler's log does not say {phrase.format('N')!r}: {self.log}")
        return int(found[1])


def kernel_names() -> list[str]:
    """Return the names of all kernels, sorted."""
    return sorted(path.stem for path in source_folder().glob("*.cu"))


def source_folder() -> Path:
    """Return the folder of the CUDA sources: `cuda/` of a checkout that the package runs from, else the wheel's copy.

    In a checkout the package also has a copy, as old as the last build; reading it would hide an edit.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    return checkout / "cuda" if (checkout / "pyproject.toml").is_file() else package / "cuda"


def cache_folder() -> Path:
    """Return the folder of compiled kernels.

    `$PAGEDKV_CACHE_DIR/kernels`; without that variable, `pagedkv/kernels` in `$XDG_CACHE_HOME` or `~/.cache`.
    """
    if folder := os.environ.get("PAGEDKV_CACHE_DIR"):
        return Path(folder) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv" / "kernels"


def compile_kernel(
    name: str, arch: str, macros: Mapping[str, int | str] | None = None, *, sources: Path | None = None
) -> Cubin:
    """Compile a variant of a kernel for an architecture, or find it on disk. Needs no GPU and no driver.

    Parameters
    ----------
    name : str
        The kernel: the name of its file and of its entry.
    arch : str
        A real architecture: "sm_80", "sm_90a".
    macros : mapping of str to int or str, optional
        The macros that the kernel's header comment names, with their values.
    sources : Path, optional
        The folder of the sources; by default `source_folder()`.

    Returns
    -------
    Cubin
        The compiled kernel. A failed compilation leaves nothing on disk.

    Raises
    ------
    ValueError
        If there is no such kernel, or if `arch` is not written like one.
    NvrtcNotFoundError
        If NVRTC is not installed.
    CompileError
        If the kernel does not compile for this architecture or with these macros.

    Notes
    -----
    About 0.1 s to 2 s for a compilation, below a millisecond when the cubin is on disk. Processes may compile the
    same variant at the same time: files appear whole or not at all.
    """
    compiler = load_compiler()
    job = _Job.of(name, arch, macros or {}, sources, compiler)
    if (found := job.find()) is not None:
        return found
    cubin, log = compiler.compile(job.source, f"{name}.cu", job.headers, job.options)
    _write_whole(job.path.with_suffix(".log"), log.encode())  # first, for a cubin on disk promises its log
    _write_whole(job.path, cubin)
    return Cubin(name, job.path, log)


def find_kernel(name: str, arch: str, macros: Mapping[str, int | str] | None = None) -> Cubin | None:
    """Return a variant of a kernel that is on disk, and None where it would have to be compiled.

    Parameters and errors are those of `compile_kernel`. Where NVRTC is not installed, cubins that it made are found all
    the same if `PAGEDKV_NVRTC_VERSION` names its version as `pagedkv warmup` printed it.
    """
    version = os.environ.get("PAGEDKV_NVRTC_VERSION")
    compiler = load_compiler() if version is None else Compiler("", version, None)
    return _Job.of(name, arch, macros or {}, None, compiler).find()


@dataclass(frozen=True)
class _Job:
    """A compilation: all that it depends on, and where its result is."""

    name: str
    source: str
    headers: Mapping[str, str]
    options: tuple[str, ...]
    path: Path

    @classmethod
    def of(
        cls, name: str, arch: str, macros: Mapping[str, int | str], sources: Path | None, compiler: Compiler
    ) -> "_Job":
        if not re.fullmatch(r"sm_\d+[af]?", arch):
            raise ValueError(f'arch must be like "sm_80" or "sm_90a", got {arch!r}')
        folder = source_folder() if sources is None else sources
        file = folder / f"{name}.cu"
        if not file.is_file():
            raise ValueError(f"no kernel {name!r} in {folder}")
        source = file.read_text()
        headers = {path.name: path.read_text() for path in sorted((folder / "include").glob("*.cuh"))}
        options = (*OPTIONS, f"-arch={arch}", *(f"-D{macro}={value}" for macro, value in sorted(macros.items())))
        parts = (compiler.version, options, source, sorted(headers.items()))
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        return cls(name, source, headers, options, cache_folder() / f"{name}-{arch}-{key[:32]}.cubin")

    def find(self) -> Cubin | None:
        if not self.path.is_file():
            return None
        return Cubin(self.name, self.path, self.path.with_suffix(".log").read_text())


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
