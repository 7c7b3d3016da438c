"""The trace that an engine writes of its requests, and its replay."""

import json
import logging

import pytest

from pagedkv import CacheConfig, LLMEngine, RequestOutputKind, SamplingParams, SchedulerConfig
from pagedkv.engine.beam_search import BeamSearchParams
from pagedkv.simulate import Workload, simulate

SHARED = list(range(30, 46))
PROMPTS = [[*SHARED, 50, 51], [*SHARED, 60], [70, *SHARED[1:], 71]]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "requests.jsonl"


@pytest.fixture
def engine(tiny_model, path):
    with LLMEngine(tiny_model, block_size=8, scheduling_policy="fair", record_trace=path) as engine:
        yield engine


def params(max_tokens=5, **others):
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | others)


def run(engine):
    while engine.has_unfinished_requests():
        engine.step()


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_trace_has_lengths_and_tenants_of_each_request_and_no_tokens(engine, path):
    for number, (prompt, tenant) in enumerate(zip(PROMPTS, ["red", None, "red"], strict=True)):
        engine.add_request(str(number), prompt, params(3 + number), tenant=tenant)
    run(engine)
    found = {row["input_length"]: row for row in rows(path)}
    assert {(row["input_length"], row["output_length"], row.get("tenant", 0)) for row in rows(path)} == {
        (18, 3, 1),
        (17, 4, 0),
    } | {(17, 5, 1)}
    assert set(found[18]) == {"timestamp", "input_length", "hash_ids", "block_size", "tenant", "output_length"}


def test_trace_replays_with_the_prefixes_that_requests_shared(engine, path):
    outputs = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params())
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
    workload = Workload.read_jsonl(path)
    found = simulate(workload, "pagedkv", CacheConfig(64, 8), SchedulerConfig(8, 256, 256))
    assert found.cached_tokens.tolist() == [outputs[str(number)].num_cached_tokens for number in range(3)] == [0, 16, 0]


def test_trace_counts_the_tokens_of_streamed_requests_and_of_the_longest_sample(engine, path):
    for kind in RequestOutputKind:
        engine.add_request(kind.name, PROMPTS[0], params(7, output_kind=kind, n=2, temperature=1))
    run(engine)
    assert [row["output_length"] for row in rows(path)] == [7, 7, 7]


def test_trace_has_beam_searches(engine, path):
    engine.add_request("beams", PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
    run(engine)
    assert [row["output_length"] for row in rows(path)] == [4]


def test_trace_leaves_out_requests_that_were_aborted(engine, path):
    engine.add_request("a", PROMPTS[0], params())
    engine.step()
    engine.abort_request("a")
    assert rows(path) == []
    engine.add_request("a", PROMPTS[0], params(6))
    run(engine)
    assert [row["output_length"] for row in rows(path)] == [6]


def test_prompts_of_different_salts_share_nothing_in_the_trace(engine, path):
    for salt in ("one", "other"):
        engine.add_request(salt, {"prompt_token_ids": PROMPTS[0], "cache_salt": salt}, params())
    run(engine)
    first, second = rows(path)
    assert set(first["hash_ids"]).isdisjoint(second["hash_ids"])


def test_engine_goes_on_when_its_trace_cannot_be_written(tiny_model, caplog):
    with (
        caplog.at_level(logging.ERROR, "pagedkv"),
        LLMEngine(tiny_model, block_size=8, record_trace="/dev/full") as engine,
    ):
        for number in range(2):
            engine.add_request(str(number), PROMPTS[number], params())
        run(engine)
    assert [record.message for record in caplog.records] == [
        "the trace of requests ends here: [Errno 28] No space left on device"
    ]


def test_engine_names_the_file_of_a_trace_that_it_cannot_open(tiny_model, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        LLMEngine(tiny_model, block_size=8, record_trace=tmp_path / "nowhere" / "t.jsonl")
