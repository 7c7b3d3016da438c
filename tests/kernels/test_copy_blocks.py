import numpy as np
import pytest
import torch

from pagedkv import reference
from pagedkv.kv_cache import copy_blocks


def number_blocks(pool):
    """Give every element of a block the block's number."""
    pool.copy_(torch.arange(len(pool)).reshape(-1, 1, 1, 1, 1, 1).expand(pool.shape))
    return pool


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_copy_blocks_matches_oracle_when_types_and_layout_vary(operations, make_pool, dtype, layout, make_pairs):
    pool = make_pool(9, 2, 3, 8, torch.float32, layout)
    pool.copy_(torch.randn(pool.shape))
    pool = pool.to(dtype)
    pairs = make_pairs((1, 2), (1, 4), (8, 0), (3, 7))
    want = pool.float().numpy()
    reference.copy_blocks(want, pairs.numpy())
    operations.copy_blocks(pool, pairs)
    np.testing.assert_array_equal(pool.float().numpy(), want)


def test_copy_blocks_leaves_other_memory_alone_when_the_pool_is_a_part_of_it(part_of_memory, make_pairs):
    memory, pool = part_of_memory
    number_blocks(pool)
    copy_blocks(pool, make_pairs((4, 0)))
    assert pool[0].eq(4).all()
    assert memory.eq(-1).sum() == memory.numel() - pool.numel()


def test_copy_blocks_copies_the_right_blocks_when_strides_are_negative():
    pool = np.arange(4, dtype=np.float32)[::-1].reshape(4, 1, 1, 1, 1, 1).repeat(2, axis=2)
    copy_blocks(pool[::-1], np.array([[0, 3]], np.int32))
    assert pool[:, 0, 1, 0, 0, 0].tolist() == [0, 2, 1, 0]


def test_copy_blocks_does_nothing_when_there_are_no_pairs(operations, make_pool, make_pairs):
    pool = number_blocks(make_pool(3, 1, 1, 8))
    before = pool.clone()
    operations.copy_blocks(pool, make_pairs())
    assert torch.equal(pool, before)


@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
def test_copy_blocks_matches_oracle_when_threads_share_the_work(make_pool, num_threads):
    pool = number_blocks(make_pool(64, 4, 16, 64))
    sources, destinations = torch.randperm(64, dtype=torch.int32).split(32)
    copy_blocks(pool, torch.stack([sources, destinations], dim=1))
    assert torch.equal(pool[destinations.long()], pool[sources.long()])
    assert torch.equal(pool[:, 0, 0, 0, 0, 0][sources.long()], sources.float())


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1), (9, 2)], r"pairs\[1, 0\]: expected a block below 9, found 9"),
        ([(0, -1)], r"pairs\[0, 1\]: expected a block below 9, found -1"),
        ([(0, 2), (1, 3), (4, 2)], r"pairs\[2, 1\]: expected each destination once, found 2"),
        ([(0, 2), (2, 3)], r"pairs\[1, 0\]: expected a source that is no destination, found 2"),
        ([(0, 1), (5, 5)], r"pairs\[1, 0\]: expected a source that is no destination, found 5"),
    ],
)
def test_copy_blocks_names_the_pair_and_copies_nothing_when_it_is_refused(make_pool, pairs, message, make_pairs):
    pool = number_blocks(make_pool(9, 1, 2, 8))
    before = pool.clone()
    with pytest.raises(ValueError, match=message):
        copy_blocks(pool, make_pairs(*pairs))
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("argument", "change", "error", "message"),
    [
        (
            "pool",
            lambda a: a[0],
            ValueError,
            r"pool: expected shape \(num_blocks, num_layers, 2, .*\), found \(3, 2, 1,",
        ),
        (
            "pool",
            lambda a: a[:1].expand(3, 3, 2, 1, 1, 8),
            ValueError,
            r"pool: expected an output whose elements do not",
        ),
        ("pairs", lambda a: a.long(), TypeError, r"pairs: expected dtype int32, found int64"),
        ("pairs", lambda a: a[:, :1], ValueError, r"pairs: expected shape \(n, 2\), found \(1, 1\)"),
        ("pairs", lambda a: a[0], ValueError, r"pairs: expected shape \(n, 2\), found \(2,\)"),
    ],
)
def test_copy_blocks_names_the_argument_when_it_is_refused(make_pool, argument, change, error, message, make_pairs):
    arguments = {"pool": make_pool(3, 1, 1, 8), "pairs": make_pairs((0, 1))}
    arguments[argument] = change(arguments[argument])
    with pytest.raises(error, match=message):
        copy_blocks(**arguments)
