"""Bad arguments of every public callable: the exception names the argument, what was expected, and what came."""

import copy
import inspect
import pickle

import numpy as np
import pytest

import pagedkv
from pagedkv import _core
from pagedkv.exceptions import InvalidArgumentError, PagedKVError

HUGE = 1 << 80
GROUP = (2, 1, 8)


def scheduler():
    return pagedkv.Scheduler(pagedkv.CacheConfig(16, 4), pagedkv.SchedulerConfig(4, 32, 64))


def manager():
    return pagedkv.KVCacheManager(pagedkv.CacheConfig(16, 4))


def planned():
    made = scheduler()
    made.add_request("r", [1, 2, 3], max_tokens=2)
    return made, made.schedule()


def cache_op(name, **changed):
    cache = np.zeros((4, 1, 4, 8), np.float32)
    arguments = {
        "append_kv": {
            "k": np.zeros((1, 1, 8), np.float32),
            "v": np.zeros((1, 1, 8), np.float32),
            "k_cache": cache,
            "v_cache": cache.copy(),
            "slot_mapping": np.zeros(1, np.int64),
        },
        "copy_blocks": {"pool": np.zeros((4, 1, 2, 1, 4, 8), np.float32), "pairs": np.zeros((0, 2), np.int32)},
    }[name]
    return getattr(_core, name)(**(arguments | changed))


def device_work(**changed):
    sizes = {"num_kv_heads": 1, "group": 2, "num_tokens": 1, "table": (1, 16)}
    sizes |= {"few_rows": 16, "many_rows": 64, "num_workers": 8}
    arrays = {"seq_lens": np.array([5], np.int32), "query_start_loc": np.array([0, 1], np.int32)}
    return _core.device_work(**(sizes | arrays | changed))


def add(**changed):
    return scheduler().add_request(**({"request_id": "r", "prompt_token_ids": [1, 2], "max_tokens": 2} | changed))


def fork(**changed):
    parent = scheduler()
    parent.add_request("r", [1, 2], max_tokens=2)
    return parent.fork(**({"handle": 0, "sequence": 0, "request_id": "f", "max_tokens": 2} | changed))


def config(**changed):
    return pagedkv.SchedulerConfig(**changed)


COUNTS_OF_WORK = (
    "num_kv_heads",
    "group",
    "sliding_window",
    "few_rows",
    "many_rows",
    "num_workers",
    "min_keys",
    "fixed_keys",
)

