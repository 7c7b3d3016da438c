"""The CUDA sources come along: in a source distribution, in a wheel made of one, and where a checkout is installed."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from pagedkv.kernels import compile as kernels

ROOT = Path(__file__).resolve().parents[1]


def sources_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.cu*") if path.is_file()}


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Return the folder of an unpacked source distribution."""
    pytest.importorskip("maturin", reason="source distributions are made by maturin")
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "maturin", "sdist", "--out", str(out), cwd=ROOT)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


def test_source_distribution_carries_the_cuda_sources(sdist):
    assert sources_of(sdist / "cuda") == sources_of(ROOT / "cuda")


def test_checkout_that_is_installed_in_place_reads_its_own_cuda_sources():
    assert kernels.source_folder() == ROOT / "cuda"
    assert kernels.kernel_names() == sorted(path.stem for path in (ROOT / "cuda").glob("*.cu"))


@pytest.mark.slow
def test_wheel_of_a_source_distribution_finds_its_cuda_sources(sdist, tmp_path):
    # By the development profile, for the sources alone matter here.
    build = [sys.executable, "-m", "maturin", "build", "--profile", "dev", "--out", str(tmp_path)]
    run(*build, cwd=sdist)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    assert sources_of(tmp_path / "site" / "pagedkv" / "cuda") == sources_of(sdist / "cuda")
    code = "from pagedkv.kernels import compile as kernels; print(*kernels.kernel_names(), kernels.source_folder())"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "PAGEDKV_CACHE_DIR": str(tmp_path)}
    *names, folder = run(sys.executable, "-c", code, cwd=tmp_path, env=environment).split()
    assert names == kernels.kernel_names()
    assert Path(folder) == tmp_path / "site" / "pagedkv" / "cuda"
