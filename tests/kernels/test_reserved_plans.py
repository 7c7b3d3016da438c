"""Plans that stay where they are: what a captured graph runs again after each of them, on the kernels' host."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from host_device import HostDevice, missing_tools

from pagedkv import PagedAttention
from pagedkv.attention.reserved import Room
from pagedkv.exceptions import InvalidArgumentError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
graphs = importlib.import_module("gpu_check.stages.graphs")
sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def device():
    """Put the host in the place of a GPU."""
    if reason := missing_tools():
        pytest.skip(reason)
    device = HostDevice()
    with device.in_place_of_gpu():
        yield device


def replaying(decoding):
    """Return what does as a graph does: launches of the first plan, over what the memory holds now."""
    plan = decoding.attention._plan

    def replay():
        for out, (k_cache, v_cache) in zip(decoding.out, decoding.layers, strict=True):
            plan.run(decoding.q, k_cache, v_cache, out)

    return replay


def test_launches_of_the_first_plan_compute_the_last_one(device):
    assert graphs.check("cpu", replaying) == 0


@pytest.fixture
def reserved(device):
    """Return attention with room for two sequences, and a table."""
    attention = PagedAttention(4, 2, 64, 16)
    table = torch.arange(64, dtype=torch.int32).reshape(2, 32)
    attention.reserve(table, num_seqs=2, num_tokens=2)
    return attention, table


def plan(attention, table, lengths, starts):
    attention.plan(table, torch.tensor(lengths, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32))


def test_plan_without_room_is_refused_and_the_one_before_stays(reserved):
    attention, table = reserved
    plan(attention, table, [5, 7], [0, 1, 2])
    before = attention._plan
    with pytest.raises(InvalidArgumentError, match="query_start_loc: expected at most 2 tokens, for which room is"):
        plan(attention, table, [5, 7], [0, 3, 5])
    assert attention._plan is before


def test_room_that_was_made_in_inference_mode_takes_plans_outside_of_it(device):
    attention, table = PagedAttention(4, 2, 64, 16), torch.zeros(2, 32, dtype=torch.int32)
    with torch.inference_mode():
        attention.reserve(table, num_seqs=2, num_tokens=2)
        plan(attention, table, [5, 7], [0, 1, 2])
    plan(attention, table, [6, 8], [0, 1, 2])


def test_plan_with_a_tree_is_refused_where_room_is_reserved(reserved):
    attention, table = reserved
    mask = {"tree_mask": torch.full((8,), 1, dtype=torch.uint8), "tree_mask_start_loc": torch.tensor([0, 8, 8])}
    mask["tree_mask_start_loc"] = mask["tree_mask_start_loc"].int()
    arrays = (torch.tensor([5, 7], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match="tree_mask: expected none"):
        attention.plan(table, *arrays, **mask)


@pytest.mark.parametrize("argument", ["num_seqs", "num_tokens"])
def test_reserve_names_a_size_that_is_none(argument):
    sizes = {"num_seqs": 1, "num_tokens": 1} | {argument: 0}
    with pytest.raises(InvalidArgumentError, match=f"{argument}: expected at least 1, found 0"):
        PagedAttention(4, 2, 64, 16).reserve(torch.zeros(1, 1, dtype=torch.int32), **sizes)


@pytest.mark.parametrize("sliding_window", [None, 5, 300])
@pytest.mark.parametrize("split_keys", [None, 256])
@pytest.mark.parametrize("group", [1, 4, 16, 40])
def test_room_is_enough_for_any_lengths(device, group, split_keys, sliding_window):
    generator = torch.Generator().manual_seed(group)
    attention = PagedAttention(2 * group, 2, 64, 16, sliding_window=sliding_window, split_keys=split_keys)
    num_seqs, width = 6, 256
    table = torch.zeros(num_seqs, width, dtype=torch.int32)
    attention.reserve(table, num_seqs=num_seqs, num_tokens=num_seqs)
    for longest in (1, 20, 257, 600, 1500, 4096):
        for _ in range(8):
            lengths = torch.randint(0, longest + 1, (num_seqs,), generator=generator)
            starts = [0, *lengths.clamp(max=1).cumsum(0).tolist()]
            plan(attention, table, lengths.tolist(), starts)
            plan(attention, table, [longest] * num_seqs, range(num_seqs + 1))


def test_room_counts_the_tokens_that_belong_to_no_sequence():
    room = Room.of(1, 40, group=2, rows=(16, 128), pieces=1, max_pieces=None)
    assert room.few - Room.of(1, 8, group=2, rows=(16, 128), pieces=1, max_pieces=None).few == 4