# Name of the argument, what came as it is shown, the call.
OUT_OF_RANGE = [
    ("num_blocks", "-1", lambda: pagedkv.CacheConfig(-1)),
    ("num_blocks", str(HUGE), lambda: pagedkv.CacheConfig(HUGE)),
    ("num_blocks", "1", lambda: pagedkv.CacheConfig(1)),
    ("block_size", "-4", lambda: pagedkv.CacheConfig(16, -4)),
    ("block_size", "0", lambda: pagedkv.CacheConfig(16, 0)),
    ("hash_seed", "-1", lambda: pagedkv.CacheConfig(16, hash_seed=-1)),
    ("hash_seed", str(HUGE), lambda: pagedkv.CacheConfig(16, hash_seed=HUGE)),
    ("layers", "-1", lambda: pagedkv.GroupSpec(-1, 1, 8)),
    (r"layers\[1\]", "-1", lambda: pagedkv.GroupSpec([0, -1], 1, 8)),
    ("layers", "none", lambda: pagedkv.GroupSpec(0, 1, 8)),
    ("num_kv_heads", "-1", lambda: pagedkv.GroupSpec(2, -1, 8)),
    ("num_kv_heads", "0", lambda: pagedkv.GroupSpec(2, 0, 8)),
    ("head_dim", "0", lambda: pagedkv.GroupSpec(2, 1, 0)),
    ("dtype", "float31", lambda: pagedkv.GroupSpec(2, 1, 8, "float31")),
    ("sliding_window", "0", lambda: pagedkv.GroupSpec(*GROUP, sliding_window=0)),
    ("sliding_window", "-1", lambda: pagedkv.GroupSpec(*GROUP, sliding_window=-1)),
    ("max_num_seqs", "-1", lambda: config(max_num_seqs=-1)),
    ("max_num_seqs", "0", lambda: config(max_num_seqs=0)),
    ("max_num_batched_tokens", str(HUGE), lambda: config(max_num_batched_tokens=HUGE)),
    ("max_model_len", "-1", lambda: config(max_model_len=-1)),
    ("watermark", "1.5", lambda: config(watermark=1.5)),
    ("lookahead", "-1", lambda: config(lookahead=-1)),
    ("max_plans_in_flight", "0", lambda: config(max_plans_in_flight=0)),
    ("policy", "lifo", lambda: config(policy="lifo")),
    ("ageing", "-1", lambda: config(ageing=-1)),
    ("tenant_weights", "-1", lambda: config(tenant_weights={"a": -1.0})),
    ("long_prefill_token_threshold", "-1", lambda: config(long_prefill_token_threshold=-1)),
    ("max_num_partial_prefills", "0", lambda: config(max_num_partial_prefills=0)),
    ("prefill_chunk_multiple", "0", lambda: config(prefill_chunk_multiple=0)),
    ("max_tokens", "-1", lambda: add(max_tokens=-1)),
    ("max_tokens", "0", lambda: add(max_tokens=0)),
    ("max_tokens", str(HUGE), lambda: add(max_tokens=HUGE)),
    ("n", "-1", lambda: add(n=-1)),
    ("n", "9", lambda: add(n=9)),
    ("min_tokens", "-1", lambda: add(min_tokens=-1)),
    ("priority", str(HUGE), lambda: add(priority=HUGE)),
    ("lora_id", str(HUGE), lambda: add(lora_id=HUGE)),
    ("prompt_token_ids", "none", lambda: add(prompt_token_ids=[])),
    (r"prompt_token_ids\[1\]", str(1 << 31), lambda: add(prompt_token_ids=[1, 1 << 31])),
    (r"prompt_token_ids\[1\]", str(1 << 31), lambda: add(prompt_token_ids=np.array([1, 1 << 31]))),
    (r"stop_token_ids\[0\]", str(HUGE), lambda: add(stop_token_ids=[HUGE])),
    (r"stop_token_ids\[1\]", "-1", lambda: add(stop_token_ids=[3, -1])),
    ("image_spans", "length 0", lambda: add(image_spans=[(0, 0, b"x")])),
    *((name, "0", lambda name=name: device_work(**{name: 0})) for name in COUNTS_OF_WORK),
    *((name, "-1", lambda name=name: device_work(**{name: -1})) for name in COUNTS_OF_WORK),
    ("num_tokens", str(HUGE), lambda: device_work(num_tokens=HUGE)),
    ("num_tokens", str(1 << 40), lambda: device_work(num_tokens=1 << 40)),
    ("num_tokens", "1", lambda: device_work(group=1 << 40)),
    (r"table\[1\]", "-1", lambda: device_work(table=(1, -1))),
    ("handle", str(HUGE), lambda: scheduler().abort(HUGE)),
    ("sequence", "-1", lambda: scheduler().abort(0, -1)),
    ("sequence", "-1", lambda: scheduler().finish(0, -1)),
    ("handle", str(HUGE), lambda: scheduler().block_table(HUGE)),
    ("handle", str(HUGE), lambda: scheduler().hold(HUGE)),
    ("handle", str(HUGE), lambda: scheduler().release(HUGE)),
    ("request", str(HUGE), lambda: scheduler().explain(HUGE)),
    ("request", '"nobody"', lambda: scheduler().explain("nobody")),
    (r"image_spans\[0\]", str(HUGE), lambda: add(image_spans=[(HUGE, 1, b"x")])),
    ("priority", str(HUGE), lambda: fork(priority=HUGE)),
    ("ids", "-3", lambda: fork(ids=[1, -3])),
    (r"stop_token_ids\[0\]", "-2", lambda: fork(stop_token_ids=np.array([-2]))),
    ("now", "NaN", lambda: fork(now=float("nan"))),
    ("now", "NaN", lambda: add(now=float("nan"))),
    ("now", "-inf", lambda: add(now=float("-inf"))),
    (r"ids\[1\]", str(HUGE), lambda: scheduler().transfers_done([1, HUGE])),
    (r"block_ids\[1\]", str(HUGE), lambda: scheduler().ref_counts([1, HUGE])),
    ("tokens", "2", lambda: (lambda made, plan: made.commit(plan, [1, 2]))(*planned())),
    (r"tokens\[0\]", str(HUGE), lambda: (lambda made, plan: made.commit(plan, [HUGE]))(*planned())),
    ("plan", "one of another", lambda: scheduler().commit(planned()[1], [1])),
    ("plan", "one of another", lambda: scheduler().rollback(planned()[1])),
    ("buffer", "3 bytes", lambda: pagedkv.StepPlan.from_buffer(b"abc")),
    ("buffer", "3 bytes", lambda: pagedkv.StepPlan.from_buffer(np.zeros(3, np.uint8))),
    ("buffer", "one with gaps", lambda: pagedkv.StepPlan.from_buffer(planned()[1].buffer[::2])),
    ("sequences", "-1", lambda: planned()[1].pad_to(-1, 8, 8)),
    ("tokens", "1", lambda: planned()[1].pad_to(8, 1, 8)),
    ("num_blocks", "-1", lambda: pagedkv.BlockPool(-1)),
    ("num_blocks", "-1", lambda: pagedkv.BlockPool(16).allocate(-1)),
    (r"block_ids\[0\]", str(HUGE), lambda: pagedkv.BlockPool(16).free([HUGE])),
    (r"block_ids\[0\]", str(HUGE), lambda: pagedkv.BlockPool(16).touch([HUGE])),
    (r"prompt_token_ids\[0\]", "-1", lambda: manager().create([-1])),
    ("sequence", "-1", lambda: manager().free(-1)),
    ("sequence", "-1", lambda: manager().fork(-1)),
    ("sequence", str(HUGE), lambda: manager().num_tokens(HUGE)),
    ("num_new_tokens", "-1", lambda: manager().allocate_slots(0, -1)),
    ("num_draft_tokens", "-1", lambda: manager().allocate_slots(0, 1, num_draft_tokens=-1)),
    ("num_accepted", "-1", lambda: manager().append_tokens(0, [1], num_accepted=-1)),
    ("num_tokens", "-1", lambda: manager().truncate(0, -1)),
    ("plan", "-1", lambda: manager().commit(-1)),
    ("plan", "-1", lambda: manager().rollback(-1)),
    ("now", "NaN", lambda: manager().advance(float("nan"))),
    ("now", "inf", lambda: manager().advance(float("inf"))),
    (r"num_new_tokens\[1\]", "-1", lambda: manager().allocate_slots_batch([0, 1], [1, -1])),
    (r"num_draft_tokens\[0\]", "-1", lambda: manager().allocate_slots_batch([0], [1], num_draft_tokens=[-1])),
    (r"num_accepted\[0\]", "-1", lambda: manager().append_tokens_batch([0], [1], num_accepted=[-1])),
    ("token_ids", "2", lambda: manager().append_tokens_batch([0], [1, 2])),
    (r"sequences\[0\]", str(HUGE), lambda: manager().free_batch([HUGE])),
    (r"start_loc\[2\]", "1", lambda: manager().create_batch([1, 2], [0, 2, 1])),
    ("num_threads", "-1", lambda: cache_op("append_kv", num_threads=-1)),
    ("num_threads", "0", lambda: cache_op("append_kv", num_threads=0)),
    ("num_threads", str(HUGE), lambda: cache_op("copy_blocks", num_threads=HUGE)),
]

