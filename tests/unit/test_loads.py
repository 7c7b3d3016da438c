"""Prefixes whose keys and values another process computed: what a loop loads, and that attention reads it."""

import math

import numpy as np
import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError

KV_HEADS, HEAD_DIM = 2, 8
PROMPT = list(range(30, 50))
LIMITS = pagedkv.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


class Worker:
    """A scheduler with its cache; key and value of a token follow from its id."""

    def __init__(self, num_blocks):
        group = pagedkv.GroupSpec(1, KV_HEADS, HEAD_DIM, "float32")
        config = pagedkv.CacheConfig(num_blocks, 4, groups=[group])
        self.scheduler = pagedkv.Scheduler(config, LIMITS)
        self.kv_cache = pagedkv.KVCache.from_config(config, LIMITS, backend="numpy")
        self.kv_cache.pool.fill(math.nan)

    def run(self, plan):
        """Return what each of the plan's tokens attends to."""
        self.kv_cache.apply(plan)
        made = np.random.default_rng(0).standard_normal((64, 3, KV_HEADS, HEAD_DIM), dtype=np.float32)
        q, k, v = np.moveaxis(made[plan.token_ids], 1, 0).copy()
        self.kv_cache.append_kv(0, k, v, plan.slot_mapping[0])
        keys, values = self.kv_cache.layer(0)
        table = self.kv_cache.block_table[0]
        return pagedkv.paged_attention(q, keys, values, table, plan.seq_lens, plan.query_start_loc, rows=plan.rows)


def test_decode_worker_that_loads_the_blocks_of_a_prefill_worker_attends_as_that_one_does():
    prefill, decode = Worker(16), Worker(24)
    source = prefill.scheduler.add_request("there", PROMPT, max_tokens=2)
    expected = prefill.run(prefill.scheduler.schedule())

    decode.scheduler.add_request("before", [1, 2, 3], max_tokens=8)
    target = decode.scheduler.add_request("here", PROMPT, max_tokens=2, num_external_tokens=17)
    plan = decode.scheduler.schedule()
    decode.run(plan)
    assert plan.load_handles.tolist() == [target] * 5
    table = prefill.scheduler.block_table(source)
    for group, column, block in plan.loads.tolist():
        assert group == 0
        decode.kv_cache.pool[block] = prefill.kv_cache.pool[table[column]]
    decode.scheduler.commit(plan, [7])
    decode.scheduler.transfers_done(np.unique(plan.load_ids))

    plan = decode.scheduler.schedule()
    attended = decode.run(plan)
    assert plan.positions.tolist() == [3, 17, 18, 19]
    np.testing.assert_allclose(attended[1:], expected[17:], rtol=1e-5, atol=1e-6)


def test_loads_survive_the_way_through_a_buffer():
    worker = Worker(16)
    worker.scheduler.add_request("r", PROMPT, max_tokens=2, num_external_tokens=8)
    plan = worker.scheduler.schedule()
    rebuilt = pagedkv.StepPlan.from_buffer(bytes(plan.buffer))
    for name in ("loads", "load_ids", "load_handles"):
        assert len(getattr(plan, name)) == 2
        np.testing.assert_array_equal(getattr(rebuilt, name), getattr(plan, name))


def test_loaded_tokens_are_in_the_statistics():
    scheduler = Worker(16).scheduler
    handle = scheduler.add_request("r", PROMPT, max_tokens=2, num_external_tokens=8)
    plan = scheduler.schedule()
    scheduler.commit(plan, [])
    scheduler.transfers_done(plan.load_ids[:1])
    assert scheduler.request_stats(handle).num_loaded_tokens == 8
    assert scheduler.stats().totals.prompt_tokens_loaded == 8


def test_more_external_tokens_than_the_prompt_has_are_refused_by_name():
    scheduler = Worker(16).scheduler
    with pytest.raises(InvalidArgumentError, match=r"num_external_tokens: expected at most 20 .*, found 21"):
        scheduler.add_request("r", PROMPT, max_tokens=2, num_external_tokens=21)
