import numpy as np
import pytest
import torch

from pagedkv import reference
from pagedkv.kv_cache import swap_blocks


@pytest.mark.parametrize("layouts", [("block", "block"), ("layer", "block"), ("block", "layer"), ("layer", "layer")])
def test_swap_blocks_matches_oracle_when_types_and_layouts_vary(make_pool, dtype, layouts, make_pairs):
    source, destination = (
        make_pool(blocks, 2, 3, 8, torch.float32, layout) for blocks, layout in zip((9, 5), layouts, strict=True)
    )
    source.copy_(torch.randn(source.shape))
    source, destination = source.to(dtype), destination.to(dtype)
    pairs = make_pairs((8, 0), (3, 4), (8, 2))
    want = destination.float().numpy().copy()
    reference.swap_blocks(source.float().numpy(), want, pairs.numpy())
    swap_blocks(source, destination, pairs)
    np.testing.assert_array_equal(destination.float().numpy(), want)


def test_swap_blocks_brings_back_what_it_took_out_when_blocks_move(make_pool, make_pairs):
    device, host = make_pool(8, 1, 4, 8), make_pool(3, 1, 4, 8)
    device.copy_(torch.randn(device.shape))
    before = device.clone()
    swap_blocks(device, host, make_pairs((1, 2), (5, 0), (7, 1)))
    device[[1, 5, 7]] = torch.nan
    swap_blocks(host, device, make_pairs((2, 3), (0, 2), (1, 7)))
    assert torch.equal(device[[3, 2, 7]], before[[1, 5, 7]])


@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
def test_swap_blocks_matches_oracle_when_threads_share_the_work(make_pool, num_threads):
    source, destination = make_pool(64, 4, 16, 64), make_pool(64, 4, 16, 64)
    source.copy_(torch.randn(source.shape))
    order = torch.randperm(64, dtype=torch.int32)
    swap_blocks(source, destination, torch.stack([order, order.flip(0)], dim=1))
    assert torch.equal(destination[order.flip(0).long()], source[order.long()])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1), (9, 2)], r"pairs\[1, 0\]: expected a block below 9, found 9"),
        ([(8, 3)], r"pairs\[0, 1\]: expected a block below 3, found 3"),
        ([(0, -1)], r"pairs\[0, 1\]: expected a block below 3, found -1"),
        ([(0, 2), (1, 1), (4, 2)], r"pairs\[2, 1\]: expected each destination once, found 2"),
    ],
)
def test_swap_blocks_names_the_pair_and_copies_nothing_when_it_is_refused(make_pool, pairs, message, make_pairs):
    source, destination = make_pool(9, 1, 2, 8, fill=1), make_pool(3, 1, 2, 8, fill=0)
    with pytest.raises(ValueError, match=message):
        swap_blocks(source, destination, make_pairs(*pairs))
    assert destination.eq(0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a.half(), TypeError, r"destination: expected dtype float32, found float16"),
        (
            lambda a: a[:, :1],
            ValueError,
            r"destination: expected shape \(num_blocks, 3, 2, 1, 1, 8\), found \(3, 1, 2,",
        ),
        (
            lambda a: a[:1].expand(3, 3, 2, 1, 1, 8),
            ValueError,
            r"destination: expected an output whose elements do not",
        ),
    ],
)
def test_swap_blocks_names_the_destination_when_it_is_refused(make_pool, change, error, message, make_pairs):
    source, destination = make_pool(3, 1, 1, 8), make_pool(3, 1, 1, 8)
    with pytest.raises(error, match=message):
        swap_blocks(source, change(destination), make_pairs((0, 1)))


def test_swap_blocks_refuses_pools_that_share_memory(make_pool, make_pairs):
    pool = make_pool(3, 1, 1, 8)
    with pytest.raises(ValueError, match=r"destination: expected memory of its own, found an overlap with source"):
        swap_blocks(pool, pool, make_pairs((0, 1)))
