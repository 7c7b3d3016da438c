"""The lines that every benchmark writes."""

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

FIELDS = {"what", "unit", "ours", "peer", "peer_name", "ratio", "limit", "limit_name", "of_limit", "peers"}


@pytest.fixture(scope="module")
def lines():
    path = Path(__file__).parents[1] / "benchmarks" / "lines.py"
    spec = importlib.util.spec_from_file_location("benchmark_lines", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_line_has_every_field_null_when_there_is_no_peer_and_no_limit(lines):
    line = lines.Report("t").add("waste", "percent", 3.5, better="lower", block_size=16)
    assert set(line) >= FIELDS
    assert [line[field] for field in ("peer", "peer_name", "ratio", "limit", "limit_name", "of_limit")] == [None] * 6
    assert (line["ours"], line["peers"], line["block_size"]) == (3.5, {}, 16)


def test_share_of_a_limit_that_was_measured_more_closely_counts(lines):
    line = lines.Report("t").add("x", "u", 10, better="higher", limit=40, limit_name="l", of_limit=0.3)
    assert (line["limit"], line["of_limit"]) == (40, 0.3)


@pytest.mark.parametrize(("better", "ratio", "of_limit"), [("higher", 0.5, 0.25), ("lower", 2.0, 4.0)])
def test_ratio_is_above_one_when_ours_is_better(lines, better, ratio, of_limit):
    line = lines.Report("t").add(
        "x", "u", 10, better=better, peer=20, peer_name="p", limit=40, limit_name="l", peers={"q": [1, 2, 9]}
    )
    assert (line["ratio"], line["of_limit"], line["peers"]) == (ratio, of_limit, {"q": 2.0})


def test_share_of_a_tolerance_is_the_distance_from_the_peer(lines):
    line = lines.Report("t").add(
        "x", "%", 98, better="higher", peer=96, peer_name="p", limit=2.5, limit_name="t", limit_is_tolerance=True
    )
    assert (line["limit"], line["of_limit"]) == (2.5, pytest.approx(0.8))


def test_tolerance_without_a_peer_is_refused(lines):
    with pytest.raises(ValueError, match="a tolerance needs a limit and a peer"):
        lines.Report("t").add("x", "%", 98, better="higher", limit=2.5, limit_name="t", limit_is_tolerance=True)


def test_median_and_spread_when_samples_are_given(lines):
    line = lines.Report("t").add("x", "us", [1.0, 2.0, 3.0, 4.0, 100.0], better="lower", peer=[6, 6, 7], peer_name="p")
    assert (line["ours"], line["samples"], line["spread"]) == (3.0, 5, pytest.approx(2 / 3))
    assert line["ratio"] == 2.0


def test_add_raises_when_a_peer_or_limit_has_no_name_or_a_size_takes_a_field(lines):
    report = lines.Report("t")
    with pytest.raises(ValueError, match="peer needs both"):
        report.add("x", "u", 1, better="lower", peer=2)
    with pytest.raises(ValueError, match="limit needs both"):
        report.add("x", "u", 1, better="lower", limit_name="peak")
    with pytest.raises(ValueError, match="spread"):
        report.add("x", "u", 1, better="lower", spread=2)
    assert report.lines == []


def test_file_holds_one_json_object_per_line_when_a_path_is_given(lines, tmp_path):
    path = tmp_path / "out" / "lines.json"
    report = lines.Report("t", path)
    report.add("a", "s", 1, better="lower")
    report.add("b", "s", 0, better="lower", peer=1, peer_name="p")
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == report.lines
    assert written[1]["ratio"] is None


def test_table_names_peer_and_limit_when_shown(lines):
    report = lines.Report("Copies")
    report.add("copy", "GB/s", 10, better="higher", peer=5, peer_name="torch", limit=20, limit_name="read")
    console = Console(file=io.StringIO(), width=160)
    report.show(console)
    shown = console.file.getvalue()
    assert "10" in shown
    assert "5 (torch)" in shown
    assert "2.00" in shown
    assert "20 (read)" in shown
    assert "50%" in shown
