"""KVCacheManager through Python."""

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, StateError, UnknownIdError

PROMPT = np.arange(10, dtype=np.int32)


@pytest.fixture
def manager():
    return pagedkv.KVCacheManager(pagedkv.CacheConfig(16, 4))


def compute(manager, sequence, num_tokens, computed=None):
    plan = manager.begin_plan()
    slots = manager.allocate_slots(sequence, num_tokens, computed)
    manager.commit(plan)
    return slots


def test_manager_maps_tokens_to_the_slots_of_the_block_table(manager):
    sequence = manager.create(PROMPT)
    slots = compute(manager, sequence, 10)
    table = manager.block_table(sequence)
    expected = [table[position // 4] * 4 + position % 4 for position in range(10)]
    assert slots.slot_mapping.tolist() == expected


def test_manager_finds_full_blocks_of_a_committed_prefix(manager):
    first, second = manager.create(PROMPT), manager.create(PROMPT)
    compute(manager, first, 10)
    computed = manager.get_computed_blocks(second)
    assert computed.num_tokens == 8
    assert computed.block_ids.tolist() == manager.block_table(first)[:2].tolist()


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_manager_leaves_a_token_to_compute_when_the_whole_prompt_is_cached(manager, length, hit):
    compute(manager, manager.create(PROMPT), 10)
    assert manager.get_computed_blocks(manager.create(PROMPT[:length])).num_tokens == hit


def test_manager_finds_nothing_of_a_plan_that_was_rolled_back(manager):
    first, second = manager.create(PROMPT), manager.create(PROMPT)
    plan = manager.begin_plan()
    manager.allocate_slots(first, 10)
    manager.rollback(plan)
    assert manager.get_computed_blocks(second).num_tokens == 0
    assert manager.usage == 0.0


@pytest.mark.parametrize(
    "keys", [{"cache_salt": "a"}, {"lora_id": 1}, {"image_spans": [(0, 2, b"digest")]}], ids=["salt", "lora", "image"]
)
def test_manager_keeps_prefixes_with_other_extra_keys_apart(manager, keys):
    compute(manager, manager.create(PROMPT, **keys), 10)
    assert manager.get_computed_blocks(manager.create(PROMPT)).num_tokens == 0
    assert manager.get_computed_blocks(manager.create(PROMPT, **keys)).num_tokens == 8


def test_manager_does_not_confuse_a_salt_with_an_adapter(manager):
    compute(manager, manager.create(PROMPT, cache_salt=(1).to_bytes(8, "little")), 10)
    assert manager.get_computed_blocks(manager.create(PROMPT, lora_id=1)).num_tokens == 0


def test_manager_copies_the_shared_last_block_for_the_first_writer_only(manager):
    parent = manager.create(PROMPT)
    compute(manager, parent, 10)
    child = manager.fork(parent)
    shared = manager.block_table(parent)[2]
    manager.append_tokens(parent, [1])
    manager.append_tokens(child, [2])
    plan = manager.begin_plan()
    first, last = manager.allocate_slots(parent, 1), manager.allocate_slots(child, 1)
    manager.commit(plan)
    assert first.copies.tolist() == [[shared, manager.block_table(parent)[2]]]
    assert last.copies.shape == (0, 2)


def test_manager_copies_the_shared_last_block_of_every_group():
    groups = [pagedkv.GroupSpec([0], 1, 8), pagedkv.GroupSpec([1], 1, 8, sliding_window=8)]
    manager = pagedkv.KVCacheManager(pagedkv.CacheConfig(16, 4, groups=groups))
    parent = manager.create(PROMPT)
    compute(manager, parent, 10)
    child = manager.fork(parent)
    manager.append_tokens(child, [2])
    slots = compute(manager, child, 1)
    tables = [[manager.block_table(sequence, group)[2] for group in range(2)] for sequence in (parent, child)]
    assert slots.copies.dtype == np.int32
    assert slots.copies.tolist() == np.transpose(tables).tolist()


def test_manager_returns_none_when_there_is_no_room(manager):
    sequence = manager.create(np.zeros(64, np.int32))
    plan = manager.begin_plan()
    assert manager.allocate_slots(sequence, 61) is None
    manager.commit(plan)
    assert manager.usage == 0.0


def test_manager_refuses_computed_blocks_that_other_calls_made_stale(manager):
    first, second = manager.create(PROMPT), manager.create(PROMPT)
    compute(manager, first, 10)
    computed = manager.get_computed_blocks(second)
    manager.free(first)
    manager.begin_plan()
    with pytest.raises(StateError, match="stale"):
        manager.allocate_slots(second, 2, computed)


def test_manager_refuses_an_id_whose_sequence_is_gone(manager):
    sequence = manager.create(PROMPT)
    manager.free(sequence)
    manager.create(PROMPT)
    with pytest.raises(UnknownIdError):
        manager.free(sequence)


def test_manager_refuses_to_fork_a_sequence_in_flight(manager):
    sequence = manager.create(PROMPT)
    manager.begin_plan()
    manager.allocate_slots(sequence, 4)
    with pytest.raises(StateError, match="in a plan in flight"):
        manager.fork(sequence)


def test_manager_refuses_growth_outside_a_plan(manager):
    with pytest.raises(StateError, match="begin_plan"):
        manager.allocate_slots(manager.create(PROMPT), 1)


def test_manager_ends_plans_in_order_only(manager):
    first, second = manager.begin_plan(), manager.begin_plan()
    with pytest.raises(StateError, match=f"the oldest plan in flight is {first}"):
        manager.commit(second)


def test_manager_forgets_prefixes_on_reset(manager):
    compute(manager, manager.create(PROMPT), 10)
    manager.reset_prefix_cache()
    assert manager.get_computed_blocks(manager.create(PROMPT)).num_tokens == 0


def test_manager_refuses_images_that_overlap(manager):
    with pytest.raises(InvalidArgumentError, match="image_spans"):
        manager.create(PROMPT, image_spans=[(0, 4, b"a"), (2, 2, b"b")])


@pytest.mark.parametrize(("num_accepted", "num_computed", "hit"), [(0, 10, 8), (1, 11, 8), (2, 12, 12)])
def test_manager_counts_draft_tokens_as_computed_as_far_as_they_were_accepted(manager, num_accepted, num_computed, hit):
    drafts = [90, 91]
    sequence = manager.create(PROMPT)
    plan = manager.begin_plan()
    slots = manager.allocate_slots(sequence, 10, num_draft_tokens=2)
    assert len(slots.slot_mapping) == 12
    manager.append_tokens(sequence, [*drafts[:num_accepted], 7, 7], num_accepted=num_accepted)
    manager.commit(plan)
    assert manager.num_computed_tokens(sequence) == num_computed
    other = manager.create([*PROMPT, *drafts, 7, 7, 7])
    assert manager.get_computed_blocks(other).num_tokens == hit


def test_manager_refuses_tokens_that_no_plan_in_flight_will_sample(manager):
    sequence = manager.create(PROMPT)
    first = manager.begin_plan()
    with pytest.raises(InvalidArgumentError, match="num_new_tokens: expected 1 to 10"):
        manager.allocate_slots(sequence, 11)
    manager.allocate_slots(sequence, 10)
    manager.begin_plan()
    with pytest.raises(InvalidArgumentError, match="num_new_tokens: expected 1 to 1"):
        manager.allocate_slots(sequence, 2)
    assert len(manager.allocate_slots(sequence, 1).slot_mapping) == 1
    manager.commit(first)


def test_manager_takes_back_slots_of_tokens_that_nobody_told(manager):
    sequence = manager.create(PROMPT[:4])
    first, second = (manager.begin_plan(), manager.allocate_slots(sequence, 4))[0], manager.begin_plan()
    manager.allocate_slots(sequence, 1)
    manager.commit(first)
    manager.commit(second)
    assert (manager.num_computed_tokens(sequence), len(manager.block_table(sequence))) == (4, 1)


def test_manager_refuses_a_commit_that_a_later_plan_needs_tokens_of(manager):
    sequence = manager.create(PROMPT[:4])
    first, _ = manager.begin_plan(), manager.allocate_slots(sequence, 4)
    second, _ = manager.begin_plan(), manager.allocate_slots(sequence, 1)
    manager.begin_plan()
    manager.allocate_slots(sequence, 1)
    manager.commit(first)
    with pytest.raises(StateError, match="append them before the commit"):
        manager.commit(second)
    manager.append_tokens(sequence, [7])
    manager.commit(second)


@pytest.mark.parametrize("tokens", [[3, -1], np.array([3, -1], np.int32)], ids=["list", "array"])
def test_manager_refuses_negative_tokens(manager, tokens):
    with pytest.raises(InvalidArgumentError, match=r"prompt_token_ids\[1\]: .* found -1"):
        manager.create(tokens)
    sequence = manager.create(PROMPT)
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[1\]: .* found -1"):
        manager.append_tokens(sequence, tokens)
