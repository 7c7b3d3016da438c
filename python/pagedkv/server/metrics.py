"""Statistics of the engine for Prometheus, under our names or vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from pagedkv.engine import LLMEngine

_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "request_queue_time_seconds": "From arrival to admission.",
    "request_prefill_time_seconds": "From admission to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a request.",
    "request_num_preemptions": "How often a request lost its blocks.",
}


class CopyCounter:
    """Step hook that counts blocks which were copied before they were written."""

    def __init__(self) -> None:
        self.num_copies = 0
        self.num_steps = 0

    def __call__(self, event: Any) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_copies += len(event.plan.copies)


class EngineCollector(Collector):
    """Reads the engine's statistics when they are asked for.

    Parameters
    ----------
    engine : LLMEngine
        Whose they are.
    model_name : str
        The label `model_name`.
    copies : CopyCounter
        Counts copied blocks.
    vllm_names : bool
        Whether to use vLLM's names, for what it has names for.
    """

    def __init__(self, engine: LLMEngine, model_name: str, copies: CopyCounter, *, vllm_names: bool) -> None:
        self._engine = engine
        self._labels = ["model_name", "engine"]
        self._values = [model_name, "0"]
        self._copies = copies
        self._is_vllm = vllm_names
        self._prefix = "vllm:" if vllm_names else "pagedkv:"

    def collect(self) -> Iterator[Any]:
        """Return all metrics."""
        stats = self._engine.get_metrics()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        for name, help_text in _HISTOGRAMS.items():
            yield self._histogram(name, help_text, getattr(stats, name))
        if not self._is_vllm:
            yield from self._own()

    def _gauges(self, stats: Any) -> Iterator[Any]:
        yield self._gauge("num_requests_running", "Requests with seats.", stats.num_requests_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for seats.", stats.num_requests_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks that are held, 0 to 1.", stats.kv_cache_usage)

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
        blocks = scheduler.block_map()
        labels = [*self._labels, "state"]
        by_state = GaugeMetricFamily(self._prefix + "kv_blocks", "Blocks by state.", labels=labels)
        free, evictable, held, fenced = scheduler.num_blocks_by_state
        for state, count in {"free": free, "held": held, "evictable": evictable, "fenced": fenced}.items():
            by_state.add_metric([*self._values, state], count)
        yield by_state
        labels = [*self._labels, "ref_count"]
        shared = GaugeMetricFamily(self._prefix + "kv_blocks_by_ref_count", "Held blocks by holders.", labels=labels)
        counts: dict[int, int] = {}
        for count in blocks["ref_count"][blocks["ref_count"] > 0].tolist():
            counts[count] = counts.get(count, 0) + 1
        for count, number in sorted(counts.items()):
            shared.add_metric([*self._values, str(count)], number)
        yield shared
        yield self._counter("copied_blocks", "Blocks copied before they were written.", self._copies.num_copies)
        yield self._counter("steps", "Steps.", self._copies.num_steps)

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
