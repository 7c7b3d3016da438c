"""Policies through Python."""

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError

PROMPT = np.arange(10, dtype=np.int32)


def make_scheduler(policy):
    return pagedkv.Scheduler(pagedkv.CacheConfig(64, 4), pagedkv.SchedulerConfig(1), policy=policy)


def order_of_admission(scheduler):
    order = []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        order += [request_id for _, request_id, _ in plan.new]
        scheduler.commit(plan, np.zeros(plan.num_samples, np.int32))
    return order


def test_policy_callable_gets_arrays_and_its_keys_decide():
    seen = {}

    def longest_first(*, handles, num_tokens, **others):
        seen.update(others, handles=handles)
        return -num_tokens.astype(float)

    scheduler = make_scheduler(longest_first)
    for length in (3, 9, 6):
        scheduler.add_request(str(length), PROMPT[:length], max_tokens=1, tenant="t", priority=length, now=2.5)
    assert order_of_admission(scheduler) == ["9", "6", "3"]
    assert {name: value.dtype.name for name, value in seen.items() if name != "tenants"} == {
        "handles": "int64",
        "priority": "int32",
        "arrival": "float64",
        "max_tokens": "int64",
    }


def test_policy_callable_may_call_the_scheduler_because_no_lock_is_held():
    scheduler = make_scheduler(lambda *, handles, **_: [scheduler.usage for _ in handles])
    scheduler.add_request("r", PROMPT, max_tokens=2)
    assert order_of_admission(scheduler) == ["r"]


def test_policy_callable_is_refused_when_it_answers_with_too_few_keys():
    scheduler = make_scheduler(lambda **_: [])
    scheduler.add_request("r", PROMPT, max_tokens=1)
    with pytest.raises(InvalidArgumentError, match="keys: expected 1"):
        scheduler.schedule()


def test_policy_callable_is_refused_when_it_answers_with_nan():
    scheduler = make_scheduler(lambda *, handles, **_: [float("nan")] * len(handles))
    scheduler.add_request("r", PROMPT, max_tokens=1)
    with pytest.raises(InvalidArgumentError, match="keys: .* found NaN for handle 0"):
        scheduler.schedule()


def test_external_policy_is_refused_when_no_callable_is_given():
    with pytest.raises(InvalidArgumentError, match="policy: expected a callable"):
        pagedkv.Scheduler(pagedkv.CacheConfig(64, 4), pagedkv.SchedulerConfig(1, policy="external"))


def test_policy_callable_may_fail_and_leaves_the_scheduler_as_it_was():
    answers = iter([RuntimeError("no answer"), [0.0], []])

    def policy(**_):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    scheduler = make_scheduler(policy)
    scheduler.add_request("r", PROMPT, max_tokens=1)
    with pytest.raises(RuntimeError, match="no answer"):
        scheduler.schedule()
    assert order_of_admission(scheduler) == ["r"]


def test_priority_policy_takes_the_seat_of_a_less_urgent_request():
    limits = pagedkv.SchedulerConfig(1, policy="priority")
    scheduler = pagedkv.Scheduler(pagedkv.CacheConfig(64, 4), limits)
    scheduler.add_request("low", PROMPT, max_tokens=4, priority=2)
    scheduler.commit(scheduler.schedule(), [0])
    scheduler.add_request("high", PROMPT, max_tokens=4, priority=1)
    assert [request_id for _, request_id, _ in scheduler.schedule().preempted] == ["low"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"policy": "sjf"}, "policy: expected one of .*fcfs.*, found .*sjf"),
        ({"tenant_weights": {"a": 0.0}}, "tenant_weights"),
        ({"prefill_chunk_multiple": 0}, "prefill_chunk_multiple"),
        ({"prefill_chunk_multiple": 64, "long_prefill_token_threshold": 32}, "prefill_chunk_multiple"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills"),
    ],
)
def test_scheduler_config_names_the_field_that_is_out_of_range(option, message):
    with pytest.raises(InvalidArgumentError, match=message):
        pagedkv.SchedulerConfig(**option)


@pytest.mark.parametrize("keys", [[0.5, np.nan], np.array([np.nan, 1.0])])
def test_policy_callable_is_refused_when_a_key_is_nan_and_nothing_is_planned(keys):
    answers = [keys, [0.0, 1.0]]
    scheduler = make_scheduler(lambda **_: answers.pop(0))
    for number in range(2):
        scheduler.add_request(str(number), PROMPT, max_tokens=1)
    with pytest.raises(InvalidArgumentError, match=r"keys: expected numbers that can be ordered, found NaN for handle"):
        scheduler.schedule()
    assert [request_id for _, request_id, _ in scheduler.schedule().new] == ["0"]