# Name of the argument, the type that came, the call.
WRONG_TYPES = [
    ("num_blocks", "str", lambda: pagedkv.CacheConfig("16")),
    ("num_blocks", "float", lambda: pagedkv.CacheConfig(16.0)),
    ("groups", "int", lambda: pagedkv.CacheConfig(16, groups=3)),
    (r"groups\[1\]", "'x'", lambda: pagedkv.CacheConfig(16, groups=[pagedkv.GroupSpec(*GROUP), "x"])),
    ("layers", "str", lambda: pagedkv.GroupSpec("2", 1, 8)),
    (r"layers\[0\]", "str", lambda: pagedkv.GroupSpec(["a"], 1, 8)),
    ("dtype", "int", lambda: pagedkv.GroupSpec(2, 1, 8, 32)),
    ("watermark", "str", lambda: config(watermark="0.1")),
    ("policy", "int", lambda: config(policy=3)),
    ("ageing", "str", lambda: config(ageing="x")),
    ("cache_config", "int", lambda: pagedkv.Scheduler(3)),
    ("scheduler_config", "int", lambda: pagedkv.Scheduler(pagedkv.CacheConfig(16), 3)),
    ("policy", "int", lambda: pagedkv.Scheduler(pagedkv.CacheConfig(16), policy=3)),
    ("request_id", "int", lambda: add(request_id=3)),
    ("max_tokens", "str", lambda: add(max_tokens="2")),
    ("prompt_token_ids", "str", lambda: add(prompt_token_ids="abc")),
    ("prompt_token_ids", "int", lambda: add(prompt_token_ids=3)),
    ("prompt_token_ids", "set", lambda: add(prompt_token_ids={3, 1, 2})),
    ("prompt_token_ids", "dict", lambda: add(prompt_token_ids={3: 1, 1: 2})),
    (r"prompt_token_ids\[2\]", "str", lambda: add(prompt_token_ids=[1, 2, "3"])),
    (r"prompt_token_ids\[1\]", "float", lambda: add(prompt_token_ids=[1, 2.5])),
    ("prompt_token_ids", "float64", lambda: add(prompt_token_ids=np.ones(3))),
    ("cache_salt", "int", lambda: add(cache_salt=3)),
    ("image_spans", "int", lambda: add(image_spans=3)),
    (r"image_spans\[1\]", r"\(1, 2\)", lambda: add(image_spans=[(0, 1, b"x"), (1, 2)])),
    ("tenant", "int", lambda: add(tenant=3)),
    ("now", "str", lambda: add(now="soon")),
    ("handle", "str", lambda: scheduler().abort("r")),
    ("handle", "str", lambda: scheduler().hold("r")),
    ("now", "str", lambda: fork(now="soon")),
    ("plan", "int", lambda: scheduler().commit(3, [])),
    ("request", "float", lambda: scheduler().explain(0.5)),
    ("ids", "str", lambda: scheduler().transfers_done("ab")),
    (r"ids\[0\]", "str", lambda: scheduler().transfers_done(["a"])),
    (r"tokens\[0\]", "str", lambda: (lambda made, plan: made.commit(plan, ["x"]))(*planned())),
    ("buffer", "int", lambda: pagedkv.StepPlan.from_buffer(3)),
    ("buffer", "str", lambda: pagedkv.StepPlan.from_buffer("plan")),
    ("buffer", "ndarray dtype int32", lambda: pagedkv.StepPlan.from_buffer(np.zeros(64, np.int32))),
    ("out", "list", lambda: planned()[1].write_block_table([[0]])),
    ("indptr", "list", lambda: planned()[1].write_csr([0], [0], [0])),
    ("block_ids", "str", lambda: pagedkv.BlockPool(16).free("12")),
    ("sequence", "str", lambda: manager().free("0")),
    (r"sequences\[1\]", "str", lambda: manager().free_batch([0, "1"])),
    ("computed", "int", lambda: manager().allocate_slots(0, 1, 3)),
    ("computed", "int", lambda: manager().allocate_slots_batch([], [], 3)),
    ("slot_mapping", "float64", lambda: cache_op("append_kv", slot_mapping=np.zeros(1))),
    ("k", "int", lambda: cache_op("append_kv", k=3)),
    ("num_threads", "str", lambda: cache_op("append_kv", num_threads="2")),
]


