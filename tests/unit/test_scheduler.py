"""Scheduler and StepPlan through Python."""

import gc
import threading

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, NeverFitsError, StateError, UnknownIdError, UnsupportedError

PROMPT = np.arange(10, dtype=np.int32)


def make_scheduler(num_blocks=32, block_size=4, **limits):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, **limits}
    return pagedkv.Scheduler(pagedkv.CacheConfig(num_blocks, block_size), pagedkv.SchedulerConfig(**limits))


def run(scheduler, token=7):
    """Run every request to its end; returns the tokens that each (handle, sample) got."""
    got = {}
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        result = scheduler.commit(plan, np.full(plan.num_samples, token, np.int32))
        for key in zip(result.handles.tolist(), result.sequence.tolist(), strict=True):
            got[key] = got.get(key, 0) + 1
    return got


def test_scheduler_gives_every_sample_its_tokens():
    scheduler = make_scheduler()
    one = scheduler.add_request("one", PROMPT, max_tokens=3)
    three = scheduler.add_request("three", PROMPT, max_tokens=5, n=3)
    assert run(scheduler) == {(one, 0): 3, (three, 0): 5, (three, 1): 5, (three, 2): 5}
    assert scheduler.usage == 0.0


def test_scheduler_plans_a_prompt_with_the_arrays_of_the_contract():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=3)
    plan = scheduler.schedule()
    assert plan.handles.tolist() == [handle]
    assert plan.token_ids.tolist() == plan.positions.tolist() == PROMPT.tolist()
    assert plan.input_from.tolist() == [-1] * 10
    assert plan.query_start_loc.tolist() == [0, 10]
    assert plan.seq_lens.tolist() == [10]
    assert plan.sample_rows.tolist() == [9]
    assert plan.sample_start_loc.tolist() == [0, 1]
    assert plan.new == [(plan.rows[0], "r", 0)]
    assert plan.slot_mapping.shape == (1, 10)
    assert {name: getattr(plan, name).dtype.name for name in ("handles", "slot_mapping", "rows", "table_updates")} == {
        "handles": "int64",
        "slot_mapping": "int64",
        "rows": "int32",
        "table_updates": "int32",
    }


def test_scheduler_draws_n_samples_from_the_last_prompt_row():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=3, n=3)
    plan = scheduler.schedule()
    assert plan.sample_rows.tolist() == [9, 9, 9]
    result = scheduler.commit(plan, [1, 2, 3])
    assert result.forked == [(plan.handles[0], 0, 1), (plan.handles[0], 0, 2)]


def test_scheduler_copies_for_all_but_the_last_writer_of_a_shared_block():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=3, n=3)
    scheduler.commit(scheduler.schedule(), [1, 2, 3])
    shared = scheduler.block_table(handle)[2]
    plan = scheduler.schedule()
    assert plan.copies[:, 0].tolist() == [shared, shared]
    assert scheduler.block_table(handle, 2)[2] == shared
    assert scheduler.ref_counts(scheduler.block_table(handle)).tolist() == [3, 3, 1]


def test_scheduler_copies_nothing_when_the_prompt_ends_on_a_block_border():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT[:8], max_tokens=3, n=3)
    scheduler.commit(scheduler.schedule(), [1, 2, 3])
    assert len(scheduler.schedule().copies) == 0


def test_scheduler_fills_tokens_from_the_previous_plan_when_two_are_in_flight():
    scheduler = make_scheduler(max_plans_in_flight=2)
    scheduler.add_request("a", PROMPT, max_tokens=3)
    scheduler.add_request("b", PROMPT + 1, max_tokens=3)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.input_from.tolist() == [0, 1]
    scheduler.commit(first, [1, 2])
    scheduler.commit(second, [3, 4])
    third = scheduler.schedule()
    assert (third.token_ids.tolist(), third.input_from.tolist()) == ([3, 4], [-1, -1])


def test_scheduler_shares_the_blocks_that_the_same_plan_fills():
    scheduler = make_scheduler()
    scheduler.add_request("a", PROMPT, max_tokens=1)
    scheduler.add_request("b", PROMPT, max_tokens=1)
    assert scheduler.schedule().num_tokens == 12


def test_scheduler_puts_a_rolled_back_request_back_in_its_place():
    scheduler = make_scheduler()
    first = scheduler.add_request("a", PROMPT, max_tokens=1)
    plan = scheduler.schedule()
    scheduler.add_request("b", PROMPT, max_tokens=1)
    scheduler.rollback(plan)
    assert scheduler.usage == 0.0
    again = scheduler.schedule()
    assert again.handles[0] == first
    assert again.new[0][1] == "a"


