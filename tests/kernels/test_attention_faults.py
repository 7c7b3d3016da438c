"""One test for each fault of other kernels, over every backend.

The numbers are those of the list from which they come. 11 (slopes are the caller's) and 21 (staging of plans) are
faults of parts that kernels do not have. What CUDA kernels can show only in memory of their own stands in
`tests/cuda_host/test_far_memory.py`; what only the CPU has, at the end of this file.
"""

import functools

import numpy as np
import pytest
import torch
from batches import assert_matches_oracle

from pagedkv import attention, reference

INT32 = {"dtype": torch.int32}


@pytest.fixture
def one_layer(backend):
    """Return a function that makes keys and values of one layer, at random."""

    def one_layer(num_blocks, num_kv_heads, block_size, head_dim):
        torch.manual_seed(1)
        cache = torch.randn(2, num_blocks, num_kv_heads, block_size, head_dim).to(backend.default_dtype)
        return cache[0], cache[1]

    return one_layer


def attend_by(paged_attention, q, k_cache, v_cache, table, seq_lens, starts=None, **options):
    """Attend with one query per sequence unless told where queries start."""
    starts = range(len(seq_lens) + 1) if starts is None else starts
    index = [torch.tensor(table, **INT32), torch.tensor(seq_lens, **INT32), torch.tensor(list(starts), **INT32)]
    return paged_attention(q.to(k_cache.dtype), k_cache, v_cache, *index, **options)


@pytest.fixture
def attend(paged_attention):
    """Return `attend_by` with each backend."""
    return functools.partial(attend_by, paged_attention)


def assert_close(out, want):
    """Compare within some roundings of the result's type."""
    epsilon = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), want.double(), atol=8 * epsilon, rtol=8 * epsilon)


def test_kernel_fault_03_block_ids_pass_16_bits(one_layer, attend):
    k, v = one_layer(70_000, 1, 1, 8)
    out = attend(torch.ones(1, 1, 8), k, v, [[69_999]], [1])
    assert torch.equal(out[0, 0], v[69_999, 0, 0])


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, -torch.inf])
def test_kernel_fault_04_unused_slots_never_reach_the_result(make_batch, assert_matches_oracle, fill):
    sequences = [(1, 1), (17, 1), (31, 31), (33, 3), (140, 140)]
    assert_matches_oracle(make_batch(sequences, fill=fill, dtype=torch.bfloat16))


def test_kernel_fault_05_rows_without_keys_give_zero_and_minus_infinity(one_layer, attend):
    k, v = one_layer(2, 1, 4, 8)
    out, lse = attend(torch.ones(3, 2, 8), k, v, [[1]], [2], [0, 3], return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert lse[1:].isfinite().all()


def test_kernel_fault_05_merging_two_empty_states_stays_empty(operations):
    out, lse = torch.full((1, 2, 8), torch.nan), torch.full((1, 2), -torch.inf)
    merged, merged_lse = operations.merge_states(out, lse, out, lse)
    assert (merged == 0).all()
    assert (merged_lse == -torch.inf).all()


@pytest.mark.parametrize("num_queries", [1, 40])
def test_kernel_fault_06_a_sequence_of_no_keys_ends(one_layer, attend, num_queries):
    k, v = one_layer(2, 1, 4, 8)
    out = attend(torch.ones(num_queries, 1, 8), k, v, [[0]], [0], [0, num_queries])
    assert (out == 0).all()


def test_kernel_fault_07_padding_tokens_write_nowhere(operations):
    k_cache, v_cache = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8)
    tokens = torch.ones(4, 1, 8)
    operations.append_kv(tokens, tokens, k_cache, v_cache, torch.tensor([-1, 2, -1, -1]))
    assert k_cache.sum() == 8
    assert (k_cache[0, 0, 2] == 1).all()
    assert (v_cache[1] == 0).all()


def test_kernel_fault_08_contexts_are_as_long_as_the_table(one_layer, attend):
    k, v = one_layer(1, 1, 100_000, 8)
    q = torch.randn(1, 2, 8)
    out = attend(q, k, v, [[0]], [100_000])
    want = torch.softmax(q[0].double() @ k[0, 0].double().T / 8**0.5, 1) @ v[0, 0].double()
    assert_close(out[0], want)


@pytest.mark.parametrize("length", [1, 40, 5000])
def test_kernel_fault_10_the_bias_of_a_querys_own_key_is_zero(one_layer, attend, length):
    k, v = one_layer(1, 1, length, 8)
    slopes = torch.tensor([1000.0])
    _, lse = attend(torch.zeros(1, 1, 8), k, v, [[0]], [length], alibi_slopes=slopes, return_lse=True)
    assert lse.item() == 0.0


