"""The rooms of the house: which may use which, as docs/architecture.md section 3 says."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "pagedkv"

# Rooms of the package that a room may import, beside itself, and other people's packages that it may import.
BASE = {"config", "exceptions"}
FACES = BASE | {"pool", "scheduling"}
MEMORY = FACES | {"kv_cache", "attention"}
ROOMS = {
    "config": ({"_core", "exceptions"}, {"numpy"}),
    "exceptions": ({"_core"}, set()),
    "pool": (BASE | {"_core"}, {"numpy"}),
    "scheduling": (BASE | {"_core"}, {"numpy"}),
    "kernels": (BASE, {"numpy", "torch", "cupy", "cuda"}),
    "reference": (set(), {"numpy"}),
    "kv_cache": (BASE | {"_core", "kernels"}, {"numpy", "torch", "cupy"}),
    "attention": (BASE | {"_core", "kernels", "kv_cache"}, {"numpy", "torch", "cupy"}),
    "planning": (BASE, {"numpy", "rich"}),
    "models": (BASE | {"attention", "kv_cache", "planning"}, {"numpy", "torch", "transformers", "gguf", "safetensors"}),
    "engine": (MEMORY | {"models", "planning", "simulate"}, {"numpy", "torch", "transformers", "tqdm", "rich"}),
    "simulate": (BASE | {"_core", "planning"}, {"numpy", "rich", "matplotlib"}),
    "server": (BASE | {"engine"}, None),
    "bench": (MEMORY | {"models", "engine", "simulate"}, None),
    "cli": (None, None),
    "__init__": (None, {"numpy"}),
    "__main__": ({"cli"}, set()),
}

CRATES = {
    "pagedkv-core": set(),
    "pagedkv-cpu": {"pagedkv-core"},
    "pagedkv-sim": {"pagedkv-core"},
    "pagedkv-py": {"pagedkv-core", "pagedkv-cpu", "pagedkv-sim"},
}
PYTHON_CRATES = {"pyo3", "numpy"}  # only the binding crate knows that Python exists


def room_of(path):
    """Return the room that a file of the package belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".pyi").removesuffix(".py")


def imports(source, package):
    """Return the dotted names that a source file imports anywhere, functions included.

    `from pagedkv import pool` counts as an import of `pagedkv.pool`; relative imports are resolved in `package`.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "pagedkv" else {module}
    return names


def forbidden(room, names):
    """Return those of the imported names that the room may not use."""
    rooms, others = ROOMS[room]
    found = set()
    for name in names:
        top, *rest = name.split(".")
        if top == "pagedkv":
            # `import pagedkv`, or a public name taken from it, is the whole package: only the command line may.
            target = rest[0] if rest and (rest[0] in ROOMS or rest[0] == "_core") else "__init__"
            allowed = rooms is None or target == room or target in rooms
        else:
            allowed = others is None or top in others or top in sys.stdlib_module_names
        if not allowed:
            found.add(name)
    return found


SOURCES = sorted(path for path in PACKAGE.rglob("*.py*") if path.suffix in {".py", ".pyi"} and path.stem != "_core")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_python_file_uses_only_rooms_below_its_own(path):
    room = room_of(path)
    assert room in ROOMS, f"{room} is no room of docs/architecture.md"
    package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    assert forbidden(room, imports(path.read_text(), package)) == set()


@pytest.mark.parametrize(
    ("room", "source", "found"),
    [
        ("kernels", "from pagedkv import pool", {"pagedkv.pool"}),
        ("kernels", "def f():\n    import pagedkv.scheduling", {"pagedkv.scheduling"}),
        ("kernels", "from pagedkv._core import Scheduler", {"pagedkv._core"}),
        ("kernels", "from pagedkv.kernels.compile import compile_kernel\nimport ctypes, numpy", set()),
        ("kernels", "from .. import pool", {"pagedkv.pool"}),
        ("kernels", "from ..pool import BlockPool", {"pagedkv.pool"}),
        ("kernels", "from . import compile", set()),
        ("reference", "import pagedkv.config", {"pagedkv.config"}),
        ("scheduling", "import torch", {"torch"}),
        ("engine", "from pagedkv import LLM", {"pagedkv.LLM"}),
        ("engine", "from pagedkv._core import Scheduler", {"pagedkv._core"}),
        ("server", "from pagedkv.scheduling import Scheduler", {"pagedkv.scheduling"}),
        ("bench", "from pagedkv.scheduling import Scheduler", set()),
        ("bench", "from pagedkv._core import Scheduler", {"pagedkv._core"}),
    ],
)
def test_import_reader_finds_the_arrow_when_it_is_forbidden(room, source, found):
    assert forbidden(room, imports(source, f"pagedkv.{room}")) == found


@pytest.mark.parametrize("crate", sorted(path.parent.name for path in (ROOT / "rust").glob("*/Cargo.toml")))
def test_crate_depends_only_on_crates_below_its_own(crate):
    manifest = tomllib.loads((ROOT / "rust" / crate / "Cargo.toml").read_text())
    tables = [manifest, *manifest.get("target", {}).values()]
    kinds = ("dependencies", "dev-dependencies", "build-dependencies")
    used = {name for table in tables for kind in kinds for name in table.get(kind, {})}
    assert {name for name in used if name.startswith("pagedkv-")} <= CRATES[crate]
    if crate != "pagedkv-py":
        assert used & PYTHON_CRATES == set()


def test_core_crate_is_pure():
    sources = ROOT / "rust" / "pagedkv-core" / "src"
    assert "#![forbid(unsafe_code)]" in (sources / "lib.rs").read_text()
    impure = re.compile(r"\bstd::(time|env|fs|io|net|process|thread)\b|\bSystemTime\b|\bInstant\b|\brand::")
    found = [
        f"{path.relative_to(sources)}: {line.strip()}"
        for path in sorted(sources.rglob("*.rs"))
        for line in path.read_text().splitlines()
        if impure.search(line) and not line.lstrip().startswith("//")
    ]
    assert found == []


@pytest.mark.parametrize("path", sorted((ROOT / "cuda").rglob("*.cu*")), ids=lambda path: path.name)
def test_cuda_file_includes_only_own_headers(path):
    headers = {header.name for header in (ROOT / "cuda" / "include").iterdir()}
    included = re.findall(r'^\s*#\s*include\s*([<"])([^>"]*)', path.read_text(), re.MULTILINE)
    assert [name for quote, name in included if quote == "<" or name not in headers] == []


@pytest.mark.parametrize("path", sorted((ROOT / "cuda").glob("*.cu")), ids=lambda path: path.name)
def test_kernel_has_one_text_for_gpu_and_host(path):
    assert re.findall(r"^\s*#\s*(?:if|el|asm).*|\basm\b.*", path.read_text(), re.MULTILINE) == []


def test_import_pagedkv_loads_no_array_library_but_numpy():
    program = "import sys, pagedkv; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert loaded & {"torch", "cupy", "transformers", "jax", "rich", "matplotlib"} == set()


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_only_files_that_exist(document):
    """A document names a file in backticks or links to it; `benchmarks/bench_NAME.py` is a pattern and no file."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"`([\w./-]+/[\w./-]*\.(?:rs|py|pyi|md|toml|txt|cu|cuh|csv))`", text)
    linked = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    missing = [path for path in quoted if not (ROOT / path).exists() and "NAME" not in path]
    missing += [target for target in linked if not (document.parent / target).exists()]
    assert missing == []
