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


@dataclass(frozen=True)
class Command:
    """A command, the module that has it, and what must be installed for it."""

    name: str
    summary: str
    module: str
    extra: str


COMMANDS = [Command("warmup", "compile the CUDA kernels ahead", "pagedkv.kernels.warmup", "cuda13")]
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
    asked = [(groups, command, words[:1] == [command.name]) for command in COMMANDS]
    asked += [(benches, command, words[:2] == ["bench", command.name]) for command in BENCH]
    for parsers, command, is_asked in asked:
        child = parsers.add_parser(
            command.name,
            help=command.summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if is_asked:
            try:
                module = importlib.import_module(command.module)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] == "pagedkv":
                    raise
                message = (
                    f'{error.name} is not installed, which this command needs: pip install "pagedkv[{command.extra}]"'
                )
                sys.stderr.write(f"pagedkv: {message}\n")
                return 2
            module.configure(child)
            child.set_defaults(run=module.run)
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments) or 0)
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"pagedkv: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
