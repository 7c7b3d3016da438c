"""The command line: `pagedkv COMMAND ...`.

Arguments are read with argparse: it is there wherever Python is, so that the command can always answer, also to say
which extra is missing. A command is a module with `configure(parser)` and `run(arguments)`, loaded when asked for.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pagedkv.exceptions import PagedKVError


@dataclass(frozen=True)
class Command:
    """A command, the module that has it, and what must be installed for it."""

    name: str
    summary: str
    module: str
    extra: str


COMMANDS = [
    Command("generate", "continue prompts", "pagedkv.cli.generate", "hf"),
    Command("serve", "serve a model over HTTP, as OpenAI does", "pagedkv.cli.serve", "server"),
    Command("top", "watch a server: its blocks, requests and rates", "pagedkv.cli.top", "viz"),
    Command("simulate", "serving on this scheduler, beside older systems", "pagedkv.simulate.command", "viz"),
    Command("plan", "what fits into a device's memory", "pagedkv.planning.command", "bench"),
    Command("warmup", "compile the CUDA kernels ahead", "pagedkv.kernels.warmup", "cuda13"),
    Command("doctor", "say what is installed and whether it works", "pagedkv.cli.doctor", "hf"),
]
BENCH = [Command("scheduler", "steps, requests and hits of the scheduler", "pagedkv.bench.scheduler", "bench")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="pagedkv", description="Paged KV cache for LLM inference.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"pagedkv {version('pagedkv')}")
    groups = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    bench = groups.add_parser("bench", help="measure", description="Measure.", allow_abbrev=False)
    benches = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for command in COMMANDS:
        if not _add(groups, command, is_asked_for=words[:1] == [command.name]):
            return 2
    for command in BENCH:
        if not _add(benches, command, is_asked_for=words[:2] == ["bench", command.name]):
            return 2
    arguments = parser.parse_args(words)
    try:
        _check_output(getattr(arguments, "json", None))
        return int(arguments.run(arguments) or 0)
    except ModuleNotFoundError as error:
        return _say_missing(error, arguments.extra)
    except (PagedKVError, ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"pagedkv: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _add(
    groups: "argparse._SubParsersAction[argparse.ArgumentParser]", command: Command, *, is_asked_for: bool
) -> bool:
    """Add a command; load it if it is asked for. Return whether it can run."""
    child = groups.add_parser(
        command.name,
        help=command.summary,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if not is_asked_for:
        return True
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        _say_missing(error, command.extra)
        return False
    module.configure(child)
    child.set_defaults(run=module.run, extra=command.extra)
    return True


def _check_output(path: object) -> None:
    """Refuse a file that can't be written before the work whose figures go there."""
    if not isinstance(path, Path):
        return
    if path.is_dir():
        raise ValueError(f"--json: expected a file, found the folder {path}")
    if any(parent.exists() and not parent.is_dir() for parent in path.parents):
        raise ValueError(f"--json: expected a file in a folder, found {path}")


def _say_missing(error: ModuleNotFoundError, extra: str) -> int:
    if error.name is None or error.name.partition(".")[0] == "pagedkv":
        raise error
    message = f'{error.name} is not installed, which this command needs: pip install "pagedkv[{extra}]"'
    sys.stderr.write(f"pagedkv: {message}\n")
    return 2
