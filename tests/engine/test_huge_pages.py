"""Memory that is asked to lie in huge pages: its content stays, and the kernel knows."""

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from pagedkv.models.huge_pages import use_huge_pages

HUGE_PAGE = 1 << 21
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address):
    """Return the kernel's flags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping of {address:#x}")


@pytest.mark.skipif(sys.platform != "linux" or not SETTING.exists(), reason="needs a kernel with huge pages")
def test_use_huge_pages_asks_for_all_pages_of_a_span_and_keeps_what_is_there():
    memory = mmap.mmap(-1, 5 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    content = torch.randint(0, 256, (len(memory),), dtype=torch.uint8).numpy().tobytes()
    memory[:] = content
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory)) // HUGE_PAGE * HUGE_PAGE + HUGE_PAGE
    use_huge_pages([(first + 5, 10), (first + HUGE_PAGE - 1, HUGE_PAGE)])
    assert memory[:] == content
    assert ["hg" in flags_of(first + number * HUGE_PAGE) for number in range(3)] == [True, True, False]


def test_use_huge_pages_passes_over_what_is_not_mapped():
    use_huge_pages([(0, 10), (5 * HUGE_PAGE, 3 * HUGE_PAGE)])
