"""Attention in torch's threads where it uses as many, and in threads of our own where it does not: the same bits."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pagedkv import paged_attention  # noqa: E402

NUM_SEQS, LENGTH, BLOCK_SIZE, BLOCKS = 32, 270, 16, 17


@pytest.fixture
def num_torch_threads(monkeypatch):
    """Return a function that sets the threads of torch, and put them back; ours are two."""
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "2")
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attention():
    """Return a function that attends over work that is worth more than one thread."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    num_blocks = NUM_SEQS * BLOCKS + 1
    q = normal(NUM_SEQS, 9, 64)
    k, v = normal(num_blocks, 3, BLOCK_SIZE, 64), normal(num_blocks, 3, BLOCK_SIZE, 64)
    table = torch.arange(1, num_blocks, dtype=torch.int32).view(NUM_SEQS, BLOCKS)
    lens = torch.full((NUM_SEQS,), LENGTH, dtype=torch.int32)
    starts = torch.arange(NUM_SEQS + 1, dtype=torch.int32)
    return lambda: paged_attention(q, k, v, table, lens, starts)


@pytest.fixture
def attend():
    return attention()


def test_attention_gives_the_same_bits_in_torchs_threads_and_in_its_own(attend, num_torch_threads):
    found = []
    for count in (2, 1, 3, 2):
        num_torch_threads(count)
        found.append(attend())
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_attention_runs_in_several_python_threads_at_once(attend, num_torch_threads):
    num_torch_threads(2)
    expected, are_right = attend(), []

    def run():
        torch.set_num_threads(2)
        are_right.append(all(torch.equal(attend(), expected) for _ in range(5)))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert are_right == [True] * 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_attention_ends_in_a_child_forked_after_torchs_threads_were_used(attend, num_torch_threads):
    num_torch_threads(2)
    expected = attend()
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(attend(), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_attention_ends_in_a_child_forked_after_torch_alone_used_its_threads():
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
import {Path(__file__).stem} as here
torch.set_num_threads(2)
attend = here.attention()
torch.rand(4_000_000).exp()
child = os.fork()
if child == 0:
    attend()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = os.environ | {"PAGEDKV_NUM_THREADS": "2"}
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 0
