"""A broken law ends the life of the object that it was found in: every later call raises InternalError."""

import inspect

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InternalError

POOL = pagedkv.CacheConfig(8, 2)


# An argument for each required parameter, by its name; 0 where nothing is said.
VALUES = {
    "block_ids": [1],
    "handles": [0],
    "ids": [1],
    "max_tokens": 1,
    "name": "a",
    "now": 1.0,
    "path": "a",
    "prompt_token_ids": [1],
    "request_id": "b",
    "rows": [0],
    "sequences": [0],
    "start_loc": [0, 1],
    "token_ids": [1],
    "tokens": [1],
}


# What a name stands for in some methods.
OWN_VALUES = {
    "allocate_slots_batch": {"num_new_tokens": [1]},
    "num_that_fit": {"num_new_tokens": [1]},
    "write_block_table": {"out": np.zeros((1, 4), np.int32)},
    "write_csr": {name: np.zeros(4, np.int32) for name in ("indptr", "indices", "last_page_len")},
}


def scheduler():
    made = pagedkv.Scheduler(POOL)
    made.add_request("a", [1, 2, 3], max_tokens=4)
    plan = made.schedule()
    return made, {"plan": plan}, lambda: made.rollback(plan)


def manager():
    made = pagedkv.KVCacheManager(POOL)
    sequence = made.create([1, 2, 3])
    plan = made.begin_plan()
    made.allocate_slots(sequence, 3)
    return made, {"plan": plan, "sequence": sequence}, lambda: made.free(sequence)


def pool():
    made = pagedkv.BlockPool(8)
    made.allocate(2)
    return made, {}, made.check_integrity


def members(made):
    return [name for name in dir(type(made)) if not name.startswith("_")]


def use(made, name, own):
    """Call the method, or read the property, of that name."""
    found = getattr(made, name)
    if not callable(found):
        return found
    parameters = inspect.signature(found).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    values = {
        parameter.name: (VALUES | own | OWN_VALUES.get(name, {})).get(parameter.name, 0) for parameter in required
    }
    return found(**values)


MAKERS = [scheduler, manager, pool]
CASES = [(make, name) for make in MAKERS for name in members(make()[0])]


@pytest.mark.parametrize(("make", "name"), CASES, ids=[f"{make.__name__} {name}" for make, name in CASES])
def test_every_member_raises_when_an_audit_found_a_broken_law(make, name):
    made, own, _ = make()
    made._break_a_law()
    with pytest.raises(InternalError, match="law . is broken"):
        made.check_integrity()
    with pytest.raises(InternalError, match="not usable any more"):
        use(made, name, own)


@pytest.mark.parametrize(("make", "name"), CASES, ids=[f"{make.__name__} {name}" for make, name in CASES])
def test_every_member_raises_when_a_call_met_a_broken_law(make, name):
    made, own, meet = make()
    made._break_a_law()
    with pytest.raises(InternalError, match="law . is broken"):
        meet()
    with pytest.raises(InternalError, match="not usable any more"):
        use(made, name, own)


@pytest.mark.parametrize("make", MAKERS)
def test_check_integrity_passes_when_nothing_is_broken(make):
    assert make()[0].check_integrity() is None


@pytest.mark.parametrize("make", MAKERS)
def test_a_refused_call_poisons_nothing(make):
    made = make()[0]
    with pytest.raises(pagedkv.exceptions.UnknownIdError):
        made.ref_counts([100])
    assert made.check_integrity() is None


def test_a_plan_refuses_its_scheduler_when_that_is_poisoned():
    made = pagedkv.Scheduler(POOL)
    made.add_request("a", [1, 2, 3], max_tokens=4)
    plan = made.schedule()
    made._break_a_law()
    with pytest.raises(InternalError):
        made.check_integrity()
    with pytest.raises(InternalError, match="not usable any more"):
        plan.write_csr(*(np.zeros(2, np.int32) for _ in range(3)))
    assert plan.num_tokens == 3