def test_scheduler_ends_a_sample_on_a_stop_token_but_not_before_min_tokens():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=9, stop_token_ids=[7], min_tokens=3)
    assert run(scheduler, token=7) == {(handle, 0): 3}


def test_scheduler_reports_cached_prompt_tokens_of_a_second_request():
    scheduler = make_scheduler()
    scheduler.add_request("a", PROMPT, max_tokens=1)
    run(scheduler)
    scheduler.add_request("b", PROMPT, max_tokens=1)
    (finished,) = scheduler.commit(scheduler.schedule(), [1]).finished
    assert (finished.request_id, finished.num_cached_tokens) == ("b", 8)


def test_scheduler_drops_tokens_of_a_request_that_was_aborted_meanwhile():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=5, n=2)
    plan = scheduler.schedule()
    scheduler.abort(handle)
    assert scheduler.commit(plan, [1, 2]).num_ignored == 2
    assert not scheduler.has_unfinished_requests()
    assert scheduler.usage == 0.0


def test_scheduler_preempts_the_youngest_and_finishes_all_when_the_pool_is_small():
    scheduler = make_scheduler(num_blocks=9)
    handles = [scheduler.add_request(str(i), PROMPT + 100 * i, max_tokens=16) for i in range(3)]
    assert run(scheduler) == {(handle, 0): 16 for handle in handles}
    assert scheduler.num_preemptions > 0


def test_plan_arrays_are_read_only():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=1)
    with pytest.raises(ValueError, match="read-only"):
        scheduler.schedule().rows[0] = 3


def test_plan_arrays_outlive_the_plan_and_never_change():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=20)
    plan = scheduler.schedule()
    slots, expected = plan.slot_mapping, plan.slot_mapping.copy()
    scheduler.commit(plan, [1])
    del plan
    gc.collect()
    run(scheduler)
    assert np.array_equal(slots, expected)


def test_plan_buffer_starts_on_a_cache_line():
    assert make_scheduler().schedule().buffer.ctypes.data % 64 == 0


def received(buffer):
    """The buffer as an array that the caller may write into, with rows as wide as a cache line."""
    return np.array(buffer).reshape(-1, 64)


@pytest.mark.parametrize("sent", [bytes, bytearray, memoryview, np.asarray, received])
def test_plan_is_rebuilt_from_its_buffer(sent):
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=1)
    plan = scheduler.schedule()
    copy = pagedkv.StepPlan.from_buffer(sent(plan.buffer))
    assert np.array_equal(copy.slot_mapping, plan.slot_mapping)
    assert (copy.id, copy.new) == (plan.id, plan.new)


def test_plan_that_was_rebuilt_does_not_change_with_the_buffer():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=1)
    plan = scheduler.schedule()
    buffer = np.array(plan.buffer)
    copy = pagedkv.StepPlan.from_buffer(buffer)
    buffer[:] = 255
    assert np.array_equal(copy.buffer, plan.buffer)


@pytest.mark.parametrize("cut", [0, 1, 64, -1])
def test_plan_refuses_a_buffer_that_is_cut(cut):
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=1)
    with pytest.raises(InvalidArgumentError, match="buffer"):
        pagedkv.StepPlan.from_buffer(bytes(scheduler.schedule().buffer)[:cut])


def test_plan_pads_so_that_kernels_skip_the_rest():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=1)
    padded = scheduler.schedule().pad_to(4, 16, 2)
    assert padded.slot_mapping[0, 10:].tolist() == [-1] * 6
    assert padded.seq_lens.tolist() == [10, 0, 0, 0]
    assert padded.query_start_loc.tolist() == [0, 10, 10, 10, 10]
    assert padded.input_from.tolist() == [-1] * 16
    assert padded.sample_rows.tolist() == [9, 0]


def test_plan_refuses_to_pad_below_its_own_size():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=1)
    with pytest.raises(InvalidArgumentError, match="tokens: expected 10"):
        scheduler.schedule().pad_to(1, 9, 1)


def test_plan_writes_block_tables_for_other_kernels():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=1)
    plan = scheduler.schedule()
    out = np.full((1, 5), -1, np.int32)
    plan.write_block_table(out)
    assert out[0].tolist() == [*scheduler.block_table(handle).tolist(), 0, 0]


