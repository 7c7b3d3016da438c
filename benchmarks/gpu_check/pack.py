"""Pack what a machine with a GPU does not have: a wheel of this checkout, compiled kernels, and the probe."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".gpu"
ARCHITECTURES = ("sm_90", "sm_90a")
LIMIT_BYTES = 64 << 20  # of all that travels: the working tree and this folder


class TooLargeError(Exception):
    """What would travel is larger than what may."""


class OtherSourcesError(Exception):
    """A wheel has other CUDA sources than the checkout, so that it would not find what is compiled here."""


def check_wheel(wheel: Path, sources: Path = ROOT / "cuda") -> None:
    """Refuse a wheel whose CUDA sources are not those of the checkout."""
    own = {path.relative_to(sources).as_posix(): path.read_bytes() for path in sources.rglob("*.cu*")}
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if name.startswith("pagedkv/cuda/")]
        packed = {name.removeprefix("pagedkv/cuda/"): file.read(name) for name in names}
    if other := sorted(name for name in own.keys() | packed.keys() if own.get(name) != packed.get(name)):
        raise OtherSourcesError(
            f"{wheel.name}: expected the CUDA sources of the checkout, found others: {', '.join(other)}"
        )


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the checkout into a folder."""
    command = [sys.executable, "-m", "maturin", "build", "--release", "--strip", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def compile_kernels(folder: Path, archs: tuple[str, ...], num_threads: int, variants: Any = None) -> int:
    """Compile kernels into `cache`, which is to be `PAGEDKV_CACHE_DIR`, and the probe beside it; return how many.

    What is there of other sources goes.
    """
    os.environ["PAGEDKV_CACHE_DIR"] = str(folder / "cache")
    from vocabulary_cases import KERNEL, compile_probe

    from pagedkv.kernels.variants import VARIANTS
    from pagedkv.kernels.warmup import warm_up

    cubins = []
    for arch in archs:
        chosen = VARIANTS if variants is None else variants
        cubins += [cubin.path for _, cubin in warm_up(chosen, arch, num_threads=num_threads)]
        with tempfile.TemporaryDirectory() as sources:
            shutil.copy(compile_probe(arch, Path(sources) / "cuda").path, folder / f"{KERNEL}-{arch}.cubin")
    kept = {path.with_suffix(end) for path in cubins for end in (".cubin", ".log")}
    for path in set((folder / "cache" / "kernels").iterdir()) - kept:
        path.unlink()
    return len(cubins)


def bytes_of_tree() -> int:
    """Return the bytes of the working tree that travel: what git tracks, and what it would."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = {ROOT / name.decode() for name in listed.stdout.split(b"\0") if name}
    return sum(path.lstat().st_size for path in files if path.is_file() or path.is_symlink())


def bytes_of_folder(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_size(of_tree: int, of_pack: int, limit: int = LIMIT_BYTES) -> str:
    """Return what travels, in words.

    Raises
    ------
    TooLargeError
        If it is more than the limit.
    """
    whole = of_tree + of_pack
    said = f"{of_pack / 2**20:.1f} MiB packed and {of_tree / 2**20:.1f} MiB of working tree"
    if whole > limit:
        raise TooLargeError(f"expected at most {limit / 2**20:.0f} MiB to travel, found {said}")
    return f"{said}: {whole / 2**20:.1f} of {limit / 2**20:.0f} MiB"


def main(arguments: list[str] | None = None) -> int:
    """Pack, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="a wheel that was built before")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compilations side by side")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.resolve()
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    (folder / "wheel").mkdir(parents=True)
    wheel = Path(shutil.copy(options.wheel, folder / "wheel")) if options.wheel else build_wheel(folder / "wheel")
    try:
        check_wheel(wheel)
    except OtherSourcesError as error:
        print(error, file=sys.stderr)
        return 1
    count = compile_kernels(folder, ARCHITECTURES, options.threads)

    from pagedkv.kernels.nvrtc import load_compiler

    about = {"wheel": wheel.name, "nvrtc": load_compiler().version, "kernels": count, "archs": list(ARCHITECTURES)}
    about["commit"] = commit()
    (folder / "pack.json").write_text(json.dumps(about, indent=1) + "\n")
    try:
        said = check_size(bytes_of_tree(), bytes_of_folder(folder))
    except TooLargeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{folder}: {wheel.name}, {count} kernels for {' and '.join(ARCHITECTURES)}; {said}")
    return 0


def commit() -> str:
    """Return the commit of the checkout, with a sign where it was edited since; "unknown" outside of git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
