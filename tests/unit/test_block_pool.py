"""BlockPool through Python."""

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, NotHeldError, UnknownIdError


def test_block_pool_never_hands_out_the_null_block():
    pool = pagedkv.BlockPool(8)
    assert 0 not in pool.allocate(7)


def test_block_pool_returns_none_and_changes_nothing_when_there_is_no_room():
    pool = pagedkv.BlockPool(8)
    assert pool.allocate(8) is None
    assert pool.num_free_blocks == 7


def test_block_pool_hands_out_the_most_recently_freed_block_first():
    pool = pagedkv.BlockPool(8)
    blocks = pool.allocate(4)
    pool.free(blocks[[2]])
    assert pool.allocate(1)[0] == blocks[2]


def test_block_pool_frees_a_block_when_its_last_holder_lets_go():
    pool = pagedkv.BlockPool(8)
    blocks = pool.allocate(2)
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.ref_counts(blocks).tolist() == [1, 1]
    assert pool.num_free_blocks == 5


def test_block_pool_refuses_a_double_free_and_changes_nothing():
    pool = pagedkv.BlockPool(8)
    blocks = pool.allocate(2)
    with pytest.raises(NotHeldError, match="block 1 is not held"):
        pool.free([2, 1, 1])
    assert pool.ref_counts(blocks).tolist() == [1, 1]


def test_block_pool_counts_a_block_that_one_call_lists_twice():
    pool = pagedkv.BlockPool(8)
    (block,) = pool.allocate(1)
    pool.touch([block])
    pool.free([block, block])
    assert pool.num_free_blocks == 7


def test_block_pool_refuses_to_touch_a_free_block():
    with pytest.raises(NotHeldError):
        pagedkv.BlockPool(8).touch([3])


@pytest.mark.parametrize("block", [0, 8, -1])
def test_block_pool_refuses_an_id_outside_the_pool(block):
    pool = pagedkv.BlockPool(8)
    with pytest.raises(UnknownIdError, match="not one of the blocks 1 to 7"):
        pool.ref_counts([block])


def test_block_pool_takes_ids_as_int64_arrays():
    pool = pagedkv.BlockPool(8)
    pool.free(pool.allocate(2).astype(np.int64))
    assert pool.num_free_blocks == 7


def test_block_pool_names_the_argument_when_ids_are_not_integers():
    with pytest.raises(TypeError, match="block_ids: expected .* int32 or int64 .* float64"):
        pagedkv.BlockPool(8).free(np.ones(2))


@pytest.mark.parametrize("num_blocks", [0, 1, 2**31])
def test_block_pool_refuses_sizes_out_of_range(num_blocks):
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        pagedkv.BlockPool(num_blocks)
