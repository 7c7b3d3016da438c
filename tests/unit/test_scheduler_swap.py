"""Preemption by swap through the Python face."""

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, UnknownIdError


def make_preempted(num_host_blocks=4):
    """Return a scheduler whose second plan sent the younger of two requests out, and that plan."""
    cache_config = pagedkv.CacheConfig(5, 4, num_host_blocks=num_host_blocks)
    scheduler = pagedkv.Scheduler(cache_config, pagedkv.SchedulerConfig(preemption_mode="swap"))
    scheduler.add_request("old", np.arange(8), max_tokens=8)
    scheduler.add_request("young", np.arange(100, 107), max_tokens=9)
    scheduler.commit(scheduler.schedule(), [7, 7])
    return scheduler, scheduler.schedule()


def test_plan_tells_what_goes_out_when_a_request_is_preempted():
    scheduler, plan = make_preempted()
    assert plan.swap_out.shape == (2, 2)
    assert plan.swap_out_ids.tolist() == scheduler.outstanding_transfers.tolist() * 2
    assert (scheduler.num_swaps, scheduler.num_host_blocks) == (1, (4, 2))


def test_plan_says_that_it_waits_when_only_transfers_are_in_the_way():
    scheduler, plan = make_preempted()
    assert (plan.waits_for_transfers, plan.num_tokens) == (True, 0)
    scheduler.commit(plan, [])
    scheduler.transfers_done(plan.swap_out_ids[:1])
    assert not scheduler.schedule().waits_for_transfers


def test_transfers_done_takes_a_list_and_a_failure():
    scheduler, plan = make_preempted()
    scheduler.commit(plan, [])
    scheduler.transfers_done(plan.swap_out_ids[:1].tolist(), ok=False)
    assert scheduler.num_host_blocks == (4, 4)


@pytest.mark.parametrize("convert", [torch.from_numpy, lambda ids: ids.astype(np.int32), lambda ids: ids[::-1]])
def test_transfers_done_takes_arrays_of_any_library_and_layout(convert):
    scheduler, plan = make_preempted()
    scheduler.commit(plan, [])
    scheduler.transfers_done(convert(scheduler.outstanding_transfers))
    scheduler.transfers_done(np.array([]))
    assert scheduler.outstanding_transfers.tolist() == []


def test_transfers_done_refuses_a_transfer_when_it_is_not_outstanding():
    scheduler, _ = make_preempted()
    with pytest.raises(UnknownIdError, match="transfer 9 is not outstanding"):
        scheduler.transfers_done([1, 9])
    assert scheduler.outstanding_transfers.tolist() == [1]


def test_transfers_done_refuses_a_transfer_when_it_comes_twice():
    scheduler, _ = make_preempted()
    with pytest.raises(InvalidArgumentError, match="ids: expected each transfer once, found 1 twice"):
        scheduler.transfers_done([1, 1])


def test_transfers_done_names_the_argument_when_it_is_no_list_of_ids():
    scheduler, _ = make_preempted()
    with pytest.raises(TypeError, match="ids: expected a one-dimensional int32 or int64 array, or a sequence of ints"):
        scheduler.transfers_done("1")


def test_scheduler_refuses_swap_when_there_is_no_host_tier():
    with pytest.raises(InvalidArgumentError, match="num_host_blocks"):
        pagedkv.Scheduler(pagedkv.CacheConfig(8), pagedkv.SchedulerConfig(preemption_mode="swap"))


def test_plan_keeps_its_swaps_when_it_travels():
    _, plan = make_preempted()
    rebuilt = pagedkv.StepPlan.from_buffer(plan.buffer.tobytes())
    assert rebuilt.swap_out.tolist() == plan.swap_out.tolist()
    assert rebuilt.swap_out_ids.tolist() == plan.swap_out_ids.tolist()
    assert rebuilt.waits_for_transfers
