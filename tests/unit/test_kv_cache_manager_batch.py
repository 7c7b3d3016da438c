"""KVCacheManager over arrays of sequences."""

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, StateError, UnknownIdError

PROMPTS = np.arange(14, dtype=np.int32)
START_LOC = np.array([0, 10, 14], np.int32)


@pytest.fixture
def manager():
    return pagedkv.KVCacheManager(pagedkv.CacheConfig(16, 4))


@pytest.fixture
def sequences(manager):
    return manager.create_batch(PROMPTS, START_LOC)


def compute(manager, sequences, num_tokens):
    plan = manager.begin_plan()
    slots = manager.allocate_slots_batch(sequences, num_tokens)
    manager.commit(plan)
    return slots


def test_batch_maps_the_tokens_of_all_sequences_to_slots_of_their_tables(manager, sequences):
    slots = compute(manager, sequences, [10, 4])
    tables = [manager.block_table(sequence) for sequence in sequences.tolist()]
    expected = [tables[0][i // 4] * 4 + i % 4 for i in range(10)] + [tables[1][i // 4] * 4 + i % 4 for i in range(4)]
    assert slots.slot_mapping.tolist() == [expected]
    assert slots.query_start_loc.tolist() == [0, 10, 14]
    assert slots.seq_lens.tolist() == [10, 4]
    assert slots.copies.shape == (0, 2)


def test_batch_tells_table_updates_by_the_rows_of_the_caller(manager, sequences):
    manager.begin_plan()
    slots = manager.allocate_slots_batch(sequences, [10, 4], rows=[7, 3])
    first, second = (manager.block_table(sequence).tolist() for sequence in sequences.tolist())
    expected = [[0, 7, column, block] for column, block in enumerate(first)] + [[0, 3, 0, second[0]]]
    assert slots.table_updates.tolist() == expected
    assert (slots.table_updates.dtype, slots.slot_mapping.dtype) == (np.int32, np.int64)


def test_batch_without_room_is_none_and_says_how_many_fit(manager, sequences):
    more = manager.create_batch(np.zeros(100, np.int32), [0, 50, 100])
    plan = manager.begin_plan()
    assert manager.allocate_slots_batch(more, [50, 50]) is None
    assert manager.num_that_fit(more, [50, 50]) == 1
    manager.commit(plan)
    assert manager.usage == 0.0


def test_batch_copies_the_shared_last_block_for_all_writers_but_the_last(manager, sequences):
    compute(manager, sequences, [10, 4])
    parent = int(sequences[0])
    forks = manager.fork_batch([parent, parent])
    writers = [parent, *forks.tolist()]
    manager.append_tokens_batch(writers, [1, 2, 3])
    shared = manager.block_table(parent)[2]
    slots = compute(manager, writers, [1, 1, 1])
    assert slots.copies[:, 0].tolist() == [shared, shared]
    assert sorted(slots.table_updates[:, 1].tolist()) == [0, 1]


def test_batch_finds_the_hits_of_all_sequences(manager, sequences):
    compute(manager, sequences, [10, 4])
    again = manager.create_batch(PROMPTS, START_LOC)
    computed = manager.get_computed_blocks_batch(again)
    assert (len(computed), computed.num_tokens.tolist()) == (2, [8, 0])
    plan = manager.begin_plan()
    slots = manager.allocate_slots_batch(again, [2, 4], computed)
    manager.commit(plan)
    assert slots.seq_lens.tolist() == [10, 4]
    with pytest.raises(StateError, match=r"sequences\[0\]: the computed blocks are stale"):
        manager.allocate_slots_batch(again, [2, 4], (manager.begin_plan(), computed)[1])


def test_batch_settles_draft_tokens(manager, sequences):
    plan = manager.begin_plan()
    slots = manager.allocate_slots_batch(sequences, [10, 4], num_draft_tokens=[2, 0])
    assert slots.query_start_loc.tolist() == [0, 12, 16]
    manager.append_tokens_batch(sequences, [90, 7, 7], [0, 2, 3], num_accepted=[1, 0])
    manager.commit(plan)
    assert [manager.num_computed_tokens(sequence) for sequence in sequences.tolist()] == [11, 4]


def test_batch_writes_tables_as_other_kernels_read_them(manager, sequences):
    compute(manager, sequences, [10, 4])
    first, second = (manager.block_table(sequence).tolist() for sequence in sequences.tolist())
    table = np.full((2, 4), -1, np.int32)
    manager.write_block_table(sequences, table)
    assert table.tolist() == [[*first, 0], [*second, 0, 0, 0]]
    indptr, indices, last = (np.full(n, -1, np.int32) for n in (3, 5, 2))
    assert manager.write_csr(sequences, indptr, indices, last) == 4
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 3, 4], [*first, *second, -1], [2, 4])


def test_batch_frees_all_or_none(manager, sequences):
    compute(manager, sequences, [10, 4])
    with pytest.raises(InvalidArgumentError, match=r"sequences\[2\]: expected each sequence once"):
        manager.free_batch([*sequences.tolist(), sequences[0]])
    manager.free_batch(sequences)
    assert manager.usage == 0.0
    with pytest.raises(UnknownIdError, match=r"sequences\[0\]"):
        manager.free_batch(sequences)


def test_empty_batch_does_nothing(manager):
    none = np.empty(0, np.int64)
    manager.begin_plan()
    slots = manager.allocate_slots_batch(none, [])
    assert (slots.slot_mapping.shape, slots.query_start_loc.tolist()) == ((1, 0), [0])
    assert manager.create_batch([], [0]).tolist() == manager.fork_batch(none).tolist() == []


def test_manager_ends_a_batch_of_requests_under_its_own_loop(manager, sequences):
    compute(manager, sequences, [10, 4])
    for token in range(8):
        manager.append_tokens_batch(sequences, np.full(2, token, np.int32))
        compute(manager, sequences, np.ones(2, np.int32))
    assert [manager.num_tokens(sequence) for sequence in sequences.tolist()] == [18, 12]
    manager.check_integrity()
