"""The command line, and the benchmarks for people behind it."""

import builtins
import io
import json
import re
import runpy
import sys
import threading
from http.client import BadStatusLine
from urllib.error import HTTPError, URLError

import numpy as np
import pytest

from pagedkv import cli
from pagedkv.bench import workloads
from pagedkv.bench.drive import Clock, StepTime, drive
from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.scheduling import Scheduler

SMALL = ["--num-requests", "40", "--input-len", "24", "--output-len", "8", "--rate", "200"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The version is the installed distribution's, which a source tree has not."""
    monkeypatch.setattr(cli, "version", lambda name: "0")


def measure(tmp_path, *arguments):
    path = tmp_path / "figures.jsonl"
    assert cli.main(["bench", "scheduler", *arguments, "--json", str(path)]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the command


@pytest.mark.parametrize(
    "arguments",
    [
        ["random", *SMALL],
        ["prefix-repetition", *SMALL, "--num-prefixes", "4", "--prefix-len", "32", "--suffix-len", "8"],
        ["chat", "--num-requests", "20", "--rate", "200"],
        ["random", *SMALL, "--arrivals", "burst", "--burst-size", "10", "--burst-interval", "0.1"],
    ],
    ids=["random", "prefix", "chat", "burst"],
)
def test_bench_scheduler_runs_every_request_of_a_workload(tmp_path, capsys, arguments):
    [figures] = measure(tmp_path, *arguments)
    assert figures["requests"] + figures["refused"] == int(arguments[arguments.index("--num-requests") + 1])
    assert figures["refused"] == 0
    assert "step_us_p99" in capsys.readouterr().out


def test_bench_scheduler_repeats_itself_with_the_same_seed(tmp_path):
    timeless = ("requests", "steps", "tokens", "elapsed_s", "queue_s_mean", "hit_rate", "preemptions", "usage_max")
    runs = [measure(tmp_path, "random", *SMALL, "--seed", seed)[0] for seed in ("3", "3", "4")]
    first, again, other = ([run[name] for name in timeless] for run in runs)
    assert first == again
    assert first != other


def test_package_runs_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pagedkv", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("pagedkv", run_name="__main__")
    assert capsys.readouterr().out == "pagedkv 0\n"


def test_bench_scheduler_reads_a_trace_and_its_arrivals(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0.0,10,3\n2.5,20,1\n")
    [figures] = measure(tmp_path, "trace", "--trace", str(trace), "--use-trace-arrivals")
    assert figures["requests"] == 2
    assert figures["tokens"] == 10 + 2 + 20
    assert figures["elapsed_s"] > 2.5


def test_bench_scheduler_hits_the_prefixes_of_a_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 33, "output_length": 2, "hash_ids": [1, 2], "block_size": 16}
    trace.write_text("".join(json.dumps(line | {"timestamp": time}) + "\n" for time in (0, 1000)))
    [figures] = measure(tmp_path, "trace", "--trace", str(trace), "--use-trace-arrivals")
    assert figures["tokens"] == 33 + 1 + 1 + 1


def test_bench_scheduler_measures_the_lines_of_the_benchmark(tmp_path):
    [line] = measure(tmp_path, "lines", "--only", "burst_256")
    assert (line["what"], line["ours"]) == ("burst_256", 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: no column prompt_tokens"),
        ("prompt_tokens,output_tokens\n1,x\n", 'line 2: output_tokens is "x", expected a whole number'),
        ("prompt_tokens,output_tokens\n", "no request: expected at least one"),
    ],
)
def test_bench_scheduler_says_what_is_wrong_with_a_trace(tmp_path, capsys, text, message):
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    assert cli.main(["bench", "scheduler", "trace", "--trace", str(trace)]) == 2
    assert message in capsys.readouterr().err


def test_command_says_which_extra_is_missing(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("rich", "pagedkv.bench"))]:
        monkeypatch.delitem(sys.modules, name)
    load = builtins.__import__

    def without_rich(name, *arguments, **keywords):
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return load(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert cli.main(["bench", "scheduler", "random"]) == 2
    assert 'rich is not installed, which this command needs: pip install "pagedkv[bench]"' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["bench", "scheduler", "--help"]])
