"""The package's own work lists: both kernels of attention and the merges, as a launch on a GPU will have them."""

import numpy as np
import pytest
import torch
from backends import CudaOnHost
from batches import assert_matches_oracle
from host_device import HostDevice, attention
from host_device.plans import plan_for_kernel
from test_tree_mask import BUSHY, WIDE, check_by, make_masks
from tight import make_tight_batch

import pagedkv
from pagedkv import PagedAttention
from pagedkv.attention import torch_ops
from pagedkv.attention.cuda import DevicePlan, Sizes
from pagedkv.exceptions import InvalidArgumentError

FP8 = {"dtype": torch.float8_e4m3fn, "q_dtype": torch.bfloat16}
# Few rows and many, with and without keys; with pieces of 48 keys some of each kind are cut.
MIXED = [(0, 1), (1, 1), (3, 4), (150, 1), (0, 0), (60, 5), (90, 20), (150, 70)]
HEADS, GROUP, PIECE = 2, 4, 48
ROWS = {"paged_decode": 16, "paged_prefill": 128}


def arrays_of(sequences):
    lens, queries = (torch.tensor(column, dtype=torch.int32) for column in zip(*sequences, strict=True))
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0, dtype=torch.int32)])
    return lens, starts, torch.arange(len(sequences), dtype=torch.int32)


def work_of_package(batch_arrays, trees=(None, None), *, window=None):
    """Return the lists of a batch as the package cuts them."""
    seq_lens, query_start_loc, rows = batch_arrays
    table = torch.zeros(len(seq_lens), 13, dtype=torch.int32)
    sizes = Sizes(HEADS * GROUP, HEADS, 64, 16, window, PIECE)
    mask, starts = trees
    options = {"rows": rows, "tree_mask": mask, "tree_mask_start_loc": starts}
    with HostDevice().in_place_of_gpu():
        return DevicePlan(sizes, table, seq_lens, query_start_loc, **options).work


def rows_of(words, num_words):
    """Return the entries of a list in an order of their own."""
    return sorted(words[4 : 4 + words[0] * num_words].reshape(-1, num_words).tolist())


@pytest.mark.parametrize("piece", [48, None])
@pytest.mark.parametrize(
    ("types", "options"),
    [({}, {}), (FP8, {}), ({}, {"sliding_window": 20, "sinks": torch.ones(8), "soft_cap": 3.0})],
    ids=["plain", "fp8", "features"],
)
def test_mixed_batch_matches_oracle_when_the_package_cuts_it(types, options, piece):
    batch = make_tight_batch(MIXED, num_kv_heads=2, **types)
    assert_matches_oracle(CudaOnHost(piece=piece).paged_attention, batch, **options)


def test_both_kernels_and_the_merges_run_when_a_batch_is_mixed():
    device = HostDevice()
    attention.paged_attention(device, *make_tight_batch(MIXED, num_kv_heads=2).arrays(), piece=48)
    assert [kernel for kernel, _ in device.launched] == ["paged_decode", "paged_prefill", "merge_partials"]


def test_trees_match_oracle_when_the_package_cuts_them():
    batch = make_tight_batch([(50, len(BUSHY) + 1), (40, 7), (90, len(WIDE) + 1), (2, 2)], num_kv_heads=2)
    check_by(CudaOnHost(piece=48).paged_attention, batch, make_masks([BUSHY, None, WIDE, [-1]]))


def test_tokens_behind_the_last_sequence_become_zero():
    batch = make_tight_batch([(20, 1), (40, 30)], num_kv_heads=2)
    padded = torch.cat([batch.q, torch.full((7, *batch.q.shape[1:]), torch.nan, dtype=batch.q.dtype)])
    out, lse = attention.paged_attention(HostDevice(), padded, *batch.arrays()[1:], return_lse=True)
    whole = attention.paged_attention(HostDevice(), *batch.arrays())
    assert torch.equal(out[: len(whole)], whole)
    assert (out[len(whole) :] == 0).all()
    assert (lse[len(whole) :] == -torch.inf).all()


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(
    ("kernel", "sequences", "piece"),
    [
        ("paged_decode", [(1, 1), (0, 1), (200, 1), (3, 4), (130, 3), (9, 0)], PIECE),
        ("paged_prefill", [(70, 70), (150, 40), (30, 33)], None),  # the keys of so many rows are not cut
    ],
)
def test_package_cuts_as_the_shims_own_planner_does(kernel, sequences, piece, window):
    batch_arrays = arrays_of(sequences)
    ours = work_of_package(batch_arrays, window=window)
    own = plan_for_kernel(
        kernel, batch_arrays, (None, None), group=GROUP, max_rows=ROWS[kernel], piece=piece, window=window
    )
    lists = {"paged_decode": ours.few, "paged_prefill": ours.many}
    assert rows_of(lists.pop(kernel), 12) == rows_of(own.lists[kernel], 12)
    assert rows_of(ours.merges, 8) == rows_of(own.merges, 8)
    assert ours.num_partial_rows == own.num_partial_rows
    assert [int(words[0]) for words in lists.values()] == [0]


