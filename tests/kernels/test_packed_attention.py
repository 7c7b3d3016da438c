"""Attention over packed keys; unused slots of every block hold NaN."""

import functools
import itertools

import pytest
import torch
from batches import assert_matches_oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv.attention import PagedAttention, paged_attention

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(name="assert_matches_oracle")
def assert_matches_oracle_fixture():
    """Return the function that compares attention on the CPU with the oracle: packed keys exist nowhere else."""
    return functools.partial(assert_matches_oracle, paged_attention)


def name(dtype):
    return str(dtype).removeprefix("torch.")


def ragged(block_size):
    """Return lengths around every border, of blocks and of packed groups, as prefill, decode and chunks."""
    edges = sorted({1, 2, 15, 16, 17, block_size - 1, block_size, block_size + 1})
    prefill = [(length, length) for length in (*edges, 37)]
    decode = [(length, 1) for length in (*edges, 300)]
    return [*decode, (0, 0), *prefill, (300, 5), (41, 17), (7, 0)]


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_packed_attention_matches_oracle_when_lengths_are_ragged(
    make_packed_batch, assert_matches_oracle, dtype, block_size
):
    assert_matches_oracle(make_packed_batch(ragged(block_size), dtype=dtype, block_size=block_size))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 12, 18, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=name)
def test_packed_attention_matches_oracle_when_query_heads_share_kv_heads(
    make_packed_batch, assert_matches_oracle, dtype, group
):
    sizes = {"num_q_heads": 2 * group, "head_dim": 32, "dtype": dtype, "q_dtype": torch.bfloat16}
    assert_matches_oracle(make_packed_batch([(33, 1), (20, 20), (70, 3)], **sizes))


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_packed_attention_matches_oracle_when_head_dim_changes(
    make_packed_batch, assert_matches_oracle, dtype, head_dim
):
    assert_matches_oracle(make_packed_batch([(33, 1), (20, 20), (70, 3)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", FP8, ids=name)
@pytest.mark.parametrize("q_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_packed_attention_matches_oracle_when_the_cache_is_fp8(
    make_packed_batch, assert_matches_oracle, q_dtype, dtype, head_dim
):
    batch = make_packed_batch([*ragged(16), (1100, 1)], dtype=dtype, q_dtype=q_dtype, head_dim=head_dim)
    scales = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([3.0])}
    assert_matches_oracle(batch, **scales)


@pytest.mark.parametrize("dtype", FP8, ids=name)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=name)
def test_packed_attention_reads_every_fp8_number(make_batch, pack, dtype, q_dtype):
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    batch = make_batch([(256, 1)], dtype=dtype, q_dtype=q_dtype, num_q_heads=1, num_kv_heads=1, head_dim=8)
    used = batch.block_table[batch.rows[0], :16].long()
    k = torch.zeros(16, 16, 8)
    for element in range(8):
        k[..., element] = numbers.roll(32 * element).reshape(16, 16).float()
    finite = k.isfinite().all(2)
    batch.k_cache[used, 0] = k.to(dtype)
    batch.q[:] = torch.arange(1, 9).to(q_dtype) / 64
    packed = pack(batch)
    wanted = (k * batch.q[0, 0].float()).sum(2).flatten()
    for position in range(256):
        lengths = torch.tensor([position + 1], dtype=torch.int32)
        arrays = (*packed.arrays()[:4], lengths, *packed.arrays()[5:])
        _, lse = paged_attention(*arrays, sliding_window=1, softmax_scale=1.0, return_lse=True)
        if finite.flatten()[position]:
            torch.testing.assert_close(lse[0, 0], wanted[position], rtol=1e-6, atol=1e-7)
        else:
            assert not lse.isfinite().all()


@pytest.mark.parametrize("sliding_window", [1, 5, 16, 33, 1000])
@pytest.mark.parametrize("block_size", [16, 48])
def test_packed_attention_matches_oracle_when_a_window_slides(
    make_packed_batch, assert_matches_oracle, block_size, sliding_window
):
    batch = make_packed_batch(ragged(block_size), block_size=block_size, head_dim=16)
    assert_matches_oracle(batch, sliding_window=sliding_window)


def test_packed_attention_never_reads_blocks_when_they_are_before_the_window(make_packed_batch):
    batch = make_packed_batch([(100, 1), (64, 10)])
    want = paged_attention(*batch.arrays(), sliding_window=9)
    first, second = batch.rows.tolist()
    batch.block_table[first, : (100 - 9) // 16] = -1
    batch.block_table[second, : (64 - 10 + 1 - 9) // 16] = 2**30
    assert torch.equal(paged_attention(*batch.arrays(), sliding_window=9), want)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_packed_attention_matches_oracle_when_scores_are_capped_and_biased(
    make_packed_batch, assert_matches_oracle, dtype, group
):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    batch = make_packed_batch([*ragged(16), (1100, 1)], dtype=dtype, num_kv_heads=4 // group)
    assert_matches_oracle(batch, alibi_slopes=slopes, soft_cap=20.0, sliding_window=200)


def test_packed_attention_matches_oracle_when_heads_have_sinks(make_packed_batch, assert_matches_oracle):
    sinks = torch.tensor([-80.0, 0.5, 6.0, -torch.inf])
    batch = make_packed_batch([*ragged(16), (1100, 1), (5, 7)], dtype=torch.bfloat16)
    assert_matches_oracle(batch, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=name)
def test_packed_attention_matches_oracle_when_queries_are_a_tree(make_packed_batch, assert_matches_oracle, dtype):
    batch = make_packed_batch([(40, 3), (21, 1)], dtype=dtype, q_dtype=torch.bfloat16)
    # The second and the third query are both children of the first.
    mask = torch.zeros(3, 8, dtype=torch.uint8)
    mask[:, 0] = torch.tensor([0b001, 0b011, 0b101])
    starts = torch.tensor([0, 24, 24], dtype=torch.int32)
    tree = {"tree_mask": mask.flatten().numpy(), "tree_mask_start_loc": starts.numpy()}
    assert_matches_oracle(batch, **tree)


def test_packed_attention_matches_oracle_when_layers_are_outermost(make_packed_batch, assert_matches_oracle):
    assert_matches_oracle(make_packed_batch(ragged(16), layout="layer", dtype=torch.bfloat16, head_dim=24))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=6),
    group=st.integers(1, 18),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24, 40, 72]),
    block_size=st.sampled_from([16, 32, 48]),
    dtype=st.sampled_from([*DTYPES, *FP8]),
    q_dtype=st.sampled_from(DTYPES),
    sliding_window=st.none() | st.integers(1, 80),
)
def test_packed_attention_matches_oracle_when_everything_is_random(
    make_packed_batch, assert_matches_oracle, sequences, group, num_kv_heads, sliding_window, **sizes
):
    batch = make_packed_batch(sequences, num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, **sizes)
    assert_matches_oracle(batch, sliding_window=sliding_window)


