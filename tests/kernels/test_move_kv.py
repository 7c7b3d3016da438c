import numpy as np
import pytest
import torch

from pagedkv import reference
from pagedkv.kv_cache import move_kv


def make_moves(*moves, group=0):
    return torch.tensor([(group, *move) for move in moves], dtype=torch.int64).reshape(-1, 3)


def number_slots(pool):
    """Give every element of a slot the slot's number."""
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    numbers = torch.arange(num_blocks * block_size).reshape(num_blocks, 1, 1, 1, block_size, 1)
    pool.copy_(numbers.expand(pool.shape))
    return pool


def read_slots(pool):
    """Return the number in every slot, which must be the same in all layers, sides and heads."""
    slots = pool.float().permute(0, 4, 1, 2, 3, 5).flatten(2).flatten(0, 1)
    assert slots.eq(slots[:, :1]).all()
    return slots[:, 0].tolist()


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_move_kv_matches_oracle_when_types_and_layout_vary(operations, make_pool, dtype, layout):
    pool = make_pool(7, 2, 3, 8, torch.float32, layout)
    pool.copy_(torch.randn(pool.shape))
    pool = pool.to(dtype)
    moves = make_moves((9, 5), (11, 6), (16, 9), (20, 1))
    want = pool.float().numpy()
    reference.move_kv(want, moves.numpy())
    operations.move_kv(pool, moves)
    np.testing.assert_array_equal(pool.float().numpy(), want)


def test_move_kv_reads_all_sources_first_when_slots_change_places(make_pool):
    pool = number_slots(make_pool(2, 2, 4, 8))
    move_kv(pool, make_moves((1, 2), (2, 3), (3, 1)))
    assert read_slots(pool) == [0, 3, 1, 2, 4, 5, 6, 7]


def test_move_kv_passes_over_the_moves_of_other_groups(operations, make_pool):
    pool = number_slots(make_pool(2, 1, 2, 8))
    operations.move_kv(pool, torch.cat([make_moves((3, 0)), make_moves((99, 2), (1, 2), group=1)]))
    assert read_slots(pool) == [3, 1, 2, 3]
    operations.move_kv(pool, make_moves((3, 1), group=2), group=2)
    assert read_slots(pool) == [3, 3, 2, 3]


def test_move_kv_leaves_other_memory_alone_when_the_pool_is_a_part_of_it(part_of_memory):
    memory, pool = part_of_memory
    number_slots(pool)
    move_kv(pool, make_moves((9, 0)))
    assert read_slots(pool)[:2] == [9, 1]
    assert memory.eq(-1).sum() == memory.numel() - pool.numel()


def test_move_kv_reads_and_writes_nothing_else_when_the_rest_is_poison(operations, make_pool):
    pool = make_pool(3, 2, 4, 16)
    pool[1, ..., 2, :] = 7
    operations.move_kv(pool, make_moves((6, 9)))
    assert pool[2, ..., 1, :].eq(7).all()
    assert pool.isnan().sum() == pool.numel() - 2 * pool[0, ..., 0, :].numel()


@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
@pytest.mark.usefixtures("num_threads")
def test_move_kv_matches_oracle_when_threads_share_the_work(make_pool):
    pool = number_slots(make_pool(64, 4, 16, 64))
    sources, destinations = torch.randperm(1024).split(512)
    move_kv(pool, make_moves(*zip(sources.tolist(), destinations.tolist(), strict=True)))
    slots = torch.tensor(read_slots(pool))
    assert torch.equal(slots[destinations], sources.float())
    assert torch.equal(slots[sources], sources.float())


def test_move_kv_does_nothing_when_there_are_no_moves(operations, make_pool):
    pool = number_slots(make_pool(3, 1, 1, 8))
    operations.move_kv(pool, make_moves())
    assert read_slots(pool) == [0, 1, 2]


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([(0, 1), (9, 2)], r"slot_moves\[1, 1\]: expected a slot below 6, found 9"),
        ([(0, -1)], r"slot_moves\[0, 2\]: expected a slot below 6, found -1"),
        ([(0, 2), (1, 3), (4, 2)], r"slot_moves\[2, 2\]: expected each destination once, found 2"),
    ],
)
def test_move_kv_names_the_move_and_writes_nothing_when_it_is_refused(make_pool, moves, message):
    pool = number_slots(make_pool(3, 1, 2, 8))
    with pytest.raises(ValueError, match=message):
        move_kv(pool, make_moves(*moves))
    assert read_slots(pool) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("argument", "change", "error", "message"),
    [
        ("pool", lambda a: a[0], ValueError, r"pool: expected shape \(num_blocks, .*\), found \(3, 2, 1,"),
        ("pool", lambda a: a[..., ::2], ValueError, r"pool: expected stride 1 in the last dimension"),
        ("slot_moves", lambda a: a.int(), TypeError, r"slot_moves: expected dtype int64, found int32"),
        ("slot_moves", lambda a: a[:, :2], ValueError, r"slot_moves: expected shape \(n, 3\), found \(1, 2\)"),
    ],
)
def test_move_kv_names_the_argument_when_it_is_refused(make_pool, argument, change, error, message):
    arguments = {"pool": make_pool(3, 1, 1, 8), "slot_moves": make_moves((0, 1))}
    arguments[argument] = change(arguments[argument])
    with pytest.raises(error, match=message):
        move_kv(**arguments)