def test_help_of_a_command_is_printed(capsys, arguments):
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    assert "usage: pagedkv" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--rate", "0"], ["--num-requests", "0"], ["--range-ratio", "1"]])
def test_argument_out_of_range_is_refused(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "scheduler", "random", *arguments])
    assert arguments[0] in capsys.readouterr().err


# --- its parts


def test_poisson_arrivals_come_at_their_rate():
    arrivals = workloads.poisson(np.random.default_rng(0), 20_000, 50.0)
    assert arrivals[-1] == pytest.approx(20_000 / 50, rel=0.05)
    gaps = np.diff(arrivals)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


def test_bursts_come_at_once():
    assert workloads.bursts(5, 2, 1.5).tolist() == [0.0, 0.0, 1.5, 1.5, 3.0]


def test_prompts_of_one_prefix_differ_behind_it():
    prompts, outputs = workloads.prefix_repetition(np.random.default_rng(0), 6, 2, 8, 4, 5)
    assert len({prompt[:8].tobytes() for prompt in prompts}) == 2
    assert len({prompt.tobytes() for prompt in prompts}) == 6
    assert outputs.tolist() == [5] * 6


def test_requests_that_can_never_fit_are_counted_and_left_out():
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig(4, 64, 64))
    requests = [workloads.Request(np.arange(length, dtype=np.int32), 2, 0.0) for length in (5, 60)]
    measured = drive(scheduler, requests, StepTime(1000, 0), Clock(is_virtual=True))
    assert (measured.num_requests, measured.num_refused) == (1, 1)
    assert measured.elapsed_s == pytest.approx(0.002)


def test_time_in_the_queue_is_that_before_the_first_plan():
    scheduler = Scheduler(CacheConfig(64, 4), SchedulerConfig(1, 64, 64))
    requests = [workloads.Request(np.arange(4, dtype=np.int32), 3, 0.0)] * 2
    measured = drive(scheduler, requests, StepTime(1000, 0), Clock(is_virtual=True))
    assert measured.queue_s == pytest.approx([0.0, 0.003])


def test_real_clock_sleeps():
    clock = Clock(is_virtual=False)
    clock.wait(0.01)
    assert clock.now() >= 0.01


# --- commands that run an engine


@pytest.mark.parametrize("command", ["generate", "serve", "top", "doctor"])
def test_help_of_an_engine_command_is_printed(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert f"usage: pagedkv {command}" in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small model of random weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=300, max_position_embeddings=128, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = {f"<{number}>": number for number in range(256)} | {"<unk>": 256}
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    return str(tmp_path)


def test_generate_prints_a_text_as_it_comes(folder, capsys):
    assert cli.main(["generate", folder, "<1> <2>", "--max-tokens", "4", "--ignore-eos"]) == 0
    assert len(capsys.readouterr().out.split()) >= 1


def test_generate_prints_json_lines(folder, capsys):
    words = ["generate", folder, "<1> <2>", "<3>", "-n", "2", "--temperature", "1", "--max-tokens", "3", "--json"]
    assert cli.main([*words, "--ignore-eos"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["<1> <2>", "<3>"]
    assert [[len(sample["token_ids"]) for sample in line["outputs"]] for line in lines] == [[3, 3], [3, 3]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "nowhere.gguf", "x"], "model: expected a GGUF file, found none at nowhere.gguf"),
        (["serve", "nowhere.gguf"], "model: expected a GGUF file, found none at nowhere.gguf"),
        (
            ["top", "--url", "http://127.0.0.1:9", "--once"],
            "--url: expected a server at http://127.0.0.1:9, found none",
        ),
        (["top", "--url", "foo", "--once"], "--url: expected http://HOST:PORT, found 'foo'"),
        (["bench", "scheduler", "random", "--json", "."], "--json: expected a file, found the folder ."),
        (["bench", "scheduler", "random", "--json", "/dev/null/x"], "--json: expected a file in a folder, found"),
    ],
)
def test_mistake_is_told_in_one_line(capsys, words, message):
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"pagedkv: {message}")


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_port_that_is_none_is_refused(capsys, port):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "model", f"--port={port}"])
    assert "argument --port: expected a number from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--block-size", "0"], "--block-size"), (["--kv-cache-memory-bytes", "much"], "--kv-cache-memory-bytes")],
)
def test_engine_argument_out_of_range_is_refused(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "model", "x", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "expected"), [("1000", 1000), ("4k", 4096), ("1.5m", 1572864), ("2GiB", 2 << 30)])
def test_sizes_are_read_with_their_units(text, expected):
    from pagedkv.cli.engine_arguments import size

    assert size(text) == expected