def test_kernel_fault_10_biases_count_from_the_query_in_prefill_as_in_decode(make_batch, assert_matches_oracle):
    batch = make_batch([(300, 1), (300, 300), (45, 4)], dtype=torch.float16)
    assert_matches_oracle(batch, alibi_slopes=torch.tensor([1.0, 0.5, 0.01, -0.5]))


@pytest.mark.parametrize("sliding_window", [1, 7, 16, 33])
def test_kernel_fault_12_decode_and_prefill_have_the_same_window(paged_attention, make_batch, sliding_window):
    batch = make_batch([(60, 60)], num_q_heads=2, num_kv_heads=1)
    prefill = paged_attention(*batch.arrays(), sliding_window=sliding_window)
    q, k_cache, v_cache, table, _, _, rows = batch.arrays()
    for position in (0, 6, 15, 16, 59):
        index = (torch.tensor([position + 1], **INT32), torch.tensor([0, 1], **INT32), rows)
        one = paged_attention(
            q[position : position + 1], k_cache, v_cache, table, *index, sliding_window=sliding_window
        )
        assert_close(one[0], prefill[position])


def test_kernel_fault_13_nothing_before_the_window_is_read(one_layer, attend):
    # Ids outside the cache would be refused, were they looked at.
    k, v = one_layer(3, 1, 16, 8)
    table = [[-1] * 60 + [1, 2]]
    out = attend(torch.ones(1, 1, 8), k, v, table, [62 * 16], sliding_window=20)
    assert out.isfinite().all()


def test_kernel_fault_14_states_of_two_halves_merge_to_the_whole(backend, paged_attention, make_batch):
    batch = make_batch([(96, 1)], block_size=16)
    whole, whole_lse = paged_attention(*batch.arrays(), return_lse=True)
    q, k_cache, v_cache, table, _, starts, rows = batch.arrays()
    halves = []
    for columns, length in ((slice(0, 3), 48), (slice(3, 6), 48)):
        part = table[:, columns].contiguous()
        lens = torch.tensor([length], **INT32)
        halves += paged_attention(q, k_cache, v_cache, part, lens, starts, rows, return_lse=True)
    merged, lse = backend.merge_states(*halves)
    assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=0)
    want, want_lse = reference.merge_states(*(half.double().numpy() for half in halves))
    assert_close(merged, torch.from_numpy(want))
    np.testing.assert_allclose(lse.numpy(), want_lse, atol=1e-5)


@pytest.mark.parametrize("sequences", [[(100, 1)], [(100, 100)]], ids=["decode", "prefill"])
def test_kernel_fault_15_scales_of_each_head_count_in_every_path(make_batch, assert_matches_oracle, sequences):
    batch = make_batch(sequences, dtype=torch.float8_e4m3fn, q_dtype=torch.bfloat16)
    scales = {"k_scale": torch.tensor([0.25, 2.0]), "v_scale": torch.tensor([1.75, 0.5])}
    assert_matches_oracle(batch, **scales)


def test_kernel_fault_16_the_cap_comes_before_the_bias(make_batch, assert_matches_oracle):
    batch = make_batch([(90, 1), (60, 60)])
    assert_matches_oracle(batch, soft_cap=0.5, alibi_slopes=torch.tensor([2.0, 1.0, 0.5, 0.25]), softmax_scale=2.0)


def test_kernel_fault_17_keys_and_values_have_strides_of_their_own(make_batch, assert_matches_oracle):
    batch = make_batch([(50, 1), (40, 40)], dtype=torch.bfloat16)
    interleaved = torch.stack([batch.k_cache, batch.v_cache], dim=3)
    batch.k_cache = interleaved[:, :, :, 0]
    wide = torch.full((*batch.v_cache.shape[:3], 100), torch.nan, dtype=torch.bfloat16)
    wide[..., 12:76] = batch.v_cache
    batch.v_cache = wide[..., 12:76]
    assert_matches_oracle(batch)


def test_kernel_fault_18_every_row_is_written_when_keys_are_split(paged_attention, make_batch):
    batch = make_batch([(3000, 1), (5, 5), (2100, 8), (1, 1), (0, 1), (400, 60)], num_q_heads=8, dtype=torch.bfloat16)
    out = torch.full_like(batch.q, torch.nan)
    paged_attention(*batch.arrays(), out=out)
    assert out.isfinite().all()


