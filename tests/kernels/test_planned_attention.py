import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import _core
from pagedkv.attention import PagedAttention, paged_attention
from pagedkv.exceptions import InvalidArgumentError, StateError
from pagedkv.kv_cache import from_dlpack

SEQUENCES = [(1, 1), (33, 1), (20, 20), (0, 0), (1100, 2), (70, 40), (0, 3)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def planned(batch, **options):
    """Return a planned batch of the fixture's shape."""
    num_q_heads, (_, num_kv_heads, block_size, head_dim) = batch.q.shape[1], batch.k_cache.shape
    attention = PagedAttention(num_q_heads, num_kv_heads, head_dim, block_size, **options)
    attention.plan(batch.block_table, batch.seq_lens, batch.query_start_loc, batch.rows)
    return attention


def layer(batch):
    """Return queries, keys and values."""
    return batch.q, batch.k_cache, batch.v_cache


@pytest.mark.parametrize("sliding_window", [None, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_run_gives_the_bits_of_paged_attention(make_batch, dtype, sliding_window):
    batch = make_batch(SEQUENCES, dtype=dtype)
    options = {"softmax_scale": 0.3, "soft_cap": 20.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    want, want_lse = paged_attention(*batch.arrays(), sliding_window=sliding_window, return_lse=True, **options)
    out, lse = planned(batch, sliding_window=sliding_window).run(*layer(batch), return_lse=True, **options)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_run_gives_the_bits_of_paged_attention_when_queries_see_a_tree(make_batch):
    batch = make_batch([(10, 3), (33, 1)])
    masks = np.array([1, 3, 5], "<u8").view(np.uint8)
    trees = {"tree_mask": masks, "tree_mask_start_loc": np.array([0, 24, 24], np.int32)}
    attention = PagedAttention(4, 2, 64, 16)
    attention.plan(batch.block_table, batch.seq_lens, batch.query_start_loc, batch.rows, **trees)
    assert torch.equal(attention.run(*layer(batch)), paged_attention(*batch.arrays(), **trees))


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_one_plan_serves_every_layer_when_the_pool_has_that_layout(make_batch, layout):
    batch = make_batch(SEQUENCES, layout=layout)
    attention = planned(batch)
    for number in range(batch.pool.shape[1]):
        batch.pool[:, number].copy_((number + 1) * torch.randn(batch.pool[:, number].shape))
        batch.k_cache, batch.v_cache = batch.pool[:, number, 0], batch.pool[:, number, 1]
        assert torch.equal(attention.run(*layer(batch)), paged_attention(*batch.arrays()))


def test_plan_stays_what_it_was_when_its_arrays_change(make_batch):
    batch = make_batch(SEQUENCES)
    want = paged_attention(*batch.arrays())
    attention = planned(batch)
    for array in (batch.block_table, batch.seq_lens, batch.query_start_loc, batch.rows):
        array.fill_(-7)
    assert torch.equal(attention.run(*layer(batch)), want)


def test_plan_takes_the_place_of_the_one_before(make_batch):
    first, second = make_batch([(33, 1)]), make_batch([(20, 20), (5, 2)], seed=1)
    attention = planned(first)
    attention.plan(second.block_table, second.seq_lens, second.query_start_loc, second.rows)
    assert torch.equal(attention.run(*layer(second)), paged_attention(*second.arrays()))


def test_plan_before_stays_in_place_when_the_next_one_is_refused(make_batch):
    batch = make_batch([(33, 1)])
    attention = planned(batch)
    with pytest.raises(InvalidArgumentError, match="seq_lens"):
        attention.plan(batch.block_table, -batch.seq_lens, batch.query_start_loc, batch.rows)
    assert torch.equal(attention.run(*layer(batch)), paged_attention(*batch.arrays()))


def test_run_gives_zero_to_queries_behind_the_last_sequence(make_batch):
    batch = make_batch([(33, 1), (5, 2)])
    attention = planned(batch)
    q = torch.cat([batch.q, torch.full((2, 4, 64), torch.nan)])
    out, lse = attention.run(q, batch.k_cache, batch.v_cache, return_lse=True)
    assert torch.equal(out[:3], paged_attention(*batch.arrays()))
    assert out[3:].count_nonzero() == 0
    assert lse[3:].eq(-torch.inf).all()


def test_run_takes_imported_tensors_and_writes_into_out(make_batch):
    batch = make_batch(SEQUENCES, dtype=torch.bfloat16)
    out = np.zeros(batch.q.shape, np.uint16)
    arrays = [from_dlpack(array.view(torch.uint16).numpy(), "bfloat16") for array in layer(batch)]
    target = from_dlpack(out, "bfloat16")
    assert planned(batch).run(*arrays, out=target) is target
    assert torch.equal(torch.from_numpy(out).view(torch.bfloat16), paged_attention(*batch.arrays()))


def test_run_gives_the_same_bits_when_threads_share_a_plan(make_batch):
    batch = make_batch(SEQUENCES)
    attention, want = planned(batch), paged_attention(*batch.arrays())
    found = []
    threads = [threading.Thread(target=lambda: found.append(attention.run(*layer(batch)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(out, want) for out in found] == [True] * 8


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4], indirect=True)
def test_run_gives_the_same_bits_whatever_the_number_of_threads(make_batch, num_threads):
    batch = make_batch([(900, 1), (1500, 1), (70, 70)])
    out = planned(batch).run(*layer(batch))
    single = _core.AttentionPlan(
        4, 2, 64, 16, batch.block_table, batch.seq_lens, batch.query_start_loc, rows=batch.rows, num_threads=1
    )
    want = torch.empty_like(batch.q)
    single.run(*layer(batch), want)
    assert torch.equal(out, want)


def test_run_is_refused_when_nothing_was_planned(make_batch):
    batch = make_batch([(33, 1)])
    with pytest.raises(StateError, match="^plan: expected a planned batch.*found none$"):
        PagedAttention(4, 2, 64, 16).run(*layer(batch))


def swapped(batch, **arrays):
    """Return the layer with other arrays in place of some."""
    return [arrays.get(name, found) for name, found in zip(("q", "k_cache", "v_cache"), layer(batch), strict=True)]


@pytest.mark.parametrize(
    ("argument", "shapes"),
    [
        ("q", {"q": (4, 4, 64)}),
        ("q", {"q": (5, 6, 64)}),
        ("k_cache", {"k_cache": (9, 2, 8, 64), "v_cache": (9, 2, 8, 64)}),
        ("k_cache", {"k_cache": (9, 1, 16, 64), "v_cache": (9, 1, 16, 64)}),
        ("k_cache", {"k_cache": (2, 2, 16, 64), "v_cache": (2, 2, 16, 64)}),
        ("q", {"q": (5, 4, 32), "k_cache": (9, 2, 16, 32), "v_cache": (9, 2, 16, 32)}),
        ("v_cache", {"v_cache": (9, 2, 8, 64)}),
    ],
)
def test_run_names_the_argument_when_a_shape_is_not_the_plans(make_batch, argument, shapes):
    batch = make_batch([(33, 1), (20, 4)])
    out = torch.full(shapes.get("q", batch.q.shape), 7.0)
    arrays = swapped(batch, **{name: torch.zeros(shape) for name, shape in shapes.items()})
    with pytest.raises(InvalidArgumentError, match=rf"^{argument}: expected shape \(.*, found \("):
        planned(batch).run(*arrays, out=out)
    assert out.eq(7).all()


@pytest.mark.parametrize(
    ("argument", "sizes", "options"),
    [
        ("num_q_heads", (5, 2, 64, 16), {}),
        ("num_q_heads", (0, 2, 64, 16), {}),
        ("num_q_heads", (-4, 2, 64, 16), {}),
        ("num_kv_heads", (4, 0, 64, 16), {}),
        ("head_dim", (4, 2, 60, 16), {}),
        ("head_dim", (4, 2, 520, 16), {}),
        ("block_size", (4, 2, 64, 0), {}),
        ("sliding_window", (4, 2, 64, 16), {"sliding_window": 0}),
    ],
)
def test_plan_names_the_size_when_it_is_out_of_range(make_batch, argument, sizes, options):
    batch = make_batch([(33, 1)])
    attention = PagedAttention(*sizes, **options)
    with pytest.raises(InvalidArgumentError, match=rf"^{argument}: expected .*, found"):
        attention.plan(batch.block_table, batch.seq_lens, batch.query_start_loc, batch.rows)


def test_plan_names_the_argument_when_it_is_no_integer(make_batch):
    batch = make_batch([(33, 1)])
    with pytest.raises(TypeError, match="^head_dim: expected an integer"):
        PagedAttention(4, 2, 6.4, 16).plan(batch.block_table, batch.seq_lens, batch.query_start_loc)


@pytest.mark.parametrize("block", [-1, -(2**31)])
def test_plan_names_the_entry_when_a_block_is_negative(make_batch, block):
    batch = make_batch([(33, 1)])
    row = batch.rows[0]
    batch.block_table[row, 1] = block
    with pytest.raises(InvalidArgumentError, match=rf"^block_table\[{row}, 1\]: expected a block .*, found {block}$"):
        planned(batch)


def test_run_names_the_cache_when_the_plan_names_a_block_that_it_lacks(make_batch):
    batch = make_batch([(33, 1)])
    batch.block_table[batch.rows[0], 1] = 2**31 - 1
    attention = planned(batch)
    with pytest.raises(InvalidArgumentError, match=r"^k_cache: expected shape \(at least num_blocks=2147483648, 2, 16"):
        attention.run(*layer(batch))


def test_run_gives_the_same_bits_when_slopes_meet_a_tree(make_batch):
    batch = make_batch([(10, 3)])
    tree = {"tree_mask": np.array([1, 3, 5], "<u8").view(np.uint8), "tree_mask_start_loc": np.array([0, 24], np.int32)}
    attention = PagedAttention(4, 2, 64, 16)
    attention.plan(batch.block_table, batch.seq_lens, batch.query_start_loc, batch.rows, **tree)
    slopes = torch.rand(4)
    want = paged_attention(*batch.arrays(), alibi_slopes=slopes, **tree)
    assert torch.equal(attention.run(*layer(batch), alibi_slopes=slopes), want)


def unpacked(words, batch):
    """Run the plan that the words are."""
    out = torch.empty_like(batch.q)
    _core.AttentionPlan.unpack(words, batch.q, batch.k_cache).run(*layer(batch), out)
    return out


@pytest.mark.parametrize("sliding_window", [None, 17])
def test_packed_plan_gives_the_same_bits(make_batch, sliding_window):
    batch = make_batch(SEQUENCES)
    attention = planned(batch, sliding_window=sliding_window)
    assert torch.equal(unpacked(attention.pack(), batch), attention.run(*layer(batch)))


def test_packed_plan_keeps_trees(make_batch):
    batch = make_batch([(10, 3), (33, 1)])
    masks = np.array([1, 3, 5], "<u8").view(np.uint8)
    attention = PagedAttention(4, 2, 64, 16)
    index_arrays = (batch.block_table, batch.seq_lens, batch.query_start_loc, batch.rows)
    attention.plan(*index_arrays, tree_mask=masks, tree_mask_start_loc=np.array([0, 24, 24], np.int32))
    assert torch.equal(unpacked(attention.pack(), batch), attention.run(*layer(batch)))


@pytest.mark.parametrize("length", [0, 1, 6, 7, 9, 12, 13, -1])
def test_packed_plan_is_refused_when_words_are_missing(make_batch, length):
    batch = make_batch([(33, 1), (20, 4)])
    with pytest.raises(InvalidArgumentError, match=r"^plan: expected what pack\(\) .*, found too few words$"):
        unpacked(planned(batch).pack()[:length], batch)


def test_packed_plan_is_refused_when_words_are_left_over(make_batch):
    batch = make_batch([(33, 1)])
    words = torch.cat([planned(batch).pack(), torch.zeros(2, dtype=torch.int32)])
    with pytest.raises(InvalidArgumentError, match="^plan: .*, found 2 words too many$"):
        unpacked(words, batch)


def test_packed_plan_is_refused_when_it_is_for_other_layers(make_batch):
    batch, other = make_batch([(33, 1)]), make_batch([(33, 1)], num_q_heads=8)
    with pytest.raises(InvalidArgumentError, match=r"^plan: expected one for 8 query .*, found 4 query"):
        unpacked(planned(batch).pack(), other)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_packed_plan_never_reaches_outside_the_cache_when_words_are_wrong(make_small_batch, data):
    batch, words = make_small_batch
    words = words.clone()
    value = st.integers(-3, 40) | st.integers(-(2**31), 2**31 - 1)
    for place in data.draw(st.lists(st.integers(0, len(words) - 1), min_size=1, max_size=3)):
        words[place] = data.draw(value)
    try:
        out = unpacked(words, batch)
    except InvalidArgumentError:
        return
    # Every slot is 1, and whoever reads outside of them reads something else or dies.
    assert bool(((out == 0) | (out == 1)).all())


@pytest.fixture(scope="module")
def make_small_batch():
    """Return a batch in a cache of ones, and its plan as words."""
    cache = torch.ones(8, 2, 4, 8)
    table = torch.tensor([[7, 2, 5], [1, 0, 3]], dtype=torch.int32)
    lens, starts = torch.tensor([10, 5], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)

    class Small:
        q, k_cache, v_cache = torch.ones(3, 4, 8), cache, cache

    attention = PagedAttention(4, 2, 8, 4)
    attention.plan(table, lens, starts)
    return Small, attention.pack()
