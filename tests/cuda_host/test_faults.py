"""Faults of other CUDA kernels that a suite over all backends cannot have; `tests/kernels/test_attention_faults.py` has
the others.
"""

import re
from pathlib import Path

import pytest
import torch
from host_device import HostDevice, attention, cache_operations
from tight import make_tight_batch

from pagedkv.kernels import variants

TESTS = Path(__file__).resolve().parents[1]
# Of the list's 28: 11 are slopes, which the caller makes; 21 is a plan's staging memory, which is torch's, new for each
# plan, and handed out again when the copy is done.
NOT_OF_KERNELS = {11, 21}


def test_kernel_fault_09_more_than_65_535_tokens_are_written():
    cache = torch.zeros(2, 4200, 1, 16, 8, dtype=torch.bfloat16)
    k, v = torch.randn(2, 66_000, 1, 8).bfloat16()
    cache_operations.append_kv(HostDevice(), k, v, *cache, torch.arange(66_000))
    assert torch.equal(cache[0].flatten(0, 2)[:66_000], k[:, 0])
    assert torch.equal(cache[1].flatten(0, 2)[:66_000], v[:, 0])


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("piece", [None, 16])
def test_kernel_fault_22_blocks_behind_the_last_item_read_and_write_nothing(kernel, piece):
    batch = make_tight_batch([(1, 1), (40, 3)], num_kv_heads=2)
    exact = attention.paged_attention(HostDevice(), *batch.arrays(), kernel=kernel, piece=piece, spare_items=0)
    graph = attention.paged_attention(HostDevice(), *batch.arrays(), kernel=kernel, piece=piece, spare_items=50)
    assert torch.equal(exact, graph)


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
def test_kernel_fault_26_a_workspace_of_exactly_the_plans_rows_is_enough(kernel):
    # The registry ends it at its last byte.
    batch = make_tight_batch([(1, 1), (200, 1), (90, 70)], num_kv_heads=2)
    whole = attention.paged_attention(HostDevice(), *batch.arrays(), kernel=kernel)
    pieces = attention.paged_attention(HostDevice(), *batch.arrays(), kernel=kernel, piece=16)
    torch.testing.assert_close(pieces, whole, atol=5e-3, rtol=0)


@pytest.mark.parametrize("kernel", [variants.paged_decode, variants.paged_prefill])
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "message"),
    [
        ("float32", "float32", "q: expected float16 or bfloat16, found float32"),
        ("float16", "bfloat16", "k_cache, v_cache: expected float16 or .* beside float16 queries"),
        ("bfloat16", "float32", "k_cache, v_cache: expected bfloat16 or .* found float32"),
        ("float8_e4m3fn", "float8_e4m3fn", "q: expected float16 or bfloat16, found float8_e4m3fn"),
    ],
)
def test_kernel_fault_27_types_without_a_kernel_are_refused_by_name(kernel, q_dtype, kv_dtype, message):
    with pytest.raises(TypeError, match=message):
        kernel(q_dtype, kv_dtype, 64, features=False)


def test_every_fault_of_the_list_has_a_test_over_the_cuda_kernels():
    shared = (TESTS / "kernels" / "test_attention_faults.py").read_text()
    over_backends = shared[: shared.index("def sparse(")]
    own = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    numbers = {int(number) for number in re.findall(r"def test_kernel_fault_(\d\d)_", over_backends + own)}
    assert numbers == set(range(1, 29)) - NOT_OF_KERNELS


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
def test_value_in_use_that_is_nan_stays_in_its_sequence_and_reaches_no_query_of_an_earlier_tile(kernel):
    batch = make_tight_batch([(80, 80), (33, 1), (40, 3)], num_kv_heads=2)
    clean = attention.paged_attention(HostDevice(), *batch.arrays(), kernel=kernel)
    block, offset = batch.block_table[0, 70 // 16], 70 % 16
    batch.v_cache[block, :, offset] = torch.nan
    spoilt = attention.paged_attention(HostDevice(), *batch.arrays(), kernel=kernel)
    assert torch.equal(spoilt[:64], clean[:64])
    assert spoilt[70:80].isnan().all()
    assert torch.equal(spoilt[80:], clean[80:])


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
def test_value_in_use_that_is_nan_reaches_no_single_query_whose_window_has_left_it(kernel):
    batch = make_tight_batch([(70, 1)], num_kv_heads=2)
    batch.v_cache[batch.block_table[0, 59 // 16], :, 59 % 16] = torch.nan
    out = attention.paged_attention(HostDevice(), *batch.arrays(), kernel=kernel, sliding_window=10)
    assert out.isfinite().all()
