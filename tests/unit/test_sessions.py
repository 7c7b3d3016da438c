"""Sessions, holds, forks, changing limits, explanations and snapshots, through Python."""

import json

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, NeverFitsError, StateError, UnknownIdError

PROMPT = np.arange(6, dtype=np.int32)


def make_scheduler(num_blocks=32, **limits):
    return pagedkv.Scheduler(pagedkv.CacheConfig(num_blocks, 4), pagedkv.SchedulerConfig(**limits))


def step(scheduler):
    plan = scheduler.schedule()
    result = scheduler.commit(plan, np.full(plan.num_samples, 7, np.int32))
    scheduler.check_integrity()
    return plan, result


def run(scheduler):
    """Every finished request, in order, until none is unfinished."""
    finished = []
    while scheduler.has_unfinished_requests():
        finished += step(scheduler)[1].finished
    return finished


def test_finished_session_goes_on_from_what_it_computed():
    scheduler = make_scheduler()
    handle = scheduler.add_request("s", PROMPT, max_tokens=3, session=True)
    assert [found.handle for found in run(scheduler)] == [handle]
    scheduler.append_tokens(handle, 0, [50, 51], max_tokens=1)
    plan, result = step(scheduler)
    assert plan.positions.tolist() == [8, 9, 10]
    assert plan.token_ids.tolist() == [7, 50, 51]
    assert [found.request_id for found in result.finished] == ["s"]


def test_session_keeps_its_blocks_until_it_is_freed():
    scheduler = make_scheduler()
    handle = scheduler.add_request("s", PROMPT, max_tokens=3, session=True)
    run(scheduler)
    assert len(scheduler.block_table(handle)) == 2
    scheduler.free(handle)
    assert scheduler.usage == 0.0
    with pytest.raises(UnknownIdError):
        scheduler.append_tokens(handle, 0, [1])


def test_append_is_refused_while_the_session_runs_or_is_in_flight():
    scheduler = make_scheduler()
    handle = scheduler.add_request("s", PROMPT, max_tokens=3, session=True)
    plan = scheduler.schedule()
    with pytest.raises(StateError, match="has not finished"):
        scheduler.append_tokens(handle, 0, [1])
    scheduler.finish(handle, 0)
    with pytest.raises(StateError, match="in flight"):
        scheduler.append_tokens(handle, 0, [1])
    scheduler.rollback(plan)
    scheduler.append_tokens(handle, 0, [1])


def test_append_that_can_never_fit_is_refused():
    scheduler = make_scheduler(num_blocks=4)
    handle = scheduler.add_request("s", PROMPT, max_tokens=3, session=True)
    run(scheduler)
    with pytest.raises(NeverFitsError):
        scheduler.append_tokens(handle, 0, np.ones(8, np.int32))


def test_held_request_is_not_planned_until_it_is_released():
    scheduler = make_scheduler()
    held = scheduler.add_request("held", PROMPT, max_tokens=1)
    other = scheduler.add_request("other", PROMPT[:3], max_tokens=1)
    scheduler.hold(held)
    assert step(scheduler)[0].handles.tolist() == [other]
    scheduler.release(held)
    assert step(scheduler)[0].handles.tolist() == [held]


def test_fork_shares_the_blocks_of_its_sample():
    scheduler = make_scheduler()
    parent = scheduler.add_request("parent", PROMPT, max_tokens=4)
    step(scheduler)
    fork = scheduler.fork(parent, 0, "fork", [50], max_tokens=2)
    table = scheduler.block_table(parent)
    assert scheduler.block_table(fork).tolist() == table.tolist()
    assert scheduler.ref_counts(table).tolist() == [2, 2]
    plan, _ = step(scheduler)
    assert plan.handles.tolist() == [parent, fork]
    assert plan.copies.shape == (1, 2)


def test_fork_of_a_request_in_flight_is_refused():
    scheduler = make_scheduler()
    parent = scheduler.add_request("parent", PROMPT, max_tokens=4)
    plan = scheduler.schedule()
    with pytest.raises(StateError, match="in flight"):
        scheduler.fork(parent, 0, "fork", max_tokens=2)
    scheduler.commit(plan, [7])


def test_limits_change_between_steps():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add_request("r", PROMPT, max_tokens=4)
    scheduler.update_limits(max_num_batched_tokens=4)
    assert step(scheduler)[0].num_tokens == 4
    assert scheduler.limits.max_num_batched_tokens == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 5}, "max_num_seqs: expected at most 4"),
        ({"max_num_seqs": 1}, "max_num_seqs: expected at least 2, the seats of request 'two'|\"two\""),
        ({"lookahead": 1}, "lookahead: expected at most 0"),
        ({"watermark": 2.0}, "watermark"),
    ],
)
def test_limits_are_refused_by_name(arguments, message):
    scheduler = make_scheduler(max_num_seqs=4)
    scheduler.add_request("two", PROMPT, max_tokens=4, n=2)
    with pytest.raises(InvalidArgumentError, match=message):
        scheduler.update_limits(**arguments)


def test_explanation_says_why_a_request_waits():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request("runs", PROMPT, max_tokens=4)
    step(scheduler)
    handle = scheduler.add_request("waits", PROMPT, max_tokens=4)
    found = scheduler.explain("waits")
    assert (found.handle, found.state, found.reason) == (handle, "waiting", "seats")
    assert found.fields == {"needed": 1, "free": 0, "fenced": 0}
    assert "it needs 1 seats, 0 are free" in str(found)
    assert scheduler.explain("runs").reason == "ready"


def test_explanation_of_an_unknown_request_is_refused():
    scheduler = make_scheduler()
    with pytest.raises(InvalidArgumentError, match="request: expected the id of a live request"):
        scheduler.explain("nobody")
    with pytest.raises(UnknownIdError):
        scheduler.explain(3)
    with pytest.raises(TypeError, match="request: expected a handle"):
        scheduler.explain(1.5)


def test_snapshot_is_plain_and_complete():
    scheduler = make_scheduler()
    handle = scheduler.add_request("r", PROMPT, max_tokens=4, n=2)
    step(scheduler)
    plan = scheduler.schedule()
    shown = scheduler.snapshot()
    plain = json.loads(json.dumps(shown, default=lambda array: array.tolist()))
    assert plain["requests"]["request_id"] == ["r"]
    assert plain["requests"]["state"] == ["running"]
    assert plain["sequences"]["handle"] == [handle, handle]
    assert plain["sequences"]["num_tokens"] == [7, 7]
    assert plain["sequences"]["num_scheduled_tokens"] == [7, 7]
    assert plain["plans"]["num_tokens"] == [plan.num_tokens]
    assert sum(plain["num_blocks"].values()) == 31


def test_block_map_shows_state_and_holders_of_every_block():
    scheduler = make_scheduler(num_blocks=8)
    handle = scheduler.add_request("r", PROMPT, max_tokens=4)
    step(scheduler)
    shown = scheduler.block_map()
    held = np.zeros(8, bool)
    held[scheduler.block_table(handle)] = True
    assert shown["state"].tolist() == [0, *np.where(held[1:], 2, 1)]
    assert shown["ref_count"].tolist() == held.astype(int).tolist()
