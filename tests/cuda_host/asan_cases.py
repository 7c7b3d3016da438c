"""Kernels under AddressSanitizer, for a process that was started with its library: `python asan_cases.py NAME`."""

import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels")]

import torch  # noqa: E402
from backends import CudaOnHost  # noqa: E402
from batches import assert_matches_oracle, make_batch  # noqa: E402
from host_device import Memory, build_kernel, launch  # noqa: E402
from test_checks import CASES, PROBES, SHARED_BYTES, THREADS  # noqa: E402

SEQUENCES = [(0, 1), (1, 1), (2, 1), (3, 1), (5, 1), (17, 1), (90, 1), (40, 7)]


def attend(kernel, dtype, head_dim, **options):
    """Compare a kernel with the oracle."""
    q_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    batch = make_batch(SEQUENCES, dtype=dtype, q_dtype=q_dtype, head_dim=head_dim)
    assert_matches_oracle(CudaOnHost(kernel, piece=48, asan=True).paged_attention, batch, **options)


def every_feature(kernel):
    options = {"sliding_window": 20, "soft_cap": 3.0, "sinks": torch.ones(4), "alibi_slopes": torch.full((4,), 0.5)}
    attend(kernel, torch.bfloat16, 80, **options)
    attend(kernel, torch.float8_e4m3fn, 64)


def cache_operations():
    """Append FP8 and move it."""
    cuda = CudaOnHost(asan=True)
    pool = torch.zeros(4, 3, 2, 2, 5, 24).to(torch.float8_e4m3fn)
    k, v = torch.randn(2, 3, 2, 24).bfloat16()
    cuda.append_kv(k, v, pool[:, 1, 0], pool[:, 1, 1], torch.tensor([7, -1, 19]), k_scale=torch.ones(1))
    cuda.copy_blocks(pool, torch.tensor([(1, 2)], dtype=torch.int32))
    cuda.move_kv(pool, torch.tensor([(0, 19, 3)]))
    table, lens = torch.tensor([[3, 2]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    cuda.gather_kv(pool[:, 1, 0], pool[:, 1, 1], table, lens, out=torch.empty(2, 8, 2, 24))


def probe(case):
    """Run a case of the probe."""
    memory = Memory()
    out = memory.place("out", torch.zeros(THREADS), writable=True)
    values = memory.place("in", torch.zeros(THREADS))
    params = struct.pack("QQi4x", out.data_ptr(), values.data_ptr(), CASES.index(case))
    launch(build_kernel("probe", sources=PROBES, asan=True), params, (1,), THREADS, SHARED_BYTES, memory.regions)


def clean():
    """Run what is right: one process, because torch alone takes most of the time."""
    probe("kTwoStages")
    cache_operations()
    every_feature("paged_decode")
    every_feature("paged_prefill")


RUNS = {"clean": clean, "beyond_array": lambda: probe("kBeyondLocalPointer")}

if __name__ == "__main__":
    RUNS[sys.argv[1]]()