def large_batch(make_packed_batch):
    """Return a batch with work enough for threads, cut along queries and keys."""
    return make_packed_batch([(1500, 1), (700, 9), (90, 90), (1, 1)], head_dim=32, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_threads", [2, 4], indirect=True)
def test_packed_attention_is_bit_identical_when_threads_are_added(make_packed_batch, num_threads, monkeypatch):
    batch = large_batch(make_packed_batch)
    together = paged_attention(*batch.arrays())
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
    assert torch.equal(paged_attention(*batch.arrays()), together)


def test_packed_attention_is_bit_identical_when_a_sequence_is_alone(make_packed_batch):
    batch = large_batch(make_packed_batch)
    together = paged_attention(*batch.arrays())
    for s, (start, end) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
        loc = torch.tensor([0, end - start], dtype=torch.int32)
        caches = batch.arrays()[1:4]
        alone = paged_attention(batch.q[start:end], *caches, batch.seq_lens[s : s + 1], loc, batch.rows[s : s + 1])
        assert torch.equal(alone, together[start:end])


def test_packed_attention_gives_the_same_bits_when_it_is_planned(make_packed_batch):
    batch = large_batch(make_packed_batch)
    q, k_cache, v_cache, *tables = batch.arrays()
    attention = PagedAttention(q.shape[1], *k_cache.shape[1::2], k_cache.shape[2])
    attention.plan(*tables)
    assert torch.equal(attention.run(q, k_cache, v_cache), paged_attention(*batch.arrays()))


def test_packed_attention_names_the_values_when_they_are_packed(make_packed_batch):
    arrays = list(make_packed_batch([(33, 1)]).arrays())
    arrays[2] = arrays[1]
    with pytest.raises(ValueError, match="v_cache: expected an array in the natural layout, found packed keys"):
        paged_attention(*arrays)


def test_packed_attention_names_the_queries_when_they_are_packed(make_packed_batch):
    arrays = list(make_packed_batch([(33, 2)]).arrays())
    arrays[0] = arrays[1].select(0, 1)
    with pytest.raises(ValueError, match="q: expected an array in the natural layout, found packed keys"):
        paged_attention(*arrays, out=torch.empty(2, 16, 64))
