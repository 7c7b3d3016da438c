"""The attention benchmark, without measuring: its lines, its turns, when it counts, and what it writes."""

import contextlib
import dataclasses
import importlib
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

import pagedkv

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
# The tables of the issues that asked for the benchmark, for `run_overhead` and for packed keys.
LINES = {
    "decode_bf16_16x4096",
    "decode_bf16_1x32768",
    "decode_fp16_16x4096",
    "decode_bf16_d64",
    "decode_bf16_mha",
    "decode_smollm2",
    "decode_fp8_16x4096",
    "decode_fp8_packed",
    "decode_bf16_gqa12",
    "decode_gqa12_packed",
    "decode_context_1thread",
    "prefill_1x2048",
    "append_kv",
    "append_kv_decode",
    "copy_blocks",
    "layer_of_32_against_1",
    "run_overhead",
}
FIELDS = {"what", "unit", "ours", "peer", "peer_name", "ratio", "limit", "limit_name", "of_limit", "peers", "spread"}
SAID_OF_EVERY_LINE = {"isa", "page_bytes", "threads", "num_layers", "read_gb_s", "fma_gflop_s", "scaling", "counts"}


@contextlib.contextmanager
def import_from(folder):
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


with import_from(BENCHMARKS):
    bench_attention, machine, measures, peers, table, turns, work, lines, program = (
        importlib.import_module(name)
        for name in (
            "bench_attention",
            "attention.machine",
            "attention.measures",
            "attention.peers",
            "attention.table",
            "attention.turns",
            "attention.work",
            "lines",
            "program",
        )
    )


class FakeMachine:
    """A machine whose limits are told, not measured."""

    isa = "avx512_bf16"

    def __init__(self, scaling=2.0):
        self._rates = {"fma_1": 1e11, "fma_2": scaling * 1e11}

    def facts(self):
        return {"cpu": "none", "isa": self.isa, "read_bytes": 0, "read_page_bytes": 4096}

    def turns(self, *limits):
        names = dict.fromkeys([*limits, "fma_1", "fma_2"])
        return [turns.Turn(name, lambda count, name=name: [self._rates.get(name, 1e10)] * count) for name in names]


class FakeVLLM:
    """Two kernels that take no time."""

    def turns(self, kind, shape, count):
        return [turns.Turn(name, lambda count: [1e-3] * count, count) for name in ("own", "recipe")], None


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(turns, "REST_SECONDS", 0)
    monkeypatch.setattr(turns, "RETRY_SECONDS", 0)
    monkeypatch.setattr(turns, "WARM_SECONDS", 0)


@pytest.fixture
def small(monkeypatch):
    """Sizes that are done in no time, everything else as it is."""
    monkeypatch.setattr(table, "MIN_KV_BYTES", 1 << 16)
    monkeypatch.setattr(peers, "CYCLE_BYTES", 1 << 16)
    monkeypatch.setattr(peers, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(measures, "MAX_LAYERS", 2)
    monkeypatch.setattr(work, "MAX_LAYERS", 2)
    monkeypatch.setattr(work, "FILL_ELEMENTS", (1 << 12) + 40)
    monkeypatch.setattr(measures, "NUM_COPIES", 3)
    monkeypatch.setattr(measures, "NUM_CALLS", 3)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def shrunk(line):
    """Return a line with the same kind of work on short sequences."""
    shape = line.shape
    num_seqs, seq_len = min(shape.num_seqs, 4), min(shape.seq_len, 64)
    shape = dataclasses.replace(shape, num_seqs=num_seqs, seq_len=seq_len, num_queries=min(shape.num_queries, seq_len))
    return dataclasses.replace(line, shape=shape)


def make_bench(report=None, scaling=2.0, vllm=None, any_machine=False):
    return measures.Bench(FakeMachine(scaling), vllm, report or lines.Report("t"), 2, any_machine)


def test_lines_are_those_of_the_issue_and_of_the_documentation():
    assert [line.what for line in table.LINES if line.what not in LINES] == []
    assert {line.what for line in table.LINES} == LINES
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "benchmarks.md").read_text()))
    assert LINES - documented == set()


def test_decode_reads_at_least_256_mib():
    decodes = [line for line in table.LINES if line.kind in {"decode", "quantised", "packed", "layers"}]
    assert [line.what for line in decodes if line.shape.raised().kv_bytes < 1 << 28] == []
    assert {line.shape.raised().num_seqs for line in decodes if line.what == "decode_bf16_16x4096"} == {16}
    assert all(line.shape.threads == (1 if line.what == "decode_context_1thread" else 2) for line in table.LINES)