def names(table):
    return [f"{index}-{argument}-{found}"[:48] for index, (argument, found, _) in enumerate(table)]


@pytest.mark.parametrize(("argument", "found", "call"), OUT_OF_RANGE, ids=names(OUT_OF_RANGE))
def test_value_out_of_range_is_a_value_error_that_names_the_argument(argument, found, call):
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*{found}") as refused:
        call()
    assert isinstance(refused.value, PagedKVError)


@pytest.mark.parametrize(("argument", "found", "call"), WRONG_TYPES, ids=names(WRONG_TYPES))
def test_wrong_type_is_a_type_error_that_names_the_argument(argument, found, call):
    # The binding library names the argument of an object of another class in a note.
    with pytest.raises(
        TypeError, match=rf"(?s)^{argument}: expected .*{found}|{found}.*\nwhile processing '{argument}'"
    ):
        call()


def public_numbers():
    """Every number argument of every public callable of the core, as its stub says."""
    classes = [value for value in vars(_core).values() if inspect.isclass(value) and not issubclass(value, Exception)]
    for made in classes:
        for name, member in inspect.getmembers(made):
            if callable(member) and not name.startswith("_"):
                yield f"{made.__name__}.{name}", member


def test_no_call_of_a_number_out_of_range_ends_in_an_overflow_error():
    """A new method with a number that has no reader of its own shows here."""
    objects = {"Scheduler": scheduler(), "KVCacheManager": manager(), "BlockPool": pagedkv.BlockPool(8)}
    objects["StepPlan"] = planned()[1]
    found = []
    for name, _ in public_numbers():
        owner, method = name.split(".")
        if owner not in objects:
            continue
        bound = getattr(objects[owner], method)
        try:
            parameters = inspect.signature(bound).parameters.values()
        except (TypeError, ValueError):
            continue
        for parameter in parameters:
            required = {p.name: 0 for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD}
            positional = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
            arguments = required | {parameter.name: HUGE}
            in_place = [arguments.pop(p.name) for p in positional]
            try:
                bound(*in_place, **arguments)
            except OverflowError:
                found.append(f"{name}({parameter.name})")
            except Exception:
                continue
    assert found == []


