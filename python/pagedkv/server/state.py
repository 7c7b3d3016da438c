"""What the engine is doing, as JSON: blocks, requests, queue, totals."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.exceptions import UnknownIdError

if TYPE_CHECKING:
    from pagedkv.engine import LLMEngine
    from pagedkv.server.step_counts import StepCounts

# The letters that stand for the states of `Scheduler.block_map`.
_LETTERS = np.frombuffer(b"nfhew", np.uint8)


def engine_state(engine: LLMEngine, model_name: str, counts: StepCounts) -> dict[str, Any]:
    """Return a snapshot of an engine.

    Parameters
    ----------
    engine : LLMEngine
        The engine.
    model_name : str
        What its model is called.
    counts : StepCounts
        What was counted of its steps.

    Returns
    -------
    dict
        Numbers, texts and lists. `blocks` has a letter per block: null, free, held, evictable, waiting for a plan or a
        transfer. Tables and counts of requests are read one after another, beside a step that may go on.
    """
    scheduler = engine.scheduler
    snapshot, blocks, stats = scheduler.snapshot(), scheduler.block_map(), scheduler.stats()
    totals = stats.totals
    return {
        "model": model_name,
        "num_running": stats.num_requests_running,
        "num_waiting": stats.num_requests_waiting,
        "usage": stats.kv_cache_usage,
        "blocks": _LETTERS[blocks["state"]].tobytes().decode(),
        "ref_counts": blocks["ref_count"].tolist(),
        "requests": _requests(engine, snapshot),
        "totals": {
            "steps": counts.num_steps,
            "copied_blocks": counts.num_copies,
            "prompt_tokens": totals.prompt_tokens,
            "prompt_tokens_cached": totals.prompt_tokens_cached,
            "generation_tokens": totals.generation_tokens,
            "preemptions": totals.num_preemptions,
            "evictions": stats.num_evictions,
            "prefix_cache_queries": totals.prefix_cache.queries,
            "prefix_cache_hits": totals.prefix_cache.hits,
        },
    }


def _requests(engine: LLMEngine, snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    requests, sequences = snapshot["requests"], snapshot["sequences"]
    found: dict[int, dict[str, Any]] = {}
    columns = zip(
        requests["handle"].tolist(),
        requests["request_id"],
        requests["state"],
        requests["tenant"],
        requests["num_cached_tokens"].tolist(),
        requests["num_preemptions"].tolist(),
        strict=True,
    )
    for handle, request_id, state, tenant, num_cached, num_preemptions in columns:
        found[handle] = {
            "request_id": request_id,
            "state": state,
            "tenant": tenant,
            "num_cached_tokens": num_cached,
            "num_preemptions": num_preemptions,
            "sequences": [],
        }
    columns = zip(
        sequences["handle"].tolist(), sequences["sequence"].tolist(), sequences["num_tokens"].tolist(), strict=True
    )
    for handle, number, num_tokens in columns:
        table = None
        # A step beside this may have ended the request since.
        with contextlib.suppress(UnknownIdError):
            table = engine.scheduler.block_table(handle, number) if handle in found else None
        if table is not None:
            own = {"sequence": number, "num_tokens": num_tokens, "block_table": table.tolist()}
            found[handle]["sequences"].append(own)
    return list(found.values())
