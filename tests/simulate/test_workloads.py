"""Workloads: made up, recorded, and what is wrong with a trace."""

import json

import numpy as np
import pytest

from pagedkv.simulate import TraceRecorder, Workload


def columns(workload):
    return [workload.arrivals.tobytes(), workload.prompt_tokens.tobytes(), workload.output_tokens.tobytes()]


@pytest.mark.parametrize("make", [Workload.sharegpt, Workload.alpaca, Workload.translation, Workload.chat])
def test_workload_is_the_same_for_the_same_seed_and_another_for_another(make):
    first, again, other = (columns(make(200, 3.0, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_sharegpt_workload_has_the_quantiles_of_the_trace(traces):
    lines = np.loadtxt(traces / "sharegpt_lengths.csv", delimiter=",", skiprows=1, dtype=np.int64)
    lines = lines[lines.sum(axis=1) < 2048]
    made = Workload.sharegpt(50_000, 1.0)
    for real, ours in ((lines[:, 0], made.prompt_tokens), (lines[:, 1], made.output_tokens)):
        found = np.quantile(ours, [0.1, 0.25, 0.5, 0.75, 0.9])
        assert found == pytest.approx(np.quantile(real, [0.1, 0.25, 0.5, 0.75, 0.9]), rel=0.06, abs=1)


def test_chat_begins_a_turn_with_what_was_said_before():
    workload = Workload.chat(40, 1.0, new_conversation=0.0, most_turns=40)
    before = workload.prompt(1)
    turn = workload.prompt(2)
    assert len(turn) > len(before) or len(turn) == 1024
    if len(turn) < 1024:
        assert (turn[: len(before)] == before).all()


def test_read_table_keeps_arrivals_and_orders_requests(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,tenant\n9,5,6,2\n4,7,8,1\n")
    workload = Workload.read_table(path)
    assert workload.arrivals.tolist() == [0.0, 5.0]
    assert workload.prompt_tokens.tolist() == [7, 5]
    assert workload.tenants.tolist() == [1, 2]


def test_read_table_reads_azure_traces(traces):
    workload = Workload.read_table(traces / "azure_llm_2023_conv.csv")
    assert len(workload) == 19_366
    assert workload.arrivals[-1] / 60 == pytest.approx(58.4, abs=0.2)


def test_read_jsonl_reads_mooncake_traces(traces):
    workload = Workload.read_jsonl(traces / "mooncake_conversation.jsonl")
    assert len(workload) == 12_031
    first, second = workload.prompt(0), workload.prompt(1)
    assert (first[:512] == second[:512]).all()
    assert not (first[512:1024] == second[512:1024]).any()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "prompt_tokens\n3\n", "line 1: no column output_tokens"),
        ("a.csv", "prompt_tokens,output_tokens\n3,4\n-3,4\n", 'line 3: prompt_tokens is "-3"'),
        ("a.csv", "prompt_tokens,output_tokens\n3,four\n", 'line 2: output_tokens is "four"'),
        ("a.csv", "prompt_tokens,output_tokens,arrival\n3,4,-1\n", 'line 2: arrival is "-1"'),
        ("a.csv", "prompt_tokens,output_tokens\n", "no request: expected at least one"),
        ("a.jsonl", "", "no request: expected at least one$"),
        ("a.jsonl", '{"timestamp": 0, "output_length": 4}\n', "line 1: input_length is missing"),
        ("a.jsonl", '{"timestamp": 0, "input_length": -4, "output_length": 4}\n', "line 1: input_length is -4"),
        ("a.jsonl", '{"timestamp": "x", "input_length": 4, "output_length": 4}\n', 'line 1: timestamp is "x"'),
        ("a.jsonl", '{"timestamp": 0,\n', "line 1: EOF"),
    ],
)
def test_trace_that_is_wrong_is_refused_by_line_and_field(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    read = Workload.read_table if path.suffix == ".csv" else Workload.read_jsonl
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_workload_says_whether_a_table_has_arrivals(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n3,4\n")
    workload = Workload.read_table(path)
    assert not workload.has_arrivals
    assert not workload.shorter_than(100).has_arrivals
    assert workload.with_arrivals(1.0).has_arrivals


def test_take_repeats_requests_with_all_but_their_arrivals():
    workload = Workload.from_lengths([8, 9], [1, 2], [0.0, 5.0]).with_tenants([1, 2], [0, 3])
    taken = workload.take(np.array([1, 0, 1]))
    assert taken.prompt_tokens.tolist() == [9, 8, 9]
    assert taken.tenants.tolist() == [2, 1, 2]
    assert not taken.has_arrivals
    with pytest.raises(ValueError, match=r"^places: expected places of 2 requests, found -1"):
        workload.take([-1])


def test_with_shared_prefix_refuses_prompts_that_nobody_can_count():
    with pytest.raises(ValueError, match=r"^tokens: expected at most \d+, in front of a prompt of 8, found 2147483647"):
        Workload.from_lengths([8], [1], [0.0]).with_shared_prefix(2**31 - 1)


def test_from_lengths_names_the_length_that_is_none():
    with pytest.raises(ValueError, match=r"output_tokens\[1\]: expected a length of at least 1, found 0"):
        Workload.from_lengths([1, 2], [3, 0], [0.0, 0.0])


def test_from_lengths_refuses_arrivals_that_go_back():
    with pytest.raises(ValueError, match="arrivals: expected ascending seconds, found 1 behind 2"):
        Workload.from_lengths([1, 2], [3, 4], [2.0, 1.0])


def test_recorder_writes_lengths_arrivals_and_hashed_prefixes_but_no_tokens(tmp_path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=4) as recorder:
        recorder.added("a", np.arange(9), now=100.0)
        recorder.added("b", np.r_[np.arange(4), 77, 78, 79, 80, 81], now=100.5, tenant=3)
        recorder.finished("a", 11)
        recorder.finished("b", 12)
        recorder.finished("unknown", 5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["timestamp"], row["input_length"], row["output_length"]) for row in rows] == [
        (100_000, 9, 11),
        (100_500, 9, 12),
    ]
    first, second = (row["hash_ids"] for row in rows)
    assert first[0] == second[0]
    assert first[1] != second[1]
    workload = Workload.read_jsonl(path)
    assert (workload.prompt(0)[:4] == workload.prompt(1)[:4]).all()
    assert not (workload.prompt(0)[4:] == workload.prompt(1)[4:]).any()
    assert workload.tenants.tolist() == [0, 3]


def test_recorder_records_a_request_that_has_ended_in_one_call(tmp_path):
    with TraceRecorder(tmp_path / "t.jsonl") as recorder:
        recorder.record(list(range(40)), 5, arrival=3.0)
        recorder.record(list(range(30)), 6, arrival=2.0)
    workload = Workload.read_jsonl(tmp_path / "t.jsonl")
    assert workload.arrivals.tolist() == [0.0, 1.0]
    assert workload.prompt_tokens.tolist() == [30, 40]


def test_recorders_have_secrets_of_their_own(tmp_path):
    hashes = []
    for name in ("a", "b"):
        with TraceRecorder(tmp_path / name, block_size=4) as recorder:
            recorder.added("r", np.arange(8), now=0.0)
            recorder.finished("r", 1)
        hashes.append(json.loads((tmp_path / name).read_text())["hash_ids"])
    assert hashes[0] != hashes[1]


def test_recorder_leaves_out_requests_that_did_not_end(tmp_path):
    with TraceRecorder(tmp_path / "t") as recorder:
        recorder.added("r", [1, 2], now=0.0)
    assert (tmp_path / "t").read_text() == ""


def test_recorder_refuses_a_request_that_is_open(tmp_path):
    with TraceRecorder(tmp_path / "t") as recorder:
        recorder.added("r", [1, 2], now=0.0)
        with pytest.raises(ValueError, match="request_id: expected one that is not open, found 'r'"):
            recorder.added("r", [3], now=1.0)