@pytest.mark.parametrize("group", range(1, 17))
def test_kernel_fault_19_any_number_of_query_heads_shares_a_kv_head(make_batch, assert_matches_oracle, group):
    batch = make_batch([(70, 1), (40, 40)], num_q_heads=group, num_kv_heads=1, dtype=torch.bfloat16, head_dim=16)
    assert_matches_oracle(batch)


@pytest.mark.parametrize("head_dim", [8, 24, 72, 80, 96, 112, 120, 192, 320])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_kernel_fault_20_nothing_is_read_behind_a_row(make_batch, assert_matches_oracle, head_dim, dtype):
    batch = make_batch([(40, 1), (30, 30)], head_dim=head_dim, dtype=dtype, q_dtype=torch.bfloat16)
    for cache in ("k_cache", "v_cache"):
        rows = getattr(batch, cache)
        wide = torch.full((*rows.shape[:3], head_dim + 64), torch.nan).to(dtype)
        wide[..., :head_dim] = rows
        setattr(batch, cache, wide[..., :head_dim])
    assert_matches_oracle(batch)


def test_kernel_fault_23_entries_behind_a_sequence_are_not_looked_at(one_layer, attend):
    k, v = one_layer(2, 1, 16, 8)
    out = attend(torch.ones(1, 1, 8), k, v, [[1, -5, 2**31 - 1]], [16])
    assert out.isfinite().all()


@pytest.mark.parametrize("block_size", [1, 2, 5, 7, 31, 33, 64, 127, 129, 200, 256])
def test_kernel_fault_24_any_block_size_is_right_around_every_edge(make_batch, assert_matches_oracle, block_size):
    lengths = sorted({1, 31, 32, 33, 127, 128, 129, block_size, block_size + 1})
    sequences = [*((length, 1) for length in lengths), *((length, min(length, 40)) for length in lengths)]
    batch = make_batch(sequences, block_size=block_size, head_dim=16, dtype=torch.bfloat16, num_q_heads=2)
    assert_matches_oracle(batch)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"soft_cap": 5.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_kernel_fault_25_a_sequence_gives_the_same_bits_whatever_runs_beside_it(
    paged_attention, make_batch, options, dtype
):
    sequences = [(2500, 1), (300, 300), (33, 2), (1500, 4), (64, 1)]
    batch = make_batch(sequences, dtype=dtype, q_dtype=torch.bfloat16, head_dim=32)
    together = paged_attention(*batch.arrays(), **options)
    q, k_cache, v_cache, table, lens, starts, rows = batch.arrays()
    for s in range(len(sequences)):
        first, last = starts[s : s + 2].tolist()
        index = (lens[s : s + 1], torch.tensor([0, last - first], **INT32), rows[s : s + 1])
        alone = paged_attention(q[first:last], k_cache, v_cache, table, *index, **options)
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("group", [6, 7, 8])
def test_kernel_fault_28_sums_of_many_weights_stay_exact_in_bfloat16(attend, group):
    # 4,096 equal weights: sums in bfloat16 would stop at 256.
    k_cache = torch.zeros(256, 1, 16, 32, dtype=torch.bfloat16)
    v_cache = torch.ones_like(k_cache)
    q = torch.ones(1, group, 32, dtype=torch.bfloat16)
    out, lse = attend(q, k_cache, v_cache, [list(range(256))], [4096], return_lse=True)
    assert (out == 1).all()
    torch.testing.assert_close(lse, torch.full((1, group), 4096.0).log())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("num_queries", [3, 70])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_kernel_fault_04_keys_and_values_behind_a_query_never_reach_its_result(make_batch, num_queries, poison):
    batch = make_batch([(80, num_queries)], dtype=torch.bfloat16, block_size=16)
    last = batch.block_table[batch.rows[0], 4]
    batch.k_cache[last, :, 15] = poison
    batch.v_cache[last, :, 15] = poison
    clean = attention.paged_attention(*batch.arrays())[:-1]
    assert clean.isfinite().all()
    batch.k_cache[last, :, 15] = 0.0
    batch.v_cache[last, :, 15] = 0.0
    torch.testing.assert_close(clean, attention.paged_attention(*batch.arrays())[:-1], atol=2e-2, rtol=0)