def test_both_sets_with_bfloat16_products_must_reach_the_same():
    assert all(line.must.get("amx") == line.must.get("avx512_bf16") for line in table.LINES)
    [gqa12] = [line for line in table.LINES if line.what == "decode_bf16_gqa12"]
    assert (gqa12.must["avx2"].of_limit, gqa12.must["amx"].of_limit, gqa12.fma_limits) == (0.45, 0.40, ("avx2",))


def test_flops_count_the_keys_that_each_query_sees():
    shape = table.Shape(1, 4, num_q_heads=1, num_kv_heads=1, head_dim=8, num_queries=4)
    assert shape.flops == 4 * 8 * (1 + 2 + 3 + 4)
    assert dataclasses.replace(shape, num_queries=1).flops == 4 * 8 * 4


@pytest.mark.parametrize(
    ("figures", "met"),
    [
        ({"of_limit": 0.65, "ratio": 1.8, "ours": 1.0}, True),
        ({"of_limit": 0.64, "ratio": 2.0, "ours": 1.0}, False),
        ({"of_limit": 0.65, "ratio": 1.7, "ours": 1.0}, False),
        ({"of_limit": 0.65, "ratio": None, "ours": 1.0}, None),
    ],
)
def test_line_says_whether_it_reaches_what_it_must(figures, met):
    must = table.Must(of_limit=0.65, ratio=1.8)
    assert must.is_met(figures) is met
    assert must.text() == "65% of limit, 1.8x"


def test_factor_must_not_exceed_its_bound():
    must = table.Must(ours=1.03)
    assert [must.is_met({"ours": factor}) for factor in (1.0, 1.03, 1.04)] == [True, True, False]


@pytest.mark.parametrize("line", table.LINES, ids=lambda line: line.what)
def test_line_has_all_fields_when_it_is_measured_with_peers(line, small, tmp_path):
    path = tmp_path / "lines.json"
    bench = make_bench(lines.Report("t", path), vllm=FakeVLLM())
    measures.measure(bench, shrunk(line), torch.set_num_threads)
    [written] = [json.loads(text) for text in path.read_text().splitlines()]
    assert written["what"] == line.what
    assert set(written) >= FIELDS
    if written["ours"] is None:
        assert written["refused"].startswith("not available: ")
        return
    assert set(written) >= SAID_OF_EVERY_LINE - ({"read_gb_s"} if line.shape.threads == 1 else set())
    assert written["ours"] > 0
    assert written["counts"] is True
    must = line.must.get(FakeMachine.isa)
    assert must is None or must.is_met(written) is not None


def test_columns_of_the_peer_are_empty_when_it_has_no_environment(small):
    bench = make_bench()
    line = measures.measure(bench, shrunk(table.LINES[0]), torch.set_num_threads)
    assert [line[field] for field in ("peer", "peer_name", "ratio")] == [None] * 3
    assert list(line["peers"]) == [peers.SDPA]


def test_line_is_refused_by_name_when_the_build_cannot_do_it(small, monkeypatch):
    def refuse(*_, **__):
        raise pagedkv.exceptions.UnsupportedError("dtype: no such thing")

    monkeypatch.setattr(work.pagedkv, "KVCache", refuse)
    bench = make_bench()
    line = measures.measure(bench, table.LINES[0], lambda threads: None)
    assert (line["ours"], line["refused"]) == (None, "not available: dtype: no such thing")
    bench.report.show()


def test_work_that_computes_something_else_is_not_measured(small, monkeypatch):
    monkeypatch.setattr(work, "plan", lambda shape, batch: lambda q, *_, out: out.copy_(q))
    with pytest.raises(work.WrongResultError, match="off by"):
        measures.measure(make_bench(), shrunk(table.LINES[0]), torch.set_num_threads)


def test_turns_alternate_and_the_first_round_does_not_count():
    taken = []

    def turn(name):
        return turns.Turn(name, lambda count: taken.append(name) or [float(len(taken))] * count, 2)

    samples = turns.take_turns([turn("a"), turn("b")], 3)
    assert taken == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [3.0, 3.0, 6.0, 6.0, 7.0, 7.0], "b": [4.0, 4.0, 5.0, 5.0, 8.0, 8.0]}


def test_stopwatch_numbers_calls_on_and_on():
    numbers = []
    watch = turns.stopwatch(numbers.append)
    assert len(watch(2)) == 2
    watch(1)
    assert numbers == [0, 1, 2]


def test_stopwatch_runs_before_it_counts(monkeypatch):
    monkeypatch.setattr(turns, "WARM_SECONDS", 1e-9)
    numbers = []
    assert len(turns.stopwatch(numbers.append)(2)) == 2
    assert numbers == [0, 1, 2]


