"""Every variant of every kernel compiles for the architectures we name, within its budgets, on a machine without a GPU.

All variants for two architectures, and for the others as many as let every two of what they are chosen by meet; the
rest is slow, and is what `make compile-all` adds.
"""

import itertools
from pathlib import Path

import pytest

from pagedkv.kernels import compile as kernels
from pagedkv.kernels import nvrtc
from pagedkv.kernels.cubin import count_instructions
from pagedkv.kernels.occupancy import LIMITS, blocks_per_multiprocessor, occupancy_table
from pagedkv.kernels.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
WHOLE = ("sm_80", "sm_90a")
OTHERS = tuple(arch for arch in kernels.ARCHITECTURES if arch not in WHOLE)


def traits(variant, arch):
    """Return what a compilation is chosen by; shapes follow from it."""
    macros = variant.macros
    chosen = [("arch", arch), ("kernel", variant.kernel)]
    chosen += [
        (macro, macros[macro]) for macro in ("PKV_Q", "PKV_KV", "PKV_HEAD_DIM", "PKV_FEATURES") if macro in macros
    ]
    return chosen


def pairwise():
    """Choose compilations in which any two traits that can meet do so."""
    jobs = list(itertools.product(VARIANTS, OTHERS))
    pairs = {job: set(itertools.combinations(traits(*job), 2)) for job in jobs}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(jobs, key=lambda job: len(pairs[job] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def compilations():
    chosen = {*itertools.product(VARIANTS, WHOLE), *pairwise()}
    for variant, arch in itertools.product(VARIANTS, kernels.ARCHITECTURES):
        marks = () if (variant, arch) in chosen else pytest.mark.slow
        yield pytest.param(variant, arch, marks=marks, id=f"{variant.name}-{arch}")


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """Compile into a folder of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        yield


@pytest.fixture(scope="module")
def compiler():
    """Need NVRTC, of all tests only where something is compiled."""
    try:
        nvrtc.load_compiler()
    except nvrtc.NvrtcNotFoundError as error:
        pytest.skip(str(error))


def expected_instructions(variant):
    """Return how often an attention kernel's code has what its hot loop is made of.

    A loop that was copied, a fragment that is loaded twice or a barrier that came with it would show.
    """
    macros = variant.macros
    head_dim, chunks = macros["PKV_HEAD_DIM"], macros["PKV_HEAD_DIM"] * (1 if macros["PKV_KV"][0] == "E" else 2) // 16
    rows, keys = (1, 16) if variant.kernel == "paged_decode" else (macros["PKV_ROW_TILES"], macros["PKV_STEP_KEYS"])
    products = 2 * rows * (head_dim // 16) * (keys // 8)  # of queries and keys, and of weights and values
    fragments = rows * (head_dim // 16) + 2 * (keys // 16) * (chunks // 2)  # of queries; of keys and values
    barriers = 3 if variant.kernel == "paged_prefill" or head_dim == 256 else 4
    return {"HMMA": products, "LDSM": fragments, "BAR": barriers, "STL": 0, "LDL": 0}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("variant", "arch"), list(compilations()))
def test_variant_compiles_within_its_budgets(variant, arch):
    cubin = kernels.compile_kernel(variant.kernel, arch, variant.macros)
    assert f"entry function '{variant.kernel}' for '{arch}'" in cubin.log
    assert "warning" not in cubin.log
    assert cubin.registers <= variant.registers
    assert cubin.spill_bytes == 0
    of_cubin = cubin.resources
    assert of_cubin.registers == cubin.registers
    assert of_cubin.frame_bytes == of_cubin.max_stack_bytes == 0
    assert of_cubin.static_shared_bytes in (0, 1024)  # what sm_90 and later reserve
    if variant.kernel in ("paged_decode", "paged_prefill"):
        counts = count_instructions(cubin.path.read_bytes(), variant.kernel)
        expected = expected_instructions(variant)
        assert {name: counts[name] for name in expected} == expected


def test_table_of_variants_names_every_kernel_and_is_short():
    assert {variant.kernel for variant in VARIANTS} == set(kernels.kernel_names())
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS) <= 120


@pytest.mark.parametrize("arch", LIMITS)
def test_every_variant_fits_on_a_multiprocessor(arch):
    assert [variant.name for variant in VARIANTS if blocks_per_multiprocessor(variant, arch) == 0] == []


def test_docs_have_the_table_of_occupancy():
    assert occupancy_table() in (ROOT / "docs" / "kernels.md").read_text()
