"""`pagedkv warmup`: kernels are compiled before they are needed, and nothing else is."""

import pytest

from pagedkv import cli
from pagedkv.kernels import compile as kernels
from pagedkv.kernels import nvrtc, warmup
from pagedkv.kernels.variants import VARIANTS, paged_decode, variants_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def compiler():
    try:
        nvrtc.load_compiler()
    except nvrtc.NvrtcNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("compiler")
def test_warmup_leaves_what_a_model_needs_on_disk(capsys):
    words = [
        "warmup",
        "--arch",
        "sm_90a",
        "--dtype",
        "bfloat16",
        "--kv-dtype",
        "bfloat16",
        "--head-dim",
        "64",
        "--threads",
        "2",
    ]
    assert cli.main(words) == 0
    variant = paged_decode("bfloat16", "bfloat16", 64, features=False)
    assert kernels.find_kernel("paged_decode", "sm_90a", variant.macros) is not None
    assert kernels.find_kernel("paged_decode", "sm_80", variant.macros) is None
    other = paged_decode("bfloat16", "float8_e4m3fn", 64, features=False)
    assert kernels.find_kernel("paged_decode", "sm_90a", other.macros) is None
    assert "kernels in" in capsys.readouterr().out


@pytest.mark.usefixtures("compiler")
def test_warmup_compiles_nothing_twice(cache):
    wanted = [variant for variant in VARIANTS if variant.kernel == "copy_blocks"]
    first = list(warmup.warm_up(wanted, "sm_80"))
    written = {path: path.stat().st_ino for path in cache.iterdir()}
    assert list(warmup.warm_up(wanted, "sm_80", num_threads=2)) == first
    assert {path: path.stat().st_ino for path in cache.iterdir()} == written


def test_variants_of_a_model_are_its_attention_and_what_knows_no_types():
    wanted = variants_of("bfloat16", "float8_e5m2", {128})
    assert {variant.kernel for variant in wanted} == set(kernels.kernel_names())
    attention = [variant for variant in wanted if variant.kernel in ("paged_decode", "paged_prefill")]
    assert len(attention) == 4
    assert all(variant.macros["PKV_KV"] == "E5M2" and variant.macros["PKV_HEAD_DIM"] == 128 for variant in attention)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [("80", "sm_80"), ("86", "sm_86"), ("87", "sm_86"), ("89", "sm_89"), ("90", "sm_90a"), ("103", "sm_100")],
)
def test_architecture_is_the_newest_that_a_gpu_runs(capability, arch):
    assert warmup.arch_of_capability(capability) == arch


def test_architecture_is_refused_when_no_kernel_runs_on_it():
    with pytest.raises(ValueError, match=r"expected 8\.0 or later.*found 7\.5"):
        warmup.arch_of_capability("75")


def test_warmup_names_the_architectures_when_one_is_unknown(capsys):
    assert cli.main(["warmup", "--arch", "sm_75"]) == 2
    assert "--arch: expected sm_80, sm_86" in capsys.readouterr().err


def test_warmup_names_the_argument_when_a_head_dimension_has_no_kernel(capsys):
    assert cli.main(["warmup", "--arch", "sm_80", "--head-dim", "264"]) == 2
    assert "head_dim: expected a multiple of 8 up to 256, found 264" in capsys.readouterr().err