def test_append_has_been_in_every_slot_of_every_layer_when_it_was_everywhere(small):
    shape = table.Shape(num_seqs=2, seq_len=32, num_q_heads=1, num_kv_heads=1, head_dim=8)
    append = work.Append(shape, work.make_pool(shape, 2), 3)
    append.pool.cache.pool.fill_(torch.nan)
    assert append.num_places == 2 * 32
    work.go_around(append)
    assert torch.equal(append.pool.cache.pool.isnan().all((1, 2, 3, 4, 5)), torch.tensor([True] + 4 * [False]))
    assert not append.pool.cache.pool[1:].isnan().any()


def test_scaling_takes_the_best_of_one_thread_when_others_slow_both_down():
    assert turns.scaling({"fma_1": [1.0, 0.5, 0.5], "fma_2": [1.0, 1.2, 1.0]}) == 1.0


def test_measurement_is_repeated_until_two_threads_are_worth_two():
    scalings = iter([1.2, 1.69, 1.7])
    samples, counts = turns.measure(lambda: {"fma_1": [1.0], "fma_2": [next(scalings)]})
    assert (samples["fma_2"], counts) == ([1.7], True)
    assert list(scalings) == []


def test_measurement_is_given_up_after_five_tries_or_marked():
    tries = []

    def run():
        tries.append(1)
        return {"fma_1": [1.0], "fma_2": [1.5]}

    with pytest.raises(turns.MachineBusy, match="1.50, 1.50, 1.50, 1.50, 1.50 times"):
        turns.measure(run)
    assert len(tries) == 5
    assert turns.measure(run, any_machine=True)[1] is False


def test_exit_status_is_3_when_the_machine_is_busy(small, capsys):
    bench = make_bench(scaling=1.3)
    assert bench_attention.measure_all(bench, [shrunk(line) for line in table.LINES[:2]]) == 3
    assert "machine busy: decode_bf16_16x4096" in capsys.readouterr().err
    assert bench.report.lines == []


def test_program_answers_line_by_line_and_its_end_is_an_error():
    code = "import json, sys\nfor line in sys.stdin:\n    print(json.dumps({'n': int(line)}), flush=True)"
    asked = program.Program([sys.executable, "-c", code])
    assert [asked.ask(str(n)) for n in (1, 2)] == [{"n": 1}, {"n": 2}]
    with pytest.raises(RuntimeError, match="ended at 'x', with exit status 1"):
        asked.ask("x")
    asked.close()


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs Linux, which tells the state of a process")
def test_program_is_suspended_until_it_is_asked_again():
    code = "import json, os, sys\nfor line in sys.stdin:\n    print(json.dumps({'pid': os.getpid()}), flush=True)"
    asked = program.Program([sys.executable, "-c", code])
    stat = Path(f"/proc/{asked.ask('')['pid']}/stat")

    def state():
        return stat.read_text().rpartition(")")[2].split()[0]

    asked.rest()
    while state() in "RS":
        time.sleep(0.01)
    assert state() == "T"
    assert asked.ask("")["pid"] == int(stat.parent.name)
    asked.rest()
    asked.close()
    assert not stat.exists()


def test_page_size_is_that_of_most_of_a_mapping():
    smaps = (
        "1000-3000 rw-p 00000000 00:00 0 \nRss:  8 kB\nAnonHugePages:  0 kB\n"
        "400000-800000 rw-p 00000000 00:00 0  [anon]\nRss:  4096 kB\nAnonHugePages:  4096 kB\n"
    )
    assert machine.page_bytes_in(smaps, 0x2000, 4096) == 4096
    assert machine.page_bytes_in(smaps, 0x500000, 4096) == 1 << 21
    with pytest.raises(ValueError, match="address"):
        machine.page_bytes_in(smaps, 0x900000, 4096)


@pytest.mark.parametrize(("torch_seconds", "expected"), [(0.01, [peers.READ_BYTES / 0.01]), (1.0, [3e9, 4e9, 5e9])])
def test_limit_is_the_faster_of_two_plain_reads(torch_seconds, expected):
    samples = {"read_2": [3e9, 4e9, 5e9], measures.TORCH_SUM: [torch_seconds]}
    assert measures.plain_read(samples, "read_2") == expected


def test_share_of_a_limit_compares_what_was_measured_in_the_same_round():
    ours = [6.0, 6.0, 7.0, 60.0, 60.0, 50.0, 6.0, 6.0, 1.0]
    assert measures.share_by_round(ours, [10.0, 100.0, 10.0], 3) == pytest.approx(0.6)
