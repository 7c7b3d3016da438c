"""What the scheduler counts."""

import numpy as np
import pytest

import pagedkv


def step(scheduler, now, tokens=None):
    plan = scheduler.schedule(now=now)
    return scheduler.commit(plan, [7] * plan.num_samples if tokens is None else tokens, now=now + 0.5)


@pytest.fixture
def scheduler():
    return pagedkv.Scheduler(pagedkv.CacheConfig(16, 4), pagedkv.SchedulerConfig(2, 16, 32))


def test_stats_of_a_finished_request_tell_its_times(scheduler):
    scheduler.add_request("a", [1, 2, 3], max_tokens=2, now=1.0)
    step(scheduler, 3.0)
    [finished] = step(scheduler, 4.0).finished
    stats = finished.stats
    assert (stats.arrival_time, stats.queue_time, stats.time_to_first_token) == (1.0, 2.0, 2.5)
    assert (stats.time_in_system, stats.requeue_time) == (3.5, 0.0)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_preemptions) == (3, 2, 0)


def test_request_stats_tell_of_a_live_request_what_is_known(scheduler):
    handle = scheduler.add_request("a", [1, 2, 3], max_tokens=2, now=1.0)
    with pytest.raises(pagedkv.exceptions.UnknownIdError):
        scheduler.request_stats(handle)
    step(scheduler, 3.0)
    stats = scheduler.request_stats(handle)
    assert (stats.time_to_first_token, stats.num_generation_tokens) == (2.5, 1)


def test_stats_count_hits_apart_when_requests_come_back_after_preemption():
    scheduler = pagedkv.Scheduler(pagedkv.CacheConfig(7, 2), pagedkv.SchedulerConfig(2, 16, 12))
    scheduler.add_request("old", [1, 2, 3, 4], max_tokens=8, now=0.0)
    scheduler.add_request("young", [5, 6, 7, 8], max_tokens=8, now=0.0)
    now = 0.0
    while scheduler.has_unfinished_requests():
        now += 1.0
        step(scheduler, now)
    totals = scheduler.stats().totals
    cache = totals.prefix_cache
    assert totals.num_preemptions >= 1
    assert (cache.requests, cache.queries, cache.hits) == (2, 8, 0)
    assert cache.preempted_requests == totals.num_preemptions
    assert cache.preempted_queries >= cache.preempted_hits
    assert totals.queue_time_seconds > 2.0


def test_stats_count_cached_tokens_of_a_shared_prompt(scheduler):
    for name in "ab":
        scheduler.add_request(name, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
        step(scheduler, 1.0)
    stats = scheduler.stats()
    assert (stats.totals.prompt_tokens, stats.totals.prompt_tokens_cached) == (18, 8)
    assert (stats.totals.prefix_cache.queries, stats.totals.prefix_cache.hits) == (18, 8)
    assert stats.totals.finished_by_reason == {"stop": 0, "length": 2, "abort": 0, "dropped": 0}


def test_stats_tell_where_the_blocks_are(scheduler):
    scheduler.add_request("a", [1, 2, 3, 4, 5], max_tokens=4)
    step(scheduler, 1.0)
    stats = scheduler.stats()
    assert (stats.num_held_blocks, stats.num_free_blocks, stats.num_cached_blocks, stats.num_fenced_blocks) == (
        2,
        13,
        0,
        0,
    )
    assert stats.kv_cache_usage == pytest.approx(2 / 15)
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 0)


def test_stats_are_kept_per_tenant(scheduler):
    for name, tenant in [("a", "x"), ("b", "y"), ("c", "x"), ("d", None)]:
        scheduler.add_request(name, [1, 2], max_tokens=2, tenant=tenant)
    while scheduler.has_unfinished_requests():
        step(scheduler, 1.0)
    tenants = scheduler.stats().tenants
    assert {tenant: totals.generation_tokens for tenant, totals in tenants.items()} == {"x": 4, "y": 2, None: 2}
    assert scheduler.stats().other_tenants is None


def test_stats_put_tenants_beyond_the_table_together(scheduler):
    for number in range(1030):
        scheduler.add_request(str(number), [1], max_tokens=1, tenant=str(number))
    while scheduler.has_unfinished_requests():
        step(scheduler, 1.0)
    stats = scheduler.stats()
    assert (len(stats.tenants), stats.other_tenants.num_finished) == (1024, 6)


def test_histograms_have_one_bucket_more_than_bounds(scheduler):
    scheduler.add_request("a", [1], max_tokens=1, now=0.0)
    step(scheduler, 1.0)
    histogram = scheduler.stats().e2e_request_latency_seconds
    assert len(histogram.counts) == len(histogram.bounds) + 1
    assert (histogram.count, histogram.sum, histogram.counts.sum()) == (1, 1.5, 1)
    assert histogram.bounds[np.argmax(histogram.counts)] == 1.5


def test_residency_is_none_when_nothing_is_sampled(scheduler):
    assert scheduler.stats().kv_block_lifetime_seconds is None


def test_residency_is_counted_when_blocks_are_evicted():
    cache_config = pagedkv.CacheConfig(4, 2, kv_cache_metrics_sample=1.0)
    scheduler = pagedkv.Scheduler(cache_config, pagedkv.SchedulerConfig(1, 16, 6))
    for number, now in [(1, 1.0), (2, 11.0)]:
        scheduler.add_request(str(number), [number] * 5, max_tokens=1, now=now)
        step(scheduler, now)
    stats = scheduler.stats()
    assert stats.num_evictions == stats.kv_block_lifetime_seconds.count == 2
    assert stats.kv_block_lifetime_seconds.sum == 20.0
    assert cache_config.kv_cache_metrics_sample == 1.0


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_cache_config_refuses_a_sample_that_is_no_share(share):
    with pytest.raises(ValueError, match="kv_cache_metrics_sample"):
        pagedkv.CacheConfig(4, kv_cache_metrics_sample=share)


@pytest.mark.parametrize("now", [float("nan"), float("inf")])
def test_schedule_refuses_a_time_that_is_not_finite(scheduler, now):
    with pytest.raises(ValueError, match="now"):
        scheduler.schedule(now=now)
    assert scheduler.schedule().blocked_on is None


def test_stats_take_monotonic_time_when_none_is_given(scheduler):
    scheduler.add_request("a", [1, 2, 3], max_tokens=1)
    plan = scheduler.schedule()
    [finished] = scheduler.commit(plan, [1]).finished
    assert 0 <= finished.stats.queue_time <= finished.stats.time_to_first_token < 60
