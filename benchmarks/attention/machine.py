"""What the machine is and allows: `rust/pagedkv-cpu/benches/machine/` measures, this module asks and reads."""

import os
import re
import subprocess
from pathlib import Path

from attention.turns import Turn
from program import ROOT, Program

CARGO_BENCH = ["cargo", "bench", "--quiet", "--package", "pagedkv-cpu", "--bench", "machine"]
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch asks for huge pages where it is 1
HUGE_PAGE_BYTES = 1 << 21


class Machine:
    """The program that measures limits, with a large buffer of its own.

    Attributes
    ----------
    isa : str
        The instruction set that the kernels use, and the limits are measured with.
    """

    def __init__(self) -> None:
        subprocess.run([*CARGO_BENCH, "--no-run"], cwd=ROOT, check=True)
        self._program = Program([*CARGO_BENCH, "--", *(["--huge-pages"] if huge_pages_asked() else [])])
        facts = self._program.read("start")
        self.isa: str = facts["isa"]
        self._has_dot: bool = facts["has_dot"]
        self._facts = {"cpu": cpu_name(), "isa": self.isa, "read_bytes": facts["bytes"]}
        self._facts["read_streams"] = facts["read_streams"]
        self._facts["read_page_bytes"] = page_bytes(facts["address"], facts["pid"])

    def facts(self) -> dict[str, object]:
        """Return what it is, for every line."""
        return self._facts

    def turns(self, *limits: str) -> list[Turn]:
        """Return the turns of limits such as "read_2", by what and threads, and of the peaks; samples per second."""
        asked = [*limits, "fma_1", "fma_2", *(["dot_2"] if self._has_dot else [])]
        return [self._turn(name) for name in dict.fromkeys(asked)]

    def _turn(self, name: str) -> Turn:
        what, threads = name.split("_")
        return Turn(name, lambda count: self._program.ask(f"{what} {threads} {count}")["samples"])

    def close(self) -> None:
        self._program.close()


def huge_pages_asked() -> bool:
    return os.environ.get(HUGE_PAGES) == "1"


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def page_bytes(address: int, pid: int | str = "self") -> int:
    """Return the size of most pages of the memory around an address."""
    return page_bytes_in(Path(f"/proc/{pid}/smaps").read_text(), address, os.sysconf("SC_PAGE_SIZE"))


def page_bytes_in(smaps: str, address: int, small: int) -> int:
    """Read a process's `smaps`: the mapping with the address has either mostly huge pages, or small ones."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            kib = {name: int(n) for name, n in re.findall(r"^(Rss|AnonHugePages):\s*(\d+) kB$", mapping, re.MULTILINE)}
            return HUGE_PAGE_BYTES if 2 * kib["AnonHugePages"] > kib["Rss"] else small
    raise ValueError(f"address: expected one of the process, found {address:#x}")


def available_bytes() -> int:
    """Return the memory that can be used without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10
