"""The documents tell the truth: snippets run and print what they say, docstring examples hold, examples run."""

import contextlib
import doctest
import importlib
import io
import itertools
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import pagedkv

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    path for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))] if "```python" in path.read_text()
]
FENCE = re.compile(r"^```(\w*) *(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    """A fenced block of Python, and the text that stands below it as its output."""

    line: int
    code: str
    mark: str
    output: str | None


def snippets(text):
    """Return the Python snippets of a document, in order.

    A block "```python sketch" shows a shape and is only parsed; "```python slow" loads a model and runs with the slow
    tests. A block "```text" right below a snippet is its output.
    """
    fences = list(FENCE.finditer(text))
    found = []
    for fence, below in itertools.zip_longest(fences, fences[1:]):
        language, mark, code = fence.groups()
        if language != "python":
            continue
        follows = below is not None and below[1] == "text" and not text[fence.end() : below.start()].strip()
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Snippet(line, code, mark, below[3] if follows else None))
    return found


def run(document, marks):
    """Run the snippets of a document that carry one of the marks, in order and in one namespace."""
    names = {"__name__": "snippet"}
    for snippet in snippets(document.read_text()):
        assert snippet.mark in {"", "sketch", "slow"}
        padding = "\n" * (snippet.line - 1)  # so that a traceback names the document's own line
        code = compile(padding + snippet.code, str(document), "exec")
        if snippet.mark not in marks:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if snippet.output is not None:
            assert printed.getvalue().rstrip() == snippet.output.rstrip()


def name(document):
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_snippets_run_and_print_what_the_document_says(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(document, {""})


@pytest.mark.slow
@pytest.mark.parametrize("document", [path for path in DOCUMENTS if "```python slow" in path.read_text()], ids=name)
def test_slow_snippets_run_and_print_what_the_document_says(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(document, {"", "slow"})


def test_snippet_reader_takes_code_mark_and_output_apart():
    text = "a\n```python\nx = 1\n```\n\n```text\n1\n```\n```sh\nls\n```\n```python sketch\ny\n```\nb\n```text\nz\n```\n"
    assert snippets(text) == [Snippet(3, "x = 1\n", "", "1\n"), Snippet(13, "y\n", "sketch", None)]


def modules():
    """Return the names of all modules of the package, the binding included."""
    return ["pagedkv", *(module.name for module in pkgutil.walk_packages(pagedkv.__path__, "pagedkv."))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_hold(name):
    module = importlib.import_module(name)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for case in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(case, out=report.write)
    assert runner.failures == 0, report.getvalue()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_example_runs_to_its_end(example, tmp_path):
    """An example checks what it teaches by itself."""
    run = subprocess.run([sys.executable, "-W", "error", example], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout


FAULTS = (ROOT / "docs" / "faults.md").read_text()
FAULT_TESTS = sorted(set(re.findall(r"`([\w/.-]+\.(?:rs|py))::(\w+)`", FAULTS)))


def test_every_test_that_the_list_of_faults_names_exists():
    def exists(file, test):
        path = ROOT / file if "/" in file else ROOT / "rust/pagedkv-core/tests/faults" / file
        return re.search(rf"(fn|def) {test}\(", path.read_text())

    assert [named for named in FAULT_TESTS if not exists(*named)] == []


def test_list_of_faults_is_whole_and_every_line_says_what_stands_against_it():
    lines = re.findall(r"^(\d+)\. (.*)$", FAULTS, re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, 67))
    without = [number for number, line in lines if not re.search(r"`[\w/.-]+::\w+`", line)]
    assert without == ["62"]


def test_every_test_named_after_a_fault_is_in_the_list_of_faults():
    sources = [*ROOT.glob("rust/pagedkv-core/**/*.rs"), *ROOT.glob("tests/**/test_*.py")]
    named = {name for path in sources for name in re.findall(r"(?:fn|def) ((?:test_)?fault_\d\w+)\(", path.read_text())}
    assert named == {test for _, test in FAULT_TESTS if "fault_" in test}
