"""`pagedkv simulate`."""

import json
import sys

import pytest

from pagedkv import cli


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The version is the installed distribution's, which a source tree has not."""
    monkeypatch.setattr(cli, "version", lambda name: "0")


def simulate(*arguments):
    return cli.main(["simulate", *map(str, arguments), "--jobs", "1"])


SMALL = ["sharegpt", "--seconds", 30, "--systems", "pagedkv", "orca_max"]


def test_simulate_writes_a_line_for_each_system_and_rate(tmp_path, capsys):
    assert simulate(*SMALL, "--rates", 0.5, 1, "--json", tmp_path / "f.jsonl") == 0
    rows = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert [(row["system"], row["rate"]) for row in rows] == [
        ("pagedkv", 0.5),
        ("pagedkv", 1.0),
        ("orca_max", 0.5),
        ("orca_max", 1.0),
    ]
    assert all(row["finished"] == row["requests"] for row in rows)
    assert "orca_max" in capsys.readouterr().out


def test_simulate_writes_the_same_bytes_for_the_same_seed(tmp_path):
    for name in ("a", "b"):
        assert simulate(*SMALL, "--json", tmp_path / f"{name}.jsonl") == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_simulate_draws_the_same_bytes_for_the_same_seed(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    for name in ("a", "b"):
        assert simulate(*SMALL, "--rates", 0.5, 1, "--plot", tmp_path / f"{name}.{suffix}") == 0
    drawn = (tmp_path / f"a.{suffix}").read_bytes()
    assert drawn == (tmp_path / f"b.{suffix}").read_bytes()
    assert drawn.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_simulate_replays_a_trace_with_its_own_arrivals(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,30,10\n100,30,10\n")
    arguments = [trace, "--recorded-arrivals", "--systems", "vllm", "--json", tmp_path / "f.jsonl"]
    assert simulate(*arguments) == 0
    [row] = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert row["finished"] == 2
    assert row["seconds"] > 100


def test_simulate_drops_longer_requests_only_when_it_is_told_to(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,30,10\n1,3000,10\n")
    arguments = [trace, "--recorded-arrivals", "--systems", "vllm", "--json", tmp_path / "f.jsonl"]
    assert simulate(*arguments) == 2
    assert "request 1 (line 3): prompt_tokens + output_tokens: expected at most 2048" in capsys.readouterr().err
    assert simulate(*arguments, "--drop-longer") == 0
    [row] = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert row["finished"] == 1


def test_simulate_refuses_recorded_arrivals_of_a_trace_that_has_none(tmp_path, capsys):
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,output_tokens\n30,10\n20,10\n")
    assert simulate(trace, "--recorded-arrivals") == 2
    assert f"rate: expected requests a second, because {trace} has no arrivals" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system-prompt=-5"], "argument --system-prompt: expected a number of at least 0, found -5"),
        (["--samples", "2", "--beams", "3"], "argument --beams: not allowed with argument --samples"),
    ],
)
def test_simulate_names_the_option_that_cannot_be_read(capsys, arguments, message):
    with pytest.raises(SystemExit):
        simulate("sharegpt", *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "fewer"), [(["--longest", 300], 600), (["--system-prompt", 1500], 600)])
def test_simulate_drops_longer_requests_of_made_up_workloads(tmp_path, arguments, fewer):
    arguments = ["sharegpt", "--seconds", 600, "--systems", "vllm", "--drop-longer", *arguments]
    assert simulate(*arguments, "--json", tmp_path / "f.jsonl") == 0
    [row] = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert 0 < row["finished"] == row["requests"] < fewer


def test_simulate_says_that_held_tokens_count_for_each_that_shares_them(tmp_path, capsys):
    arguments = ["sharegpt", "--seconds", 60, "--rates", 3, "--beams", 6, "--systems", "pagedkv"]
    assert simulate(*arguments, "--json", tmp_path / "f.jsonl") == 0
    assert json.loads((tmp_path / "f.jsonl").read_text())["token_share"] > 1
    assert "held" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    assert "tokens of shared blocks count for each sequence" in " ".join(capsys.readouterr().out.split())