def test_package_packs_trees_as_the_shims_own_planner_does():
    mask, starts = make_masks([BUSHY, None, WIDE])
    trees = tuple(torch.from_numpy(array) for array in (mask, starts))
    batch_arrays = arrays_of([(50, len(BUSHY) + 1), (40, 7), (90, len(WIDE) + 1)])
    ours = work_of_package(batch_arrays, trees)
    own = plan_for_kernel("paged_prefill", batch_arrays, trees, group=GROUP, max_rows=ROWS["paged_prefill"])
    np.testing.assert_array_equal(ours.tree_mask, own.tree_mask)
    np.testing.assert_array_equal(ours.tree_depths, own.tree_depths)


def planned(batch, **options):
    """Return a planned batch of the fixture's heads."""
    (_, num_kv_heads, block_size, head_dim), num_q_heads = batch.k_cache.shape, batch.q.shape[1]
    attention = PagedAttention(num_q_heads, num_kv_heads, head_dim, block_size, **options)
    attention.plan(*batch.arrays()[3:])
    return attention


@pytest.mark.parametrize("window", [None, 20])
def test_run_gives_the_bits_of_paged_attention(window):
    batch = make_tight_batch(MIXED, num_kv_heads=2)
    options = {"soft_cap": 3.0, "sinks": torch.ones(8), "return_lse": True}
    with HostDevice().in_place_of_gpu():
        want = pagedkv.paged_attention(*batch.arrays(), sliding_window=window, **options)
        found = planned(batch, sliding_window=window).run(*batch.arrays()[:3], **options)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))


def test_sequence_has_the_same_bits_in_another_batch_when_keys_are_cut_at_fixed_places():
    batch = make_tight_batch(MIXED, num_kv_heads=2)
    index = MIXED.index((150, 1))
    token = int(batch.query_start_loc[index])
    alone = [batch.seq_lens[index : index + 1], torch.tensor([0, 1], dtype=torch.int32), batch.rows[index : index + 1]]
    with HostDevice().in_place_of_gpu():
        attention = planned(batch, split_keys=PIECE)
        among_others = attention.run(*batch.arrays()[:3])
        attention.plan(batch.block_table, *alone)
        by_itself = attention.run(batch.q[token : token + 1], *batch.arrays()[1:3])
    assert torch.equal(by_itself[0], among_others[token])


def test_torch_operations_launch_the_same_kernels():
    batch = make_tight_batch(MIXED, num_kv_heads=2)
    device, pool = HostDevice(), batch.pool[:, None]  # of one layer
    with device.in_place_of_gpu():
        attention = planned(batch)
        want = attention.run(*batch.arrays()[:3])
        found = torch_ops.paged_attention(batch.q, pool, 0, attention.pack())
        k, v = torch.randn(2, 1, *batch.k_cache.shape[1::2]).to(batch.k_cache.dtype)
        torch_ops.append_kv(k, v, pool, 0, torch.tensor([18]))
    assert torch.equal(found, want)
    assert device.launched[-1][0] == "append_kv"
    assert torch.equal(pool[18 // 16, 0, :, :, 18 % 16], torch.stack([k[0], v[0]]))


def test_plan_that_another_has_taken_the_place_of_is_refused_by_torchs_operation():
    batch = make_tight_batch(MIXED, num_kv_heads=2)
    with HostDevice().in_place_of_gpu():
        attention = planned(batch)
        words = attention.pack()
        attention.plan(*batch.arrays()[3:])
        with pytest.raises(InvalidArgumentError, match="plan: expected what PagedAttention.pack returned"):
            torch_ops.paged_attention(batch.q, batch.pool[:, None], 0, words)