def sparse(num_bytes, tmp_path):
    """Return memory that costs nothing until it is touched."""
    return np.memmap(tmp_path / "sparse", np.float32, "w+", shape=(num_bytes // 4,))


@pytest.mark.usefixtures("isa")
def test_kernel_fault_01_block_offsets_pass_32_bits(tmp_path):
    block = 1 << 22  # bytes; 1,100 of them lie beyond 2^32
    memory = torch.from_numpy(sparse(1100 * block, tmp_path)).reshape(1100, 1, -1, 8)
    memory[1099, 0, :4] = 3.0
    out = attend_by(attention.paged_attention, torch.ones(1, 1, 8), memory[:, :, :4], memory[:, :, :4], [[1099]], [4])
    assert (out == 3.0).all()


@pytest.mark.usefixtures("isa")
def test_kernel_fault_02_strides_of_a_pool_of_many_layers_pass_32_bits(tmp_path):
    layers = 1 << 20  # elements from one block to the next
    memory = torch.from_numpy(sparse(2100 * layers * 4, tmp_path)).reshape(2100, layers)
    cache = memory.as_strided((2100, 1, 4, 8), (layers, 32, 8, 1), layers - 64)
    cache[2098] = 5.0
    out = attend_by(attention.paged_attention, torch.ones(1, 1, 8), cache[:2099], cache[:2099], [[2098]], [4])
    assert (out == 5.0).all()


@pytest.mark.usefixtures("isa")
def test_kernel_fault_09_batches_pass_65_535_sequences():
    k, v = torch.randn(2, 8, 1, 1, 8)
    blocks = [i % 8 for i in range(66_000)]
    q = torch.ones(66_000, 1, 8)
    out = attend_by(attention.paged_attention, q, k, v, [[block] for block in blocks], [1] * 66_000)
    torch.testing.assert_close(out[:, 0], v[blocks, 0, 0])


@pytest.mark.usefixtures("isa")
def test_kernel_fault_23_ids_outside_the_cache_are_refused_by_name():
    k, v = torch.ones(2, 2, 1, 16, 8)
    with pytest.raises(ValueError, match=r"block_table\[0, 1\]: expected a block below 2, found 2"):
        attend_by(attention.paged_attention, torch.ones(1, 1, 8), k, v, [[1, 2]], [17])


@pytest.mark.usefixtures("isa")
def test_kernel_fault_26_memory_of_an_earlier_call_is_right_for_a_later_one(make_batch):
    small = make_batch([(20, 1), (5, 5)], head_dim=8, num_q_heads=2, num_kv_heads=1)
    large = make_batch([(1500, 2), (300, 200)], head_dim=128, num_q_heads=8, num_kv_heads=2, dtype=torch.bfloat16)
    for batch in (small, large, small, large):
        assert_matches_oracle(attention.paged_attention, batch)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("argument", "dtype", "expected"),
    [
        ("q", torch.float8_e4m3fn, "float32, float16 or bfloat16"),
        ("q", torch.int32, "float32, float16 or bfloat16"),
        ("k_cache", torch.int32, "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2"),
        ("v_cache", torch.uint8, "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2"),
    ],
    ids=str,
)
def test_kernel_fault_27_element_types_without_a_kernel_are_refused_by_name(make_batch, argument, dtype, expected):
    batch = make_batch([(20, 1)])
    setattr(batch, argument, getattr(batch, argument).nan_to_num().to(dtype))
    with pytest.raises(TypeError, match=f"{argument}: expected dtype {expected}, found"):
        attention.paged_attention(*batch.arrays(), out=torch.empty(1, 4, 64))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4], indirect=True)
def test_the_number_of_threads_changes_no_bit(make_batch, num_threads, monkeypatch):
    sequences = [(2500, 1), (300, 300), (1500, 4), (64, 1), (5, 5)]
    batch = make_batch(sequences, dtype=torch.bfloat16, num_q_heads=8)
    out, lse = attention.paged_attention(*batch.arrays(), return_lse=True)
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
    alone, alone_lse = attention.paged_attention(*batch.arrays(), return_lse=True)
    assert torch.equal(out, alone)
    assert torch.equal(lse, alone_lse)


@pytest.mark.parametrize("value", ["avx1024", "", "AVX2"])
def test_an_instruction_set_that_is_not_there_is_refused_by_name(make_batch, monkeypatch, value):
    monkeypatch.setenv("PAGEDKV_CPU_ISA", value)
    with pytest.raises(ValueError, match=r"PAGEDKV_CPU_ISA: expected one of scalar.*, found"):
        attention.paged_attention(*make_batch([(5, 1)]).arrays())
