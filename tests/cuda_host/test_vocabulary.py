"""What the host makes of each function of the vocabulary, against its definition and against what a GPU gave."""

import dataclasses
import re
import struct

import numpy as np
import pytest
import torch
from host_device import Memory, build_kernel, launch
from vocabulary_cases import CASES, KERNEL, OUT_WORDS, PROBES, SHARED_BYTES, compile_probe, functions, run_case
from vocabulary_vectors import VECTORS, read_vectors, write_vectors

from pagedkv.kernels import nvrtc
from pagedkv.kernels.compile import source_folder
from pagedkv.kernels.cubin import count_instructions

# Not for kernels: what functions of the vocabulary themselves use.
INTERNAL = {"pkv_shared_address"}


@pytest.fixture(scope="module")
def apply():
    """Return a function that applies a function of the vocabulary: 32 x 16 words in, 32 x 4 words out."""
    kernel = build_kernel(KERNEL, sources=PROBES)

    def apply(function, words):
        memory = Memory()
        given = memory.place("in", torch.from_numpy(words.view(np.int32)))
        out = memory.place("out", torch.zeros(32, OUT_WORDS, dtype=torch.int32), writable=True)
        params = struct.pack("QQi4x", out.data_ptr(), given.data_ptr(), function)
        launch(kernel, params, (1,), 32, SHARED_BYTES, memory.regions)
        return out.numpy().view(np.uint32)

    return apply


@pytest.mark.parametrize("function", CASES)
def test_function_gives_what_it_is_defined_to_give(apply, function):
    case = CASES[function]
    assert case.wrong_lanes(run_case(case, apply)) == []


def test_every_function_of_the_probe_has_a_case():
    assert list(CASES) == functions()


def test_probe_calls_every_function_of_the_vocabulary():
    names = set(
        re.findall(r"^PKV_DEV [\w<>]+ (\w+)\(", (source_folder() / "include/ptx.cuh").read_text(), re.MULTILINE)
    )
    probe = (PROBES / f"{KERNEL}.cu").read_text()
    assert {name for name in names - INTERNAL if not re.search(rf"\b{name}[(<]", probe)} == set()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_probe_compiles_for_a_gpu(tmp_path, monkeypatch, arch):
    try:
        nvrtc.load_compiler()
    except nvrtc.NvrtcNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    cubin = compile_probe(arch, tmp_path / "sources")
    counts = count_instructions(cubin.path.read_bytes(), KERNEL)
    assert cubin.spill_bytes == 0
    assert {name: counts[name] for name in ("HMMA", "LDSM", "LDGSTS")} == {"HMMA": 2, "LDSM": 2, "LDGSTS": 3}


@pytest.mark.parametrize("function", CASES)
def test_case_finds_an_output_that_is_wrong(apply, function):
    case = CASES[function]
    outputs = run_case(case, apply)
    outputs[-1, 3, 0] = 0x12345678
    assert any(f"launch {len(case.words) - 1}, lane 3" in wrong for wrong in case.wrong_lanes(outputs))


# What a GPU gave


@pytest.mark.parametrize("function", CASES)
def test_function_gives_what_a_gpu_gave(apply, function):
    if not VECTORS.is_file():
        pytest.skip(f"no GPU has been asked yet: `make gpu-check` on one writes {VECTORS.name}, for {VECTORS.parent}")
    vectors = read_vectors(VECTORS)
    if function not in vectors.outputs:
        pytest.skip(f"{vectors.about['device']} was not asked for this one")
    case = dataclasses.replace(CASES[function], words=vectors.inputs[function])
    assert case.wrong_lanes(run_case(case, apply), vectors.outputs[function]) == []


ABOUT = {"device": "a test", "compute_capability": "9.0", "driver": "1", "arch": "sm_90a", "date": "2026-11-30"}


def test_vectors_come_back_as_they_were_written(tmp_path):
    outputs = {name: np.full((len(case.words), 32, OUT_WORDS), 7, np.uint32) for name, case in CASES.items()}
    write_vectors(tmp_path / "vectors.npz", outputs, ABOUT)
    vectors = read_vectors(tmp_path / "vectors.npz")
    assert vectors.about == ABOUT
    for name, case in CASES.items():
        np.testing.assert_array_equal(vectors.inputs[name], case.words)
        np.testing.assert_array_equal(vectors.outputs[name], outputs[name])


@pytest.mark.parametrize("missing", ABOUT)
def test_vectors_are_not_written_without_what_gave_them(tmp_path, missing):
    outputs = {name: np.zeros((len(case.words), 32, OUT_WORDS), np.uint32) for name, case in CASES.items()}
    with pytest.raises(ValueError, match=f"about: expected .*{missing}"):
        write_vectors(tmp_path / "vectors.npz", outputs, ABOUT | {missing: ""})
    assert list(tmp_path.iterdir()) == []