def test_simulate_at_a_rate_names_the_line_of_a_request_that_is_too_long(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n30,10\n3000,10\n40,10\n")
    assert simulate(trace, "--rates", 1, "--seconds", 60) == 2
    assert "(line 3): prompt_tokens + output_tokens: expected at most 2048" in capsys.readouterr().err


def test_simulate_repeats_a_table_whatever_its_file_is_called(tmp_path):
    trace = tmp_path / "lengths.txt"
    trace.write_text("prompt_tokens,output_tokens\n30,10\n20,10\n")
    arguments = [trace, "--rates", 1, "--seconds", 5, "--systems", "vllm", "--json", tmp_path / "f.jsonl"]
    assert simulate(*arguments) == 0
    assert json.loads((tmp_path / "f.jsonl").read_text())["requests"] == 5


def test_simulate_paper_prints_the_papers_value_beside_ours(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    arguments = ["paper", "--only", "fig2", "capacity", "--json", tmp_path / "p.jsonl", "--plots", tmp_path / "plots"]
    assert simulate(*arguments) == 0
    assert "fig2_vllm_token" in capsys.readouterr().out
    rows = {row["what"]: row for row in map(json.loads, (tmp_path / "p.jsonl").read_text().splitlines())}
    assert rows["fig2_max_token"]["paper"] == 20.4
    assert (tmp_path / "plots" / "fig2.svg").stat().st_size > 1000


def test_simulate_says_which_extra_has_the_plots(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert simulate(*SMALL, "--plot", tmp_path / "latency.svg") == 2
    assert (
        'matplotlib is not installed, which this command needs: pip install "pagedkv[viz]"' in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.csv"], "workload: expected sharegpt, alpaca"),
        (["sharegpt", "--rates", "0"], "rate: expected requests a second, above 0, found 0.0"),
        (["sharegpt", "--recorded-arrivals"], "rate: expected requests a second for 'sharegpt', found None"),
        (["sharegpt", "--seconds", "inf"], "seconds: expected a time above 0, finite, found inf"),
        (["sharegpt", "--seconds", "nan"], "seconds: expected a time above 0, finite, found nan"),
        (["sharegpt", "--seconds", "0"], "seconds: expected a time above 0, finite, found 0.0"),
        (["sharegpt", "--seconds=-5"], "seconds: expected a time above 0, finite, found -5.0"),
        (["sharegpt", "--seconds", "1e300"], "rate x seconds: expected at most 100,000,000 requests, found 1e+300"),
        (["sharegpt", "--cost-argument", "foo=1"], "cost: expected arguments of fitted: base, per_seq"),
        (["sharegpt", "--cost", "profile"], "--profile: expected a file of measured steps"),
        (["sharegpt", "--cost", "profile", "--profile", "nofile.csv"], "--profile: expected a file of measured steps"),
        (["sharegpt", "--profile", "f.csv"], "--profile: expected only with --cost profile"),
        (["sharegpt", "--cost", "profile", "--cost-argument", "base=1"], "--cost-argument: expected only without"),
        (["sharegpt", "--only", "fig2"], "--only: expected only with paper"),
        (["sharegpt", "--recorded-arrivals", "--rates", "3"], "--rates: expected only without --recorded-arrivals"),
        (["sharegpt", "--recorded-arrivals", "--plot", "f.svg"], "--plot: expected only without --recorded-arrivals"),
        (["sharegpt", "--systems", "vllm", "--policy", "lpm"], "--policy: expected only with --systems pagedkv"),
        (["paper", "--rates", "3"], "--rates: expected only with a workload"),
        (["paper", "--seed", "3"], "--seed: expected only with a workload"),
        (
            ["sharegpt", "--block-size", "100000"],
            "block_size: expected 1 to 15728, the slots of the pool, found 100000",
        ),
        (["sharegpt", "--cost-argument", "base"], "--cost-argument: expected NAME=NUMBER, found base"),
        (["paper", "--only", "fig3"], "--only: expected fig2, fig13"),
        (["paper", "--traces", "nowhere"], "--traces: expected a folder with sharegpt_lengths.csv"),
    ],
)
def test_simulate_names_the_argument_that_it_refuses(capsys, arguments, message):
    assert simulate(*arguments) == 2
    assert message in capsys.readouterr().err
