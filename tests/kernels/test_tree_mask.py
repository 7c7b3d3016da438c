"""Attention of draft trees: queries see what they continue and nothing else of their step."""

import functools

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import reference

# Parents of the guesses of two trees; -1 for the token before them.
BUSHY = [-1, -1, 0, 0, 1, 2, 2, 5]
WIDE = [-1] * 70
SLOPES = np.array([0.5, 0.25, 1, -0.5], np.float32)


def pack(parents):
    """Return the rows of the mask of one tree, as bytes."""
    num_tokens = len(parents) + 1
    seen = np.zeros((num_tokens, -(-num_tokens // 64) * 64), np.uint8)
    seen[0, 0] = 1
    for node, parent in enumerate(parents, start=1):
        seen[node] = seen[parent + 1]
        seen[node, node] = 1
    return np.packbits(seen, axis=1, bitorder="little").ravel()


def make_masks(trees):
    """Return the mask of a batch of trees and where each starts; None is a causal sequence."""
    parts = [np.zeros(0, np.uint8) if parents is None else pack(parents) for parents in trees]
    starts = np.cumsum([0] + [len(part) for part in parts])
    return np.concatenate(parts), starts.astype(np.int32)


@pytest.fixture
def check(paged_attention):
    """Return a function that compares each backend with the oracle."""
    return functools.partial(check_by, paged_attention)


def check_by(paged_attention, batch, masks, **options):
    mask, starts = masks
    options |= {"tree_mask": mask, "tree_mask_start_loc": starts}
    out, lse = paged_attention(*batch.arrays(), return_lse=True, **options)
    want, want_lse = reference.paged_attention(*batch.oracle_arrays(), return_lse=True, **options)
    dtype = str(batch.k_cache.dtype).removeprefix("torch.")
    same = reference.paged_attention_same_precision(*batch.oracle_arrays(), dtype=dtype, **options)
    bound = reference.attention_tolerance(want, same, batch.used(batch.v_cache).double().numpy(), dtype)
    assert np.abs(out.double().numpy() - want).max() <= bound
    np.testing.assert_allclose(lse.numpy(), want_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_paged_attention_matches_oracle_when_some_sequences_have_trees(check, make_batch, dtype, block_size):
    trees = [BUSHY, None, WIDE, None, [-1]]
    sequences = [(50, len(BUSHY) + 1), (40, 7), (90, len(WIDE) + 1), (33, 1), (2, 2)]
    batch = make_batch(sequences, dtype=dtype, block_size=block_size)
    check(batch, make_masks(trees))


@pytest.mark.parametrize("sliding_window", [1, 2, 5, 40, 100])
def test_window_counts_depth_when_a_sequence_has_a_tree(check, make_batch, sliding_window):
    batch = make_batch([(50, len(BUSHY) + 1), (30, 3)])
    check(batch, make_masks([BUSHY, None]), sliding_window=sliding_window)


def test_soft_cap_and_sinks_hold_for_trees(check, make_batch):
    batch = make_batch([(50, len(BUSHY) + 1)])
    check(batch, make_masks([BUSHY]), soft_cap=1.5, sinks=np.array([0.5, -1.0, 2.0, 0.0], np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [3, 16])
def test_slopes_measure_the_depths_of_nodes(check, make_batch, dtype, block_size):
    trees = [BUSHY, None, WIDE, None, [-1], [-1, -1]]
    sequences = [(50, len(BUSHY) + 1), (40, 7), (90, len(WIDE) + 1), (33, 1), (2, 2), (30, 3)]
    batch = make_batch(sequences, dtype=dtype, block_size=block_size)
    check(batch, make_masks(trees), alibi_slopes=SLOPES)


@pytest.mark.parametrize("options", [{"soft_cap": 1.5}, {"sliding_window": 4}, {"sliding_window": 30}], ids=str)
def test_slopes_hold_for_trees_beside_other_options(check, make_batch, options):
    batch = make_batch([(50, len(BUSHY) + 1), (90, len(WIDE) + 1)])
    check(batch, make_masks([BUSHY, WIDE]), alibi_slopes=SLOPES, **options)


def test_slopes_hold_for_trees_when_keys_are_cut_into_chunks(check, make_batch):
    check(make_batch([(1030, len(BUSHY) + 1)]), make_masks([BUSHY]), alibi_slopes=SLOPES / 16)


def test_trees_are_right_when_keys_are_cut_into_chunks(check, make_batch):
    check(make_batch([(1100, len(BUSHY) + 1)]), make_masks([BUSHY]))


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": SLOPES}], ids=["plain", "slopes"])
def test_a_path_through_a_tree_sees_what_a_chain_of_it_sees(paged_attention, make_batch, options):
    tree = make_batch([(40, len(BUSHY) + 1)], block_size=4)
    mask, starts = make_masks([BUSHY])
    out = paged_attention(*tree.arrays(), tree_mask=mask, tree_mask_start_loc=starts, **options)
    # The path 0, 2, 5, 7 lies behind the known token, at 31.
    row = tree.block_table[tree.rows[0]]
    slots = [32, 34, 37, 39]
    moves = [[0, int(row[s // 4]) * 4 + s % 4, int(row[t // 4]) * 4 + t % 4] for t, s in enumerate(slots, start=32)]
    pagedkv.kv_cache.move_kv(tree.pool, np.array(moves))
    chain = paged_attention(
        tree.q[[0, 1, 3, 6, 8]],
        tree.k_cache,
        tree.v_cache,
        tree.block_table,
        torch.tensor([36], dtype=torch.int32),
        torch.tensor([0, 5], dtype=torch.int32),
        tree.rows,
        **options,
    )
    epsilon = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out[[0, 1, 3, 6, 8]], chain, atol=8 * epsilon, rtol=8 * epsilon)


@pytest.mark.usefixtures("isa")
def test_what_other_branches_hold_never_reaches_a_guess_even_when_it_is_nan(make_batch):
    batch = make_batch([(20, 3)], block_size=4)
    mask, starts = make_masks([[-1, -1]])
    block = batch.block_table[batch.rows[0], 4]
    batch.k_cache[block, :, 2] = torch.nan
    batch.v_cache[block, :, 2] = torch.inf
    out = pagedkv.paged_attention(*batch.arrays(), tree_mask=mask, tree_mask_start_loc=starts)
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tree_mask": None}, ValueError, r"tree_mask: expected tree_mask and tree_mask_start_loc together"),
        ({"tree_mask": np.zeros(72, np.int32)}, TypeError, r"tree_mask: expected dtype uint8, found int32"),
        (
            {"tree_mask_start_loc": np.array([0, 72, 72], np.int32)},
            ValueError,
            r"tree_mask_start_loc: expected shape \(num_seqs \+ 1=2,\), found \(3,\)",
        ),
        (
            {"tree_mask_start_loc": np.array([0, 64], np.int32)},
            ValueError,
            r"tree_mask_start_loc\[1\]: expected 0 or 72 more, within tree_mask, found 64",
        ),
        (
            {"tree_mask_start_loc": np.array([8, 80], np.int32)},
            ValueError,
            r"tree_mask_start_loc\[1\]: expected 8 or 72 more, within tree_mask, found 80",
        ),
    ],
)
def test_mask_is_refused_by_name_when_it_does_not_fit_the_batch(make_batch, change, error, message):
    batch = make_batch([(50, len(BUSHY) + 1)])
    mask, starts = make_masks([BUSHY])
    options = {"tree_mask": mask, "tree_mask_start_loc": starts} | change
    with pytest.raises(error, match=message):
        pagedkv.paged_attention(*batch.arrays(), **options)
