"""`pagedkv top`: a server's blocks, requests and rates in a terminal."""

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from string import ascii_uppercase
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

# Letters of `/debug/state`, and how they look.
_LOOKS = {
    "f": ("·", "dim", "free"),
    "h": ("█", "green", "held"),
    "s": ("█", "cyan", "shared"),
    "e": ("▒", "yellow", "cached"),
    "w": ("▒", "red", "fenced"),
}
_MAX_CELLS = 2400
# Requests of the table; each has a letter, which its blocks have in the map.
_MAX_REQUESTS = 12


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = "Watch a server: the map of its blocks, its requests, queue and rates. Ctrl-C ends it."
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    parser.add_argument("--api-key", help="a key, if the server asks for one")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between looks (0.5)")
    parser.add_argument("--once", action="store_true", help="look once and end")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.interval <= 0:
        raise ValueError(f"--interval: expected a number above 0, found {arguments.interval}")
    rates = Rates()
    console = Console()
    state = fetch(arguments.url, arguments.api_key)
    rates.add(state, time.monotonic())
    if arguments.once:
        console.print(render(state, rates, console.width))
        return 0
    with Live(render(state, rates, console.width), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(arguments.interval)
            state = fetch(arguments.url, arguments.api_key)
            rates.add(state, time.monotonic())
            live.update(render(state, rates, console.width), refresh=True)


def fetch(url: str, api_key: str | None, open_url: Callable[..., Any] = urllib.request.urlopen) -> dict[str, Any]:
    """Return the state of a server, or say why there is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--url: expected http://HOST:PORT, found {url!r}")
    request = urllib.request.Request(url.rstrip("/") + "/debug/state")
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with open_url(request, timeout=5) as answer:
            state: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            found = "none" if api_key is None else "one that it does not"
            raise ValueError(f"--api-key: expected one that {url} takes, found {found}") from error
        raise ValueError(f"--url: expected the state of a server at {url}, found status {error.code}") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"--url: expected a server at {url}, found none: {reason}") from error
    except ValueError as error:
        raise ValueError(f"--url: expected the state of a server at {url}, found something else: {error}") from error
    return state


class Rates:
    """Tokens per second between two looks."""

    def __init__(self) -> None:
        self._before: tuple[dict[str, int], float] | None = None
        self.per_second: dict[str, float] = {}

    def add(self, state: dict[str, Any], now: float) -> None:
        """Take another look."""
        totals = state["totals"]
        if self._before is not None and now > self._before[1]:
            before, then = self._before
            self.per_second = {name: (totals[name] - before[name]) / (now - then) for name in totals}
        self._before = (totals, now)


def render(state: dict[str, Any], rates: Rates, width: int) -> Group:
    """Return a state as it is shown."""
    totals, per_second = state["totals"], rates.per_second
    queries = totals["prefix_cache_queries"]
    hit_rate = 100 * totals["prefix_cache_hits"] / queries if queries else 0.0
    head = Text.assemble(
        (state["model"], "bold"),
        f"  running {state['num_running']}  waiting {state['num_waiting']}  usage {100 * state['usage']:.1f} %",
        f"  prompt {per_second.get('prompt_tokens', 0):.0f} tok/s",
        f"  output {per_second.get('generation_tokens', 0):.0f} tok/s",
        f"  hits {hit_rate:.1f} %  copies {totals['copied_blocks']}  preemptions {totals['preemptions']}",
    )
    return Group(head, _legend(), _block_map(state, width), _requests(state))


def _legend() -> Text:
    marks = Text("  ").join(Text(f"{mark} {name}", style) for mark, style, name in _LOOKS.values())
    return Text.assemble(marks, ("  A, B, ... held by the request of this letter", "dim"))


def _block_map(state: dict[str, Any], width: int) -> Text:
    letters = state["blocks"][1:]  # without the null block
    counts = state["ref_counts"][1:]
    looks = ["s" if letter == "h" and count > 1 else letter for letter, count in zip(letters, counts, strict=True)]
    owners = {
        block: name
        for name, request in zip(ascii_uppercase, state["requests"][:_MAX_REQUESTS], strict=False)
        for sequence in request["sequences"]
        for block in sequence["block_table"]
    }
    # Where there are more blocks than cells, a cell shows the first of several.
    step = -(-len(looks) // _MAX_CELLS) or 1
    shown = Text()
    for at, letter in enumerate(looks[::step]):
        if at and at % max(width, 1) == 0:
            shown.append("\n")
        mark, style, _ = _LOOKS.get(letter, _LOOKS["w"])
        if letter in "hs":
            mark = owners.get(1 + at * step, mark)
        shown.append(mark, style)
    return shown


def _requests(state: dict[str, Any]) -> Table:
    table = Table("", "request", "state", "samples", "tokens", "blocks", "cached", box=None)
    for name, request in zip(ascii_uppercase, state["requests"][:_MAX_REQUESTS], strict=False):
        sequences = request["sequences"]
        distinct = {block for sequence in sequences for block in sequence["block_table"]}
        table.add_row(
            name,
            request["request_id"][-32:],
            request["state"],
            str(len(sequences)),
            str(max((sequence["num_tokens"] for sequence in sequences), default=0)),
            str(len(distinct)),
            str(request["num_cached_tokens"]),
        )
    if (more := len(state["requests"]) - _MAX_REQUESTS) > 0:
        table.add_row("", f"and {more} more")
    return table