def test_plan_writes_csr_for_other_kernels():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=1)
    indptr, indices, last = np.zeros(2, np.int32), np.zeros(9, np.int32), np.zeros(1, np.int32)
    assert scheduler.schedule().write_csr(indptr, indices, last) == 3
    assert (indptr.tolist(), last.tolist()) == ([0, 3], [2])
    assert indices[:3].tolist() == scheduler.block_table(handle).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": 1}, "priority"),
        ({"session": True, "needs_commit": True, "n": 2}, "session"),
    ],
)
def test_scheduler_refuses_by_name_what_it_does_not_have(arguments, message):
    with pytest.raises(UnsupportedError, match=message):
        make_scheduler().add_request("r", PROMPT, max_tokens=1, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids: expected at least one token"),
        ({"prompt_token_ids": [1, -2]}, "prompt_token_ids: expected token ids of at least 0, found -2"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 119}, "max_model_len"),
        ({"n": 9}, "n: expected 1 to 8"),
        ({"image_spans": [(8, 4, b"x")]}, "image_spans: expected ends up to 10, found 12"),
    ],
)
def test_scheduler_names_the_argument_that_is_out_of_range(arguments, message):
    arguments = {"prompt_token_ids": PROMPT, "max_tokens": 4, **arguments}
    with pytest.raises(InvalidArgumentError, match=message):
        make_scheduler().add_request("r", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_token_ids": np.ones(3)}, "prompt_token_ids: .* float64"),
        ({"prompt_token_ids": np.ones((3, 2), np.int32)}, "prompt_token_ids: .* shape"),
        ({"prompt_token_ids": 3}, "prompt_token_ids: .* found int"),
        ({"cache_salt": 3}, "cache_salt: expected str or bytes, found int"),
    ],
)
def test_scheduler_names_the_argument_that_has_the_wrong_type(arguments, message):
    arguments = {"prompt_token_ids": PROMPT, "max_tokens": 4, **arguments}
    with pytest.raises(TypeError, match=message):
        make_scheduler().add_request("r", **arguments)


def test_scheduler_refuses_at_once_what_can_never_fit():
    with pytest.raises(NeverFitsError, match="needs 8 blocks at its longest, the pool has 7"):
        make_scheduler(num_blocks=8).add_request("r", PROMPT, max_tokens=21)


def test_scheduler_runs_a_request_that_needs_the_whole_pool():
    scheduler = make_scheduler(num_blocks=9)
    handle = scheduler.add_request("r", PROMPT, max_tokens=4, n=3)
    assert run(scheduler) == {(handle, sample): 4 for sample in range(3)}


def test_scheduler_refuses_a_request_id_in_use():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=1)
    with pytest.raises(InvalidArgumentError, match="'r'|\"r\""):
        scheduler.add_request("r", PROMPT, max_tokens=1)


def test_scheduler_refuses_another_number_of_tokens_than_samples():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=1)
    plan = scheduler.schedule()
    with pytest.raises(InvalidArgumentError, match="tokens: expected 1, one per sample, found 2"):
        scheduler.commit(plan, [1, 2])
    assert scheduler.commit(plan, [1]).num_new_tokens.tolist() == [1]


def test_scheduler_refuses_to_end_a_plan_twice():
    scheduler = make_scheduler()
    plan = scheduler.schedule()
    scheduler.commit(plan, [])
    with pytest.raises(StateError, match="not in flight"):
        scheduler.rollback(plan)


def test_scheduler_refuses_a_plan_of_another_scheduler():
    scheduler, other = make_scheduler(), make_scheduler()
    scheduler.schedule()
    with pytest.raises(InvalidArgumentError, match="plan: expected a plan of this scheduler"):
        scheduler.commit(other.schedule(), [])


def test_scheduler_refuses_a_plan_that_was_rebuilt_from_a_buffer():
    scheduler = make_scheduler()
    copy = pagedkv.StepPlan.from_buffer(bytes(scheduler.schedule().buffer))
    with pytest.raises(InvalidArgumentError, match="rebuilt from a buffer"):
        scheduler.rollback(copy)


def test_scheduler_refuses_to_end_by_omission_what_is_no_beam():
    scheduler = make_scheduler()
    scheduler.add_request("r", PROMPT, max_tokens=4)
    with pytest.raises(InvalidArgumentError, match="parents: expected one token per sample"):
        scheduler.commit(scheduler.schedule(), [], parents=[])


def test_scheduler_names_the_sample_when_it_is_aborted_without_being_there():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=4)
    with pytest.raises(InvalidArgumentError, match="sequence: expected 0 to 0, found 5"):
        scheduler.abort(handle, 5)


def test_scheduler_lets_a_request_that_has_ended_be_finished_again():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=1)
    run(scheduler)
    scheduler.finish(handle, 0)


