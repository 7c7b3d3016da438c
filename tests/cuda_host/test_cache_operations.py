"""append_kv, copy_blocks and move_kv as CUDA kernels, against the oracle, bit for bit."""

import numpy as np
import pytest
import torch
from host_device import HostDevice, cache_operations

from pagedkv import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
SCHEDULES = ["uniform", "warp-priority"]
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bits(tensor):
    """Return the bits of a tensor's elements, for comparisons that see NaN too."""
    return tensor.contiguous().view(SIGNED[tensor.element_size()]).numpy()


def make_pool(dtype, *, head_dim=16, block_size=5, layout="block", num_blocks=7, gap=0):
    """Return a pool of three layers and three heads at random, rows `gap` elements apart."""
    generator = torch.Generator().manual_seed(head_dim + block_size)
    sizes = (2, 3, block_size, head_dim + gap)
    shape = (num_blocks, 3, *sizes) if layout == "block" else (3, num_blocks, *sizes)
    pool = torch.randn(shape, generator=generator).to(dtype)
    return (pool if layout == "block" else pool.transpose(0, 1))[..., :head_dim]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("head_dim", "gap"), [(16, 0), (80, 0), (12, 4), (6, 1)])
@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_kv_writes_the_slots_and_nothing_else(dtype, layout, head_dim, gap, schedule):
    pool = make_pool(dtype, head_dim=head_dim, layout=layout, gap=gap)
    fused = torch.randn(8, 3, 3, head_dim).to(dtype)
    k, v = fused[:, 1], fused[:, 2]
    slots = torch.tensor([34, 0, -1, 7, 6, 5, -1, 20])
    want = bits(pool).copy()
    reference.append_kv(bits(k), bits(v), want[:, 1, 0], want[:, 1, 1], slots.numpy())
    cache_operations.append_kv(HostDevice(schedule=schedule), k, v, pool[:, 1, 0], pool[:, 1, 1], slots)
    np.testing.assert_array_equal(bits(pool), want)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (6, 1), (128, 64)])
@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_blocks_copies_whole_blocks_and_nothing_else(dtype, layout, head_dim, block_size, schedule):
    pool = make_pool(dtype, head_dim=head_dim, block_size=block_size, layout=layout)
    pairs = torch.tensor([(1, 2), (1, 4), (6, 0), (3, 5)], dtype=torch.int32)
    want = bits(pool).copy()
    reference.copy_blocks(want, pairs.numpy())
    cache_operations.copy_blocks(HostDevice(schedule=schedule), pool, pairs)
    np.testing.assert_array_equal(bits(pool), want)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("head_dim", "gap"), [(16, 0), (80, 16), (12, 4), (6, 1)])
@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_move_kv_moves_tokens_over_all_layers_and_nothing_else(dtype, layout, head_dim, gap, schedule):
    pool = make_pool(dtype, head_dim=head_dim, layout=layout, gap=gap)
    moves = torch.tensor([(0, 12, 11), (0, 14, 12), (1, 0, 3), (0, 34, 30), *((0, 20 + i, 1 + i) for i in range(6))])
    want = bits(pool).copy()
    reference.move_kv(want, moves.numpy())
    cache_operations.move_kv(HostDevice(schedule=schedule), pool, moves)
    np.testing.assert_array_equal(bits(pool), want)


def test_nothing_is_touched_when_there_is_nothing_to_do():
    pool = make_pool(torch.bfloat16)
    before = bits(pool).copy()
    device = HostDevice(count=True)
    no_tokens = torch.zeros(0, 3, 16, dtype=torch.bfloat16)
    cache_operations.append_kv(
        device, no_tokens, no_tokens, pool[:, 1, 0], pool[:, 1, 1], torch.zeros(0, dtype=torch.int64)
    )
    cache_operations.copy_blocks(device, pool, torch.zeros(0, 2, dtype=torch.int32))
    cache_operations.move_kv(device, pool, torch.zeros(0, 3, dtype=torch.int64))
    np.testing.assert_array_equal(bits(pool), before)
    assert device.launched == []