# --- pickling

CONFIGS = [
    pagedkv.GroupSpec(*GROUP, "bfloat16", sliding_window=32),
    pagedkv.GroupSpec([0, 2], 1, 8),
    pagedkv.CacheConfig(64, 8, hash_seed=7, enable_prefix_caching=False, pin_quota_blocks=3),
    pagedkv.CacheConfig(64, groups=[pagedkv.GroupSpec(*GROUP)]),
    pagedkv.CacheConfig(64, enable_kv_cache_events=True, event_hash="blake3", max_pending_events=9),
    pagedkv.SchedulerConfig(8, 64, 128, policy="fair", tenant_weights={"a": 2.0}, ageing=None, lookahead=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_configuration_survives_a_pickle_and_a_copy(config):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(config, protocol)) == config
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_pickle_of_a_configuration_has_every_keyword_of_its_class(config):
    positional, named = config.__getnewargs_ex__()
    keywords = list(inspect.signature(type(config)).parameters)
    derived = {"pin_quota_bytes"}  # kept in blocks
    if not named.get("enable_kv_cache_events", True):
        derived |= {"event_hash", "event_hash_seed", "max_pending_events"}
    assert set(keywords[len(positional) :]) - derived == set(named)


@pytest.mark.parametrize(
    "made", [scheduler, manager, lambda: pagedkv.BlockPool(8), lambda: planned()[1]], ids=["s", "m", "pool", "plan"]
)
def test_object_with_state_refuses_a_pickle_by_name(made):
    kept = made()
    with pytest.raises(TypeError, match=rf"cannot pickle '.*{type(kept).__name__}'"):
        pickle.dumps(kept)


def test_invalid_arguments_are_value_errors_of_the_package():
    with pytest.raises(InvalidArgumentError) as refused:
        pagedkv.CacheConfig(-1)
    assert isinstance(refused.value, ValueError)
