"""Eviction policies, pins and reloaded adapters through Python."""

import numpy as np
import pytest

import pagedkv
from pagedkv import CacheConfig, GroupSpec, Scheduler, SchedulerConfig
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError


def run(scheduler: Scheduler, name: str, prompt: list[int], **keywords) -> int:
    """Tokens of the prompt that came from the cache."""
    scheduler.add_request(name, np.array(prompt, np.int32), max_tokens=1, **keywords)
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        result = scheduler.commit(plan, np.zeros(len(plan.sample_rows), np.int32))
    return result.finished[0].num_cached_tokens


def scheduler(**keywords) -> Scheduler:
    limits = SchedulerConfig(max_model_len=64, max_num_seqs=4)
    return Scheduler(CacheConfig(9, 2, **keywords), limits)


def fill(core: Scheduler, rounds: int = 3) -> None:
    for number in range(rounds):
        run(core, f"fill{number}", [100 + number] * 9)


def test_priority_keeps_a_prefix_from_being_evicted():
    core = scheduler(eviction_policy="priority")
    run(core, "kept", [1, 2, 3, 4, 5], cache_priority=90)
    fill(core)
    assert run(core, "again", [1, 2, 3, 4, 5]) == 4


def test_pinned_prefix_stays_until_it_is_unpinned():
    core = scheduler(pin_quota_blocks=2)
    run(core, "first", [1, 2, 3, 4, 5])
    pin, num_tokens = core.pin([1, 2, 3, 4])
    assert (num_tokens, core.num_pinned) == (4, (1, 2))
    fill(core)
    assert run(core, "again", [1, 2, 3, 4, 5]) == 4
    core.unpin(pin)
    fill(core)
    assert run(core, "gone", [1, 2, 3, 4, 5]) == 0
    with pytest.raises(LookupError, match=f"pin {pin}"):
        core.unpin(pin)


def test_pin_beyond_the_quota_is_no_error():
    core = scheduler(pin_quota_blocks=1)
    run(core, "first", [1, 2, 3, 4, 5])
    assert core.pin([1, 2, 3, 4]) is None
    assert core.num_pinned == (0, 0)


def test_quota_in_bytes_counts_whole_blocks():
    groups = [GroupSpec(2, 1, 4, "float32")]
    block_bytes = CacheConfig(9, 2, groups=groups).block_bytes
    assert CacheConfig(9, 2, groups=groups, pin_quota_bytes=3 * block_bytes + 1).pin_quota_blocks == 3
    with pytest.raises(InvalidArgumentError, match="pin_quota_bytes"):
        CacheConfig(9, 2, pin_quota_bytes=100)
    with pytest.raises(InvalidArgumentError, match="pin_quota_blocks"):
        CacheConfig(9, 2, pin_quota_blocks=8)


def test_adapter_that_is_loaded_anew_hits_nothing_old():
    core = scheduler()
    run(core, "first", [1, 2, 3, 4, 5], lora_id=7)
    assert run(core, "again", [1, 2, 3, 4, 5], lora_id=7) == 4
    core.invalidate_lora(7)
    assert run(core, "reloaded", [1, 2, 3, 4, 5], lora_id=7) == 0
    core.check_integrity()


def test_manager_pins_retains_and_forgets_too():
    manager = pagedkv.KVCacheManager(CacheConfig(9, 2, eviction_policy="priority", pin_quota_blocks=2))
    sequence = manager.create([1, 2, 3, 4, 5], lora_id=3)
    manager.retain(sequence, 80, 5.0)
    plan = manager.begin_plan()
    manager.allocate_slots(sequence, 5)
    manager.commit(plan)
    manager.free(sequence)
    manager.advance(10.0)
    _, num_tokens = manager.pin([1, 2], lora_id=3)
    assert (num_tokens, manager.num_pinned) == (2, (1, 1))
    manager.invalidate_lora(3)
    assert manager.num_pinned == (0, 0)


@pytest.mark.parametrize(
    ("keywords", "error", "names"),
    [
        ({"cache_priority": 5}, UnsupportedError, "cache_priority"),
        ({"cache_ttl": 5.0}, InvalidArgumentError, "cache_ttl"),
    ],
)
def test_priorities_are_refused_where_nobody_looks_at_them(keywords, error, names):
    with pytest.raises(error, match=names):
        scheduler().add_request("r", [1, 2], max_tokens=1, **keywords)


@pytest.mark.parametrize(("priority", "ttl", "names"), [(101, None, "cache_priority"), (3, -1.0, "cache_ttl")])
def test_priorities_out_of_range_are_refused(priority, ttl, names):
    core = scheduler(eviction_policy="priority")
    with pytest.raises(InvalidArgumentError, match=names):
        core.add_request("r", [1, 2], max_tokens=1, cache_priority=priority, cache_ttl=ttl)


def test_unknown_eviction_policy_is_refused_by_name():
    with pytest.raises(InvalidArgumentError, match=r"eviction_policy.*lru.*slru.*priority.*mru"):
        CacheConfig(9, eviction_policy="mru")