def test_plan_raises_memory_error_when_padding_has_no_room():
    with pytest.raises(MemoryError, match="the padded plan"):
        make_scheduler().schedule().pad_to(2**31 - 1, 2**31 - 1, 2**31 - 1)


def test_scheduler_refuses_more_plans_than_configured():
    scheduler = make_scheduler()
    scheduler.schedule()
    with pytest.raises(StateError, match="max_plans_in_flight"):
        scheduler.schedule()


def test_scheduler_refuses_a_handle_that_was_never_given_out():
    with pytest.raises(UnknownIdError):
        make_scheduler().abort(3)


def test_scheduler_accepts_some_of_the_drafts_of_each_row():
    scheduler = make_scheduler(lookahead=3)
    scheduler.add_request("a", PROMPT, max_tokens=9)
    scheduler.add_request("b", PROMPT + 1, max_tokens=9)
    scheduler.commit(scheduler.schedule(), [1, 2])
    scheduler.set_draft_tokens([0, 1], [0, 2, 3], [3, 4, 5])
    plan = scheduler.schedule()
    assert plan.sample_start_loc.tolist() == [0, 3, 5]
    result = scheduler.commit(plan, np.array([[3, 9, -1], [5, 8, -1]], np.int32))
    assert result.num_new_tokens.tolist() == [2, 2]
    assert scheduler.schedule().token_ids.tolist() == [9, 8]


def make_tree():
    """Return a scheduler and a plan that checks 31 and 32, each as the next token, and 33 behind 32."""
    scheduler = make_scheduler(lookahead=3)
    scheduler.add_request("r", PROMPT, max_tokens=9)
    scheduler.commit(scheduler.schedule(), [30])
    scheduler.set_draft_tokens([0], [0, 3], [31, 32, 33], parents=[-1, -1, 1])
    return scheduler, scheduler.schedule()


def test_plan_tells_what_each_node_of_a_tree_sees():
    _, plan = make_tree()
    last = len(PROMPT)
    assert plan.positions.tolist() == [last, last + 1, last + 1, last + 2]
    assert plan.tree_mask_start_loc.tolist() == [0, 32]
    rows = np.unpackbits(plan.tree_mask.reshape(4, 8), axis=1, bitorder="little")[:, :4]
    assert rows.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_scheduler_accepts_a_path_of_a_tree_and_moves_it_together():
    scheduler, plan = make_tree()
    slots = plan.slot_mapping[0]
    result = scheduler.commit(plan, np.array([[32, 33, 40]]), accepted=np.array([[1, 2, -1]]))
    assert result.num_new_tokens.tolist() == [3]
    plan = scheduler.schedule()
    assert plan.slot_moves.tolist() == [[0, slots[2], slots[1]], [0, slots[3], slots[2]]]
    assert (plan.token_ids.tolist(), plan.positions.tolist()) == ([40], [len(PROMPT) + 3])


@pytest.mark.parametrize(
    ("tokens", "accepted", "message"),
    [
        ([[32, 33, 40]], [[0, 2, -1]], r"accepted: expected a path from the root of the tree"),
        ([[32, 33, 40]], [[1, 2]], r"accepted: expected rows of 3, as tokens has, found 2"),
        ([[31, 40]], [[1, -1]], r"tokens: expected tokens of the draft"),
        ([[31, 40]], None, r"accepted: expected the path through each draft tree of the plan, found none"),
    ],
)
def test_scheduler_names_the_argument_when_a_path_is_refused(tokens, accepted, message):
    scheduler, plan = make_tree()
    with pytest.raises(InvalidArgumentError, match=message):
        scheduler.commit(plan, np.array(tokens), accepted=None if accepted is None else np.array(accepted))
    assert scheduler.commit(plan, np.array([[40]]), accepted=np.array([[-1]])).num_new_tokens.tolist() == [1]


def test_scheduler_refuses_paths_beside_beams_by_name():
    scheduler, plan = make_tree()
    with pytest.raises(TypeError, match="parents"):
        scheduler.commit(plan, np.array([[40]]), parents=[0], accepted=np.array([[-1]]))


def test_scheduler_takes_requests_and_aborts_from_other_threads_while_it_steps():
    scheduler = make_scheduler(num_blocks=256)

    def add_and_abort(thread):
        for i in range(100):
            handle = scheduler.add_request(f"{thread}-{i}", PROMPT, max_tokens=4)
            if i % 3 == 0:
                scheduler.abort(handle)

    threads = [threading.Thread(target=add_and_abort, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        scheduler.commit(plan, np.zeros(plan.num_samples, np.int32))
    scheduler.check_integrity()
    assert scheduler.usage == 0.0
