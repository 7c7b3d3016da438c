"""Attention over blocks, the same tests for every backend."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def ragged(block_size):
    """Return lengths around every border, as prefill, decode and chunks, and sequences without work."""
    edges = sorted({1, 2, max(1, block_size - 1), block_size, block_size + 1})
    prefill = [(length, length) for length in (*edges, 37)]
    decode = [(length, 1) for length in (*edges, 300)]
    return [*decode, (0, 0), *prefill, (300, 5), (41, 17), (7, 0)]


def name(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_paged_attention_matches_oracle_when_lengths_are_ragged(make_batch, assert_matches_oracle, dtype, block_size):
    assert_matches_oracle(make_batch(ragged(block_size), dtype=dtype, block_size=block_size))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 40])
def test_paged_attention_matches_oracle_when_query_heads_share_kv_heads(make_batch, assert_matches_oracle, group):
    batch = make_batch([(33, 1), (20, 20), (70, 3)], num_q_heads=2 * group, head_dim=32, dtype=torch.bfloat16)
    assert_matches_oracle(batch)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_paged_attention_matches_oracle_when_head_dim_changes(make_batch, assert_matches_oracle, dtype, head_dim):
    assert_matches_oracle(make_batch([(33, 1), (20, 20), (70, 3)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("sliding_window", [1, 5, 16, 33, 1000])
@pytest.mark.parametrize("block_size", [1, 16, 40])
def test_paged_attention_matches_oracle_when_a_window_slides(
    make_batch, assert_matches_oracle, block_size, sliding_window
):
    batch = make_batch(ragged(block_size), block_size=block_size, head_dim=16)
    assert_matches_oracle(batch, sliding_window=sliding_window)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_paged_attention_matches_oracle_when_scores_are_capped(make_batch, assert_matches_oracle, soft_cap):
    batch = make_batch(ragged(16), dtype=torch.float16)
    assert_matches_oracle(batch, soft_cap=soft_cap, softmax_scale=0.4)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_paged_attention_matches_oracle_when_scores_have_linear_biases(make_batch, assert_matches_oracle, dtype, group):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    batch = make_batch([*ragged(16), (1100, 1)], dtype=dtype, num_kv_heads=4 // group)
    assert_matches_oracle(batch, alibi_slopes=slopes, soft_cap=20.0, sliding_window=200)


@pytest.mark.parametrize("rise", [-2.0, -0.02, 0.01, 0.03, 0.05, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_paged_attention_matches_oracle_when_scores_rise_or_fall_along_the_keys(
    make_batch, assert_matches_oracle, dtype, rise
):
    """Running maxima follow at once, follow late, or never; by little, the weights grow beyond 1 for a while."""
    length, block_size = 600, 16
    batch = make_batch([(length, 70), (length, 1)], dtype=dtype, block_size=block_size, head_dim=64)
    batch.q[:, :, 0] = 8.0  # the square root of head_dim: the first element of a key is added to its score
    for row in batch.rows.tolist():
        for position in range(length):
            block = batch.block_table[row, position // block_size]
            batch.k_cache[block, :, position % block_size, 0] = rise * position
    assert_matches_oracle(batch)


@pytest.mark.parametrize("dtype", FP8, ids=name)
@pytest.mark.parametrize("q_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_paged_attention_matches_oracle_when_the_cache_is_fp8(
    make_batch, assert_matches_oracle, q_dtype, dtype, head_dim
):
    batch = make_batch([*ragged(16), (1100, 1)], dtype=dtype, q_dtype=q_dtype, head_dim=head_dim)
    scales = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([3.0])}
    assert_matches_oracle(batch, **scales)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2], ids=name)
@pytest.mark.parametrize("seq_len", [1, 2, 3, 17])
def test_an_infinite_value_of_the_last_token_stays_infinite(paged_attention, make_batch, dtype, seq_len):
    q_dtype = torch.bfloat16 if dtype in FP8 else dtype
    batch = make_batch([(seq_len, 1)], dtype=dtype, q_dtype=q_dtype, num_q_heads=1, num_kv_heads=1, head_dim=8)
    block, offset = divmod(seq_len - 1, 16)
    batch.v_cache[batch.block_table[batch.rows[0], block].long(), :, offset] = torch.tensor(torch.inf).to(dtype)
    out = paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens, batch.query_start_loc, batch.rows
    )
    np.testing.assert_array_equal(out[0, 0].float().numpy(), np.full(8, np.inf, np.float32))


@pytest.mark.parametrize("dtype", FP8, ids=name)
def test_paged_attention_reads_every_fp8_number(paged_attention, make_batch, dtype):
    batch = make_batch([(256, 1)], dtype=dtype, q_dtype=torch.bfloat16, num_q_heads=1, num_kv_heads=1, head_dim=8)
    numbers = torch.arange(256).to(torch.uint8).view(dtype)
    used = batch.block_table[batch.rows[0], :16].long()
    batch.k_cache[used] = torch.zeros(16, 1, 16, 8).to(dtype)
    for position, number in enumerate(numbers):
        batch.v_cache[used[position // 16], :, position % 16] = number
        batch.k_cache[used[position // 16], :, position % 16, 0] = torch.tensor(1.0).to(dtype)
        batch.q[:] = 0.0
        out = paged_attention(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.block_table,
            torch.tensor([position + 1], dtype=torch.int32),
            batch.query_start_loc,
            batch.rows,
            sliding_window=1,
        )
        np.testing.assert_array_equal(out[0, 0].float().numpy(), np.full(8, number.float().item(), np.float32))


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_paged_attention_matches_oracle_when_heads_have_sinks(make_batch, assert_matches_oracle, dtype, sliding_window):
    # Far below all scores, beside them, above them, and without any weight.
    sinks = np.array([-80.0, 0.5, 6.0, -np.inf])
    batch = make_batch([*ragged(16), (1100, 1), (5, 7)], dtype=dtype)
    assert_matches_oracle(batch, sinks=sinks.astype(np.float32), sliding_window=sliding_window, soft_cap=20.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_paged_attention_takes_sinks_of_any_element_type(paged_attention, make_batch, dtype):
    batch = make_batch([(33, 1), (20, 20)])
    sinks = torch.tensor([-1.0, 0.5, 2.0, 0.0])
    want = paged_attention(*batch.arrays(), sinks=sinks)
    assert torch.equal(paged_attention(*batch.arrays(), sinks=sinks.to(dtype).repeat_interleave(2)[::2]), want)


def test_paged_attention_gives_zero_when_a_query_with_a_sink_sees_no_key(paged_attention, make_batch):
    batch = make_batch([(0, 1), (1, 2)])
    out, lse = paged_attention(*batch.arrays(), sinks=np.ones(4, np.float32), return_lse=True)
    assert out[:2].count_nonzero() == 0
    assert lse[:2].eq(-torch.inf).all()


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_paged_attention_matches_oracle_when_the_pool_has_that_layout(make_batch, assert_matches_oracle, layout, dtype):
    assert_matches_oracle(make_batch(ragged(8), block_size=8, layout=layout, dtype=dtype, head_dim=24))


def test_paged_attention_matches_oracle_when_keys_are_cut_into_chunks(make_batch, assert_matches_oracle):
    assert_matches_oracle(make_batch([(1100, 1), (513, 2), (512, 16), (600, 17)], head_dim=16))


@pytest.mark.parametrize("fill", [torch.inf, -torch.inf])
def test_paged_attention_matches_oracle_when_unused_slots_hold_infinity(make_batch, assert_matches_oracle, fill):
    assert_matches_oracle(make_batch(ragged(16), fill=fill))


def test_paged_attention_matches_oracle_when_scores_are_huge(make_batch, assert_matches_oracle):
    # On grids so coarse that products and their sums are exact in float32: what is left is the softmax.
    batch = make_batch([(40, 40), (90, 1)])
    batch.q.mul_(300).round_()
    batch.k_cache.mul_(64).round_().div_(64)
    assert_matches_oracle(batch)


def test_paged_attention_matches_oracle_when_slots_come_before_heads_in_memory(make_batch, assert_matches_oracle):
    batch = make_batch(ragged(16))
    batch.k_cache = batch.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    batch.v_cache = batch.v_cache.transpose(0, 1).contiguous().transpose(0, 1)
    assert_matches_oracle(batch)


def test_paged_attention_matches_oracle_when_queries_are_part_of_a_larger_array(make_batch, assert_matches_oracle):
    batch = make_batch([(33, 1), (20, 20)])
    fused = torch.full((21, 9, 64), torch.nan, dtype=batch.q.dtype)
    fused[:, 2:6] = batch.q
    batch.q = fused[:, 2:6]
    assert_matches_oracle(batch)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=6),
    group=st.integers(1, 16),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24, 40]),
    block_size=st.integers(1, 40),
    dtype=st.sampled_from([{}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}]),  # {}: the backend's own
    sliding_window=st.none() | st.integers(1, 80),
    soft_cap=st.none() | st.floats(0.5, 50.0),
)
def test_paged_attention_matches_oracle_when_everything_is_random(
    make_batch, assert_matches_oracle, sequences, group, num_kv_heads, dtype, sliding_window, soft_cap, **sizes
):
    batch = make_batch(sequences, num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, **dtype, **sizes)
    assert_matches_oracle(batch, sliding_window=sliding_window, soft_cap=soft_cap)


def test_paged_attention_gives_zero_and_minus_infinity_when_no_key_is_seen(paged_attention, make_batch):
    batch = make_batch([(0, 2), (3, 5), (0, 0)])
    out, lse = paged_attention(*batch.arrays(), return_lse=True)
    empty = [0, 1, 2, 3]  # both queries of the first sequence, and two of the second before its start
    assert out[empty].count_nonzero() == 0
    assert lse[empty].eq(-torch.inf).all()
    assert out[4:].isfinite().all()


@pytest.mark.parametrize("sequences", [[], [(0, 0)], [(5, 0), (0, 0)]])
def test_paged_attention_returns_nothing_when_the_batch_is_empty(paged_attention, make_batch, sequences):
    out, lse = paged_attention(*make_batch(sequences).arrays(), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))


def test_paged_attention_never_reads_blocks_when_they_are_before_the_window(paged_attention, make_batch):
    batch = make_batch([(100, 1), (64, 10)], block_size=8)
    want = paged_attention(*batch.arrays(), sliding_window=9)
    first, second = batch.rows.tolist()
    batch.block_table[first, : (100 - 9) // 8] = -1
    batch.block_table[second, : (64 - 10 + 1 - 9) // 8] = 2**30
    assert torch.equal(paged_attention(*batch.arrays(), sliding_window=9), want)


def test_paged_attention_is_bit_identical_when_a_sequence_is_alone(paged_attention, make_batch):
    batch = make_batch([(1500, 1), (700, 9), (90, 90), (1, 1)], head_dim=32, dtype=torch.bfloat16)
    together = paged_attention(*batch.arrays())
    starts = batch.query_start_loc.tolist()
    for s, (start, end) in enumerate(itertools.pairwise(starts)):
        loc = torch.tensor([0, end - start], dtype=torch.int32)
        caches = (batch.k_cache, batch.v_cache, batch.block_table)
        alone = paged_attention(batch.q[start:end], *caches, batch.seq_lens[s : s + 1], loc, batch.rows[s : s + 1])
        assert torch.equal(alone, together[start:end])


def test_paged_attention_takes_row_s_when_rows_are_not_given(paged_attention, make_batch):
    batch = make_batch([(33, 1), (20, 20)])
    *arrays, rows = batch.arrays()
    arrays[3] = batch.block_table[rows.long()]
    assert torch.equal(paged_attention(*arrays), paged_attention(*batch.arrays()))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_paged_attention_writes_where_it_is_told_when_out_is_given(paged_attention, make_batch, dtype):
    batch = make_batch([(33, 1), (20, 20)], dtype=dtype)
    memory = torch.full((4, 21, 64), torch.nan, dtype=dtype)
    out = memory.transpose(0, 1)
    assert paged_attention(*batch.arrays(), out=out) is out
    assert torch.equal(out, paged_attention(*batch.arrays()))
