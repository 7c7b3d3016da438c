"""Events of the prefix cache, under the names of vLLM's schema."""

import numpy as np
import pytest

import pagedkv


def make(**options):
    cache_config = pagedkv.CacheConfig(16, 2, enable_kv_cache_events=True, event_hash_seed="0", **options)
    return pagedkv.Scheduler(cache_config, pagedkv.SchedulerConfig(4, 64, 32))


def run(scheduler, prompt, **options):
    scheduler.add_request("r", prompt, max_tokens=1, **options)
    plan = scheduler.schedule()
    scheduler.commit(plan, [7] * plan.num_samples)


def test_take_events_tells_what_a_commit_stored():
    scheduler = make()
    run(scheduler, [1, 2, 3, 4, 5])
    batch = scheduler.take_events()
    [stored] = batch.events
    hashes = pagedkv.chain_hashes([1, 2, 3, 4, 5], 2, seed="0")
    assert (batch.sequence_number, batch.num_lost) == (0, 0)
    assert (stored.block_hashes, stored.parent_block_hash) == (hashes, None)
    assert stored.token_ids.tolist() == [1, 2, 3, 4]
    assert stored.token_ids.dtype == np.int32
    assert scheduler.take_events().events == []


def test_stored_events_are_maps_with_the_fields_of_vllm():
    scheduler = make()
    run(scheduler, [1, 2, 3, 4], cache_salt="s", image_spans=[(1, 2, b"cat")])
    [stored] = scheduler.take_events().events
    hashes = pagedkv.chain_hashes(
        [1, 2, 3, 4], 2, seed="0", cache_salt="s", image_spans=[(1, 2, b"cat")], external=True
    )
    assert stored.as_dict() == {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [(("cat", 1), "s"), (("cat", -1),)],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert stored.as_dict(external=False)["block_hashes"] == stored.block_hashes


def test_a_named_adapter_is_told_and_hashed_by_its_name():
    scheduler = make()
    scheduler.name_lora(3, "sql", "/adapters/sql")
    run(scheduler, [1, 2, 3], lora_id=3)
    [stored] = scheduler.take_events().events
    assert (stored.lora_id, stored.lora_name, stored.extra_keys) == (3, "sql", [("sql",)])
    expected = pagedkv.chain_hashes([1, 2], 2, seed="0", lora_name="sql", lora_path="/adapters/sql")
    assert stored.block_hashes == expected


def test_a_reset_is_told_as_cleared():
    scheduler = make()
    run(scheduler, [1, 2, 3])
    scheduler.take_events()
    scheduler.reset_prefix_cache()
    assert [event.as_dict() for event in scheduler.take_events().events] == [{"type": "AllBlocksCleared"}]


def test_removed_events_are_told_by_the_schedule_that_reuses_blocks():
    scheduler = make()
    run(scheduler, [1, 2, 3])
    scheduler.take_events()
    scheduler.add_request("other", list(range(10, 40)), max_tokens=1)
    scheduler.schedule()
    [removed] = scheduler.take_events().events
    [external] = pagedkv.chain_hashes([1, 2], 2, seed="0", external=True)
    assert removed.as_dict() == {
        "type": "BlockRemoved",
        "block_hashes": [external],
        "medium": "GPU",
        "group_idx": 0,
    }


def test_a_snapshot_rebuilds_the_present_state():
    scheduler = make()
    run(scheduler, [1, 2, 3, 4, 5])
    run(scheduler, [1, 2, 8, 9, 5])
    snapshot = scheduler.event_snapshot()
    told = {found for event in snapshot.events for found in event.block_hashes}
    both = [pagedkv.chain_hashes(prompt, 2, seed="0") for prompt in ([1, 2, 3, 4], [1, 2, 8, 9])]
    assert told == set(both[0]) | set(both[1])
    batch = scheduler.take_events()
    assert snapshot.next_sequence_number == batch.sequence_number + len(batch.events)


def test_events_that_nobody_takes_are_told_anew_when_there_are_too_many():
    scheduler = make(max_pending_events=1)
    for token in range(3):
        run(scheduler, [token, token, token])
    batch = scheduler.take_events()
    assert (batch.num_lost, batch.sequence_number) == (3, 3)
    assert isinstance(batch.events[0], pagedkv.AllBlocksCleared)
    assert len(batch.events) == 4


def test_the_manager_tells_events_too():
    manager = pagedkv.KVCacheManager(pagedkv.CacheConfig(8, 2, enable_kv_cache_events=True, event_hash="xxh3_128"))
    sequence = manager.create([1, 2, 3])
    plan = manager.begin_plan()
    manager.allocate_slots(sequence, 3)
    manager.commit(plan)
    [stored] = manager.take_events().events
    assert stored.block_hashes == pagedkv.chain_hashes([1, 2], 2, algorithm="xxh3_128")


def test_events_are_refused_by_name_when_they_are_off():
    with pytest.raises(pagedkv.exceptions.UnsupportedError, match="events"):
        pagedkv.Scheduler(pagedkv.CacheConfig(8)).take_events()


@pytest.mark.parametrize(("option", "value"), [("event_hash", "md5"), ("max_pending_events", 0)])
def test_cache_config_refuses_event_options_out_of_range(option, value):
    with pytest.raises(ValueError, match="algorithm|max_pending_events"):
        pagedkv.CacheConfig(8, enable_kv_cache_events=True, **{option: value})
