"""Where the memory of blocks comes from."""

import re
import sys
from pathlib import Path

import pytest
import torch

from pagedkv.kv_cache.memory import ITEM_BYTES, make_blocks


def flags_of_mapping(address):
    """Return the kernel's flags of the mapping that an address lies in."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(found[1], 16) <= address < int(found[2], 16)
        elif is_it and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:#x}")


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_large_memory_asks_for_huge_pages(backend):
    blocks = make_blocks(backend, (8, 2, 1 << 20), "float32")
    address = blocks.data_ptr() if backend == "torch" else blocks.ctypes.data
    # What the library keeps before an array may lie in the first page of its mapping.
    assert "hg" in flags_of_mapping(address + (4 << 20))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("num_blocks", [1, 4096])
def test_memory_of_every_size_has_its_shape_and_type_and_can_be_written(dtype, num_blocks):
    blocks = make_blocks("torch", (num_blocks, 2, 4, 64), dtype)
    assert (tuple(blocks.shape), blocks.dtype) == ((num_blocks, 2, 4, 64), getattr(torch, dtype))
    blocks.view(torch.uint8).fill_(3)
    assert bool((blocks.view(torch.uint8) == 3).all())
