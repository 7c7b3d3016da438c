"""Compile kernels before they are needed: `warm_up`, and the command `pagedkv warmup`."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pagedkv.kernels.compile import ARCHITECTURES, Cubin, cache_folder, compile_kernel
from pagedkv.kernels.nvrtc import load_compiler
from pagedkv.kernels.variants import ELEMENT_BYTES, QUERY_DTYPES, VARIANTS, Variant, head_dim_class, variants_of


def warm_up(variants: Iterable[Variant], arch: str, *, num_threads: int = 1) -> Iterator[tuple[Variant, Cubin]]:
    """Compile variants for an architecture, those that are on disk already excepted.

    Parameters
    ----------
    variants : iterable of Variant
        What to compile, such as `variants_of` names for a model.
    arch : str
        A real architecture: "sm_80", "sm_90a".
    num_threads : int
        Compilations side by side.

    Yields
    ------
    variant, cubin
        Each of the variants, in their order.
    """

    def compiled(variant: Variant) -> tuple[Variant, Cubin]:
        return variant, compile_kernel(variant.kernel, arch, variant.macros)

    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(compiled, variants)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Compile the CUDA kernels and keep them on disk, so that no request waits for them. Needs NVRTC, and no GPU if "
        "--arch is given."
    )
    parser.add_argument("--arch", nargs="+", metavar="SM", help="such as sm_90a; by default that of the first GPU")
    parser.add_argument("--dtype", choices=QUERY_DTYPES, help="of the queries; by default both")
    parser.add_argument("--kv-dtype", choices=ELEMENT_BYTES, help="of the cache; by default all")
    parser.add_argument("--head-dim", type=int, nargs="+", metavar="N", help="by default all classes up to 256")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compilations side by side")


def run(arguments: argparse.Namespace) -> int:
    """Compile what was asked for, and say what was done."""
    archs = arguments.arch or [_arch_of_device()]
    if unknown := [arch for arch in archs if arch not in ARCHITECTURES]:
        raise ValueError(f"--arch: expected {', '.join(ARCHITECTURES)}, found {', '.join(unknown)}")
    wanted = _wanted(arguments)
    for arch in archs:
        for variant, cubin in warm_up(wanted, arch, num_threads=arguments.threads):
            sys.stdout.write(f"{arch} {variant.name}: {cubin.registers} registers\n")
    sys.stdout.write(f"{len(wanted) * len(archs)} kernels in {cache_folder()}, by NVRTC {load_compiler().version}\n")
    return 0


def _wanted(arguments: argparse.Namespace) -> list[Variant]:
    if arguments.dtype is arguments.kv_dtype is arguments.head_dim is None:
        return list(VARIANTS)
    classes = {head_dim_class(head_dim) for head_dim in arguments.head_dim} if arguments.head_dim else None
    return variants_of(arguments.dtype, arguments.kv_dtype, classes)


def _arch_of_device() -> str:
    """Return the architecture of the current GPU; the one with all of Hopper's instructions for a Hopper."""
    import cupy

    capability = str(cupy.cuda.Device().compute_capability)
    return arch_of_capability(capability)


def arch_of_capability(capability: str) -> str:
    """Return what to compile for a GPU: the newest known architecture that it runs.

    Code of an architecture runs on later ones with the same first number; "a" code on its own alone.

    Parameters
    ----------
    capability : str
        "90", as CuPy says it.
    """
    if capability == "90":
        return "sm_90a"
    known = [arch for arch in ARCHITECTURES if not arch.endswith("a")]
    major = int(capability) // 10
    runs = [arch for arch in known if int(arch[3:]) // 10 == major and int(arch[3:]) <= int(capability)]
    if not runs:
        raise ValueError(
            f"compute capability: expected 8.0 or later of a known kind, found {major}.{int(capability) % 10}"
        )
    return runs[-1]