def test_doctor_checks_the_parts(capsys):
    assert cli.main(["doctor"]) == 0
    found = capsys.readouterr().out
    assert "check scheduler" in found
    assert "check attention" in found
    assert "FAILED" not in found


def test_doctor_fails_when_a_check_does(capsys, monkeypatch):
    from pagedkv.cli import doctor

    def fail():
        raise RuntimeError("broken")

    monkeypatch.setitem(doctor._CHECKS, "attention", fail)
    assert cli.main(["doctor"]) == 1
    assert "FAILED: RuntimeError: broken" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "status"), [("_FACTS", 0), ("_CHECKS", 1)])
def test_doctor_goes_on_when_something_takes_too_long(capsys, monkeypatch, kind, status):
    from pagedkv.cli import doctor

    is_over = threading.Event()
    monkeypatch.setattr(doctor, kind, {"slow": is_over.wait, **getattr(doctor, kind)})
    assert cli.main(["doctor", "--timeout", "1"]) == status
    is_over.set()
    found = capsys.readouterr().out
    assert "not done after 1 s" in found
    assert "check scheduler  ok" in found


STATE = {
    "model": "tiny",
    "num_running": 1,
    "num_waiting": 2,
    "usage": 0.5,
    "blocks": "nfhhe",
    "ref_counts": [0, 0, 1, 3, 0],
    "requests": [
        {
            "request_id": "cmpl-1",
            "state": "running",
            "num_cached_tokens": 8,
            "sequences": [{"sequence": 0, "num_tokens": 11, "block_table": [2, 3]}],
        }
    ],
    "totals": {
        "prompt_tokens": 40,
        "generation_tokens": 10,
        "prefix_cache_queries": 40,
        "prefix_cache_hits": 10,
        "copied_blocks": 2,
        "preemptions": 0,
    },
}


def test_top_shows_blocks_requests_and_rates():
    from rich.console import Console

    from pagedkv.cli.top import Rates, render

    rates = Rates()
    rates.add(STATE, 0.0)
    rates.add(STATE | {"totals": STATE["totals"] | {"generation_tokens": 30}}, 2.0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(STATE, rates, 100))
    shown = console.export_text()
    assert "running 1  waiting 2  usage 50.0 %" in shown
    assert "output 10 tok/s" in shown
    assert "hits 25.0 %" in shown
    assert "·AA▒" in shown
    assert "A  cmpl-1" in shown


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (HTTPError("", 401, "", {}, None), "--api-key: expected one that http://x takes, found none"),
        (HTTPError("", 404, "", {}, None), "--url: expected the state of a server at http://x, found status 404"),
        (URLError("refused"), "--url: expected a server at http://x, found none: refused"),
        (BadStatusLine("SSH"), "--url: expected a server at http://x, found none: SSH"),
        (io.BytesIO(b"<html>"), "--url: expected the state of a server at http://x, found something else"),
    ],
    ids=["key", "status", "refused", "no_http", "no_json"],
)
def test_top_says_what_it_found_instead_of_a_state(answer, message):
    from pagedkv.cli.top import fetch

    def open_url(request, timeout):
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match=re.escape(message)):
        fetch("http://x", None, open_url)
