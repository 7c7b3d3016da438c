"""The arrays of a plan as the contract lists them, and who keeps them alive."""

import gc

import numpy as np
import pytest
import torch

import pagedkv

# What a plan of S sequences, T tokens, M samples and G groups has; k is any number.
ARRAYS = {
    "handles": ("int64", "S"),
    "sequence": ("int32", "S"),
    "rows": ("int32", "S"),
    "token_ids": ("int32", "T"),
    "positions": ("int32", "T"),
    "input_from": ("int32", "T"),
    "slot_mapping": ("int64", "GT"),
    "query_start_loc": ("int32", "Z"),
    "seq_lens": ("int32", "S"),
    "sample_rows": ("int32", "M"),
    "sample_start_loc": ("int32", "Z"),
    "tree_mask": ("uint8", "k"),
    "tree_mask_start_loc": ("int32", "Z"),
    "table_updates": ("int32", "k4"),
    "copies": ("int32", "k2"),
    "swap_in": ("int32", "k2"),
    "swap_out": ("int32", "k2"),
    "swap_in_ids": ("int64", "k"),
    "swap_out_ids": ("int64", "k"),
    "loads": ("int32", "k3"),
    "load_ids": ("int64", "k"),
    "load_handles": ("int64", "k"),
    "slot_moves": ("int64", "k3"),
    "num_common_prefix_blocks": ("int32", "G"),
}


def make_scheduler(**limits):
    groups = [pagedkv.GroupSpec([0], 1, 8), pagedkv.GroupSpec([1], 1, 8, sliding_window=4)]
    return pagedkv.Scheduler(pagedkv.CacheConfig(64, 4, groups=groups), pagedkv.SchedulerConfig(**limits))


def make_plan():
    """Return a scheduler with two groups and a plan of it that decodes two samples and computes a prompt."""
    scheduler = make_scheduler()
    scheduler.add_request("two", np.arange(9), max_tokens=4, n=2)
    scheduler.commit(scheduler.schedule(), [1, 2])
    scheduler.add_request("new", np.arange(50, 57), max_tokens=4)
    return scheduler, scheduler.schedule()


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("rebuild", [lambda plan: plan, lambda plan: pagedkv.StepPlan.from_buffer(bytes(plan.buffer))])
def test_array_has_the_type_and_shape_of_the_contract(name, rebuild):
    _, plan = make_plan()
    plan = rebuild(plan)
    dtype, axes = ARRAYS[name]
    array = getattr(plan, name)
    sizes = {"S": 3, "T": 9, "M": 3, "G": 2, "Z": 4, "2": 2, "3": 3, "4": 4, "k": len(array)}
    assert (array.dtype.name, array.shape) == (dtype, tuple(sizes[axis] for axis in axes))
    assert not array.flags.writeable
    assert array.flags.c_contiguous


def test_memory_of_a_plan_outlives_it_in_torchs_hands():
    scheduler, plan = make_plan()
    expected = plan.slot_mapping.tolist()
    tensor = torch.from_dlpack(plan.slot_mapping)
    assert tensor.data_ptr() == plan.slot_mapping.ctypes.data
    scheduler.commit(plan, [1, 2, 3])
    del plan
    gc.collect()
    for _ in range(3):
        later = scheduler.schedule()
        scheduler.commit(later, np.zeros(later.num_samples, np.int32))
    assert tensor.tolist() == expected


def test_memory_of_a_plan_is_used_again_when_nobody_has_it():
    scheduler = make_scheduler()
    addresses = set()
    for _ in range(8):
        plan = scheduler.schedule()
        scheduler.commit(plan, [])
        addresses.add(plan.buffer.ctypes.data)
        del plan
    assert len(addresses) == 1


def test_applying_a_plan_twice_before_the_model_ran_is_applying_it_once():
    config = pagedkv.CacheConfig(64, 4, groups=[pagedkv.GroupSpec(1, 1, 8)])
    limits = pagedkv.SchedulerConfig(8, lookahead=3, max_model_len=64)
    scheduler = pagedkv.Scheduler(config, limits)
    cache = pagedkv.KVCache.from_config(config, limits, backend="numpy")
    scheduler.add_request("two", np.arange(10), max_tokens=9, n=2)
    cache.apply(plan := scheduler.schedule())
    cache.pool[...] = np.arange(cache.pool.size).reshape(cache.pool.shape)
    scheduler.commit(plan, [1, 2])
    plan = scheduler.schedule()
    assert len(plan.copies) == 1
    cache.apply(plan)
    once = cache.pool.copy(), cache.block_table.copy()
    cache.apply(plan)
    assert np.array_equal(cache.pool, once[0])
    assert np.array_equal(cache.block_table, once[1])
