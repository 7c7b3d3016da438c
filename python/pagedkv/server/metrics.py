"""Statistics of the engine for Prometheus, under our names or vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from pagedkv.engine import LLMEngine
    from pagedkv.server.step_counts import StepCounts

_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "request_queue_time_seconds": "From arrival to admission.",
    "request_prefill_time_seconds": "From admission to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a request.",
    "request_num_preemptions": "How often a request lost its blocks.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens that a request got, all samples together.",
    # The engine has these where it watches some of its blocks.
    "kv_block_lifetime_seconds": "From a block's allocation to its eviction.",
    "kv_block_idle_before_evict_seconds": "From a block's last hit to its eviction.",
    "kv_block_reuse_gap_seconds": "Between the hits of a block.",
}


class EngineCollector(Collector):
    """Reads the engine's statistics when they are asked for.

    Parameters
    ----------
    engine : LLMEngine
        Whose they are.
    model_name : str
        The label `model_name`.
    counts : StepCounts
        What was counted of its steps.
    vllm_names : bool
        Whether to use vLLM's names, for what it has names for.
    """

    def __init__(self, engine: LLMEngine, model_name: str, counts: StepCounts, *, vllm_names: bool) -> None:
        self._engine = engine
        self._labels = ["model_name", "engine"]
        self._values = [model_name, "0"]
        self._counts = counts
        self._is_vllm = vllm_names
        self._prefix = "vllm:" if vllm_names else "pagedkv:"

    def collect(self) -> Iterator[Any]:
        """Return all metrics."""
        stats = self._engine.get_metrics()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        for name, help_text in _HISTOGRAMS.items():
            if (found := getattr(stats, name)) is not None:
                yield self._histogram(name, help_text, found)
        counts = self._counts
        yield self._histogram(
            "inter_token_latency_seconds", "From one token of a sample to its next.", counts.inter_token_latency
        )
        yield self._histogram("iteration_tokens_total", "Tokens of a step.", counts.iteration_tokens)
        if not self._is_vllm:
            yield from self._own()

    def _gauges(self, stats: Any) -> Iterator[Any]:
        yield self._gauge("num_requests_running", "Requests with seats.", stats.num_requests_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for seats.", stats.num_requests_waiting)
        labels = [*self._labels, "reason"]
        by_reason = GaugeMetricFamily(self._prefix + "num_requests_waiting_by_reason", "By reason.", labels=labels)
        # Requests of this server wait for room alone: it loads no blocks from elsewhere and compiles no grammars.
        for reason, count in {"capacity": stats.num_requests_waiting, "deferred": 0}.items():
            by_reason.add_metric([*self._values, reason], count)
        yield by_reason
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks that are held, 0 to 1.", stats.kv_cache_usage)
        yield self._cache_config()

    def _cache_config(self) -> Any:
        cache = self._engine.kv_cache
        config = {
            "block_size": cache.groups[0].block_size,
            "cache_dtype": cache.groups[0].dtype,
            # vLLM's name, on a CPU too.
            "num_gpu_blocks": cache.num_blocks,
        }
        labels = [*self._labels, *config]
        family = GaugeMetricFamily(self._prefix + "cache_config_info", "What the cache was made with.", labels=labels)
        family.add_metric([*self._values, *map(str, config.values())], 1)
        return family

    def _counters(self, stats: Any) -> Iterator[Any]:
        totals = stats.totals
        yield self._counter("prefix_cache_queries", "Tokens looked up.", totals.prefix_cache.queries)
        yield self._counter("prefix_cache_hits", "Tokens found.", totals.prefix_cache.hits)
        yield self._counter("num_preemptions", "Preemptions.", totals.num_preemptions)
        yield self._counter("prompt_tokens", "Tokens of prompts.", totals.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Those from the prefix cache.", totals.prompt_tokens_cached)
        yield self._counter("generation_tokens", "Tokens drawn.", totals.generation_tokens)
        finished = CounterMetricFamily(
            self._prefix + "request_success",
            "Samples that ended, by reason.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, count in totals.finished_by_reason.items():
            finished.add_metric([*self._values, reason], count)
        yield finished

    def _own(self) -> Iterator[Any]:
        scheduler = self._engine.scheduler
        labels = [*self._labels, "state"]
        by_state = GaugeMetricFamily(self._prefix + "kv_blocks", "Blocks by state.", labels=labels)
        free, evictable, held, fenced = scheduler.num_blocks_by_state
        for state, count in {"free": free, "held": held, "evictable": evictable, "fenced": fenced}.items():
            by_state.add_metric([*self._values, state], count)
        yield by_state
        labels = [*self._labels, "ref_count"]
        shared = GaugeMetricFamily(self._prefix + "kv_blocks_by_ref_count", "Held blocks by holders.", labels=labels)
        ref_counts = scheduler.block_map()["ref_count"]
        found = zip(*np.unique(ref_counts[ref_counts > 0], return_counts=True), strict=True)
        for ref_count, number in found:
            shared.add_metric([*self._values, str(ref_count)], int(number))
        yield shared
        yield self._counter("copied_blocks", "Blocks copied before they were written.", self._counts.num_copies)
        yield self._counter("steps", "Steps.", self._counts.num_steps)

    def _gauge(self, name: str, help_text: str, value: float) -> Any:
        return self._family(GaugeMetricFamily, name, help_text, value)

    def _counter(self, name: str, help_text: str, value: float) -> Any:
        return self._family(CounterMetricFamily, name, help_text, value)

    def _family(self, kind: Callable[..., Any], name: str, help_text: str, value: float) -> Any:
        family = kind(self._prefix + name, help_text, labels=self._labels)
        family.add_metric(self._values, value)
        return family

    def _histogram(self, name: str, help_text: str, found: Any) -> Any:
        family = HistogramMetricFamily(self._prefix + name, help_text, labels=self._labels)
        total, buckets = 0, []
        bounds = [*map(str, found.bounds.tolist()), "+Inf"]
        for bound, count in zip(bounds, found.counts.tolist(), strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(self._values, buckets, found.sum)
        return family
