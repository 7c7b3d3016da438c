"""Parameter structs are laid out in Python as in the sources and in compiled kernels."""

import numpy as np
import pytest
from host_device.structs import struct_of

from pagedkv.kernels import compile as kernels
from pagedkv.kernels import nvrtc
from pagedkv.kernels.params import PARAMS, pack
from pagedkv.kernels.variants import VARIANTS

STRUCTS = {
    "append_kv": "AppendKVParams",
    "copy_blocks": "CopyBlocksParams",
    "gather_kv": "GatherKVParams",
    "merge_states": "MergeStatesParams",
    "move_kv": "MoveKVParams",
    **dict.fromkeys(("merge_partials", "paged_decode", "paged_prefill"), "AttentionParams"),
}


def test_every_kernel_has_a_struct():
    assert set(PARAMS) == set(STRUCTS) == set(kernels.kernel_names())


@pytest.mark.parametrize("kernel", sorted(PARAMS))
def test_fields_are_those_of_the_source(kernel):
    ours, theirs = PARAMS[kernel], struct_of(kernel, STRUCTS[kernel])
    assert ours.names == theirs.names
    assert [ours.fields[name][1] for name in ours.names] == [theirs.fields[name][1] for name in ours.names]
    assert [ours[name].itemsize for name in ours.names] == [theirs[name].itemsize for name in ours.names]


@pytest.mark.parametrize("kernel", sorted(PARAMS))
def test_size_is_what_the_compiler_says(kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    variant = next(variant for variant in VARIANTS if variant.kernel == kernel)
    try:
        cubin = kernels.compile_kernel(kernel, "sm_90a", variant.macros)
    except nvrtc.NvrtcNotFoundError as error:
        pytest.skip(str(error))
    assert cubin.resources.parameter_bytes == PARAMS[kernel].itemsize


def test_packed_values_lie_where_their_fields_do():
    values = dict.fromkeys(PARAMS["move_kv"].names, 0) | {"cache": 2**40, "layout": (2**33, 5, 6), "side_stride": -1}
    packed = pack("move_kv", values)
    assert packed.nbytes == 88
    assert packed.view(np.int64)[[0, 5, 9]].tolist() == [2**40, 2**33, -1]


def test_value_error_names_the_fields_when_some_are_missing_or_unknown():
    values = dict.fromkeys(PARAMS["copy_blocks"].names, 0) | {"copy": 0}
    del values["num_spans"]
    with pytest.raises(ValueError, match="copy_blocks: .*copy, num_spans"):
        pack("copy_blocks", values)
