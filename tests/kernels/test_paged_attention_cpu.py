"""What only attention on the CPU has, or checks by itself: arrays of other libraries, threads, arguments."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from batches import assert_matches_oracle

from pagedkv.attention import paged_attention
from pagedkv.kv_cache import from_dlpack

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def name(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("q_dtype", DTYPES, ids=name)
def test_paged_attention_matches_oracle_when_queries_and_cache_differ_in_type(make_batch, q_dtype, dtype):
    assert_matches_oracle(paged_attention, make_batch([(33, 1), (20, 20)], dtype=dtype, q_dtype=q_dtype))


def test_paged_attention_clears_tokens_when_they_belong_to_no_sequence(make_batch):
    batch = make_batch([(5, 5), (9, 1)])
    batch.query_start_loc[-1] -= 1
    out = torch.full_like(batch.q, torch.nan)
    _, lse = paged_attention(*batch.arrays(), out=out, return_lse=True)
    assert out[5].count_nonzero() == 0
    assert lse[5].eq(-torch.inf).all()


@pytest.mark.parametrize("num_threads", [2, 3, 4], indirect=True)
def test_paged_attention_is_bit_identical_when_threads_are_added(make_batch, num_threads, monkeypatch):
    batch = make_batch([(1500, 1), (700, 9), (90, 90), (1, 1)], head_dim=32, dtype=torch.bfloat16)
    out, lse = paged_attention(*batch.arrays(), return_lse=True)
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
    alone, alone_lse = paged_attention(*batch.arrays(), return_lse=True)
    assert torch.equal(out, alone)
    assert torch.equal(lse, alone_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_paged_attention_rounds_to_the_type_of_out_when_it_is_another(make_batch, dtype):
    batch = make_batch([(33, 1), (20, 20)])
    out = torch.full((21, 4, 64), torch.nan, dtype=dtype)
    paged_attention(*batch.arrays(), out=out)
    torch.testing.assert_close(out, paged_attention(*batch.arrays()).to(dtype), rtol=0, atol=0)


def test_paged_attention_returns_numpy_when_queries_are_numpy(make_batch):
    batch = make_batch([(33, 1), (20, 20)])
    out, lse = paged_attention(*(array.numpy() for array in batch.arrays()), return_lse=True)
    assert (type(out), out.dtype, type(lse), lse.dtype) == (np.ndarray, np.float32, np.ndarray, np.float32)
    np.testing.assert_array_equal(out, paged_attention(*batch.arrays()).numpy())


def test_paged_attention_reads_bfloat16_when_numpy_holds_its_bits(make_batch):
    batch = make_batch([(33, 1), (20, 20)], dtype=torch.bfloat16)
    floats = [from_dlpack(array.view(torch.uint16).numpy(), "bfloat16") for array in batch.arrays()[:3]]
    out = np.empty((21, 4, 64), np.float32)
    paged_attention(*floats, *(array.numpy() for array in batch.arrays()[3:]), out=out)
    assert torch.equal(torch.from_numpy(out).bfloat16(), paged_attention(*batch.arrays()))


def test_paged_attention_reads_the_right_block_when_offsets_pass_32_bits():
    # Pages that are never touched cost nothing: 5 blocks, 2^31 + 16 elements apart.
    program = """
import mmap, numpy as np
from pagedkv.attention import paged_attention
stride = 2**31 + 16
MAP_NORESERVE = 0x4000
memory = mmap.mmap(-1, 2 * (5 * stride), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
flat = np.frombuffer(memory, np.float16)
cache = np.lib.stride_tricks.as_strided(flat, (5, 1, 16, 8), (2 * stride, 0, 16, 2))
rng = np.random.default_rng(0)
near = rng.standard_normal((5, 1, 16, 8)).astype(np.float16)
cache[...] = near
q = rng.standard_normal((3, 4, 8)).astype(np.float16)
index = [np.array(a, np.int32) for a in ([[4, 3]], [20], [0, 3])]
assert (paged_attention(q, cache, cache, *index) == paged_attention(q, near, near, *index)).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_paged_attention_works_when_the_process_has_forked():
    program = """
import os, warnings
import numpy as np
from pagedkv.attention import paged_attention
warnings.simplefilter("ignore", DeprecationWarning)
cache = np.ones((80, 4, 16, 64), np.float32)
index = [np.array(a, np.int32) for a in ([range(80)], [1280], [0, 16])]
run = lambda: paged_attention(np.ones((16, 8, 64), np.float32), cache, cache, *index)
run()
pid = os.fork()
if pid == 0:
    os._exit(0 if (run() == 1).all() else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    environment = os.environ | {"PAGEDKV_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)


REFUSED = [
    ("k_scale", lambda _: torch.ones(1), ValueError, r"k_scale: expected none beside a cache that is not FP8, found a"),
    ("alibi_slopes", lambda _: torch.ones(3), ValueError, r"alibi_slopes: expected shape \(num_q_heads=4,\), found"),
    ("q", lambda a: a.double(), TypeError, r"q: expected dtype float32, .*, found float64"),
    ("q", lambda a: a[0], ValueError, r"q: expected shape \(num_tokens, num_q_heads, head_dim\), found \(4, 64\)"),
    ("q", lambda a: a.mT.contiguous().mT, ValueError, r"q: expected stride 1 in the last dimension, found strides"),
    ("q", lambda a: a[:, :3].contiguous(), ValueError, r"num_q_heads: expected a multiple of num_kv_heads=2, found 3"),
    ("q", lambda a: a.tolist(), TypeError, r"out: expected an array to write to, as none is made like a list"),
    ("k_cache", lambda a: a.tolist(), TypeError, r"k_cache: expected an array that speaks DLPack, found list"),
    ("k_cache", lambda a: a[..., :32], ValueError, r"k_cache: expected shape \(.*, head_dim=64\), found \(.*, 32\)"),
    ("k_cache", lambda a: a.double(), TypeError, r"k_cache: expected dtype .*, found float64"),
    ("v_cache", lambda a: a[1:], ValueError, r"v_cache: expected shape \(num_blocks=\d+, .*\), found"),
    ("v_cache", lambda a: a.int(), TypeError, r"v_cache: expected dtype .*, found int32"),
    ("block_table", lambda a: a.long(), TypeError, r"block_table: expected dtype int32, found int64"),
    ("block_table", lambda a: a[:, :1], ValueError, r"seq_lens\[0\]: expected at most 16 \(1 blocks of 16\), found 33"),
    ("block_table", lambda a: a * 0 + 99, ValueError, r"block_table\[\d, 0\]: expected a block below \d+, found 99"),
    ("block_table", lambda a: a * 0 - 1, ValueError, r"block_table\[\d, 0\]: expected a block below \d+, found -1"),
    ("seq_lens", lambda a: a.long(), TypeError, r"seq_lens: expected dtype int32, found int64"),
    ("seq_lens", lambda a: -a, ValueError, r"seq_lens\[0\]: expected a length, found -33"),
    (
        "query_start_loc",
        lambda a: a[1:],
        ValueError,
        r"query_start_loc: expected shape \(num_seqs \+ 1=3,\), found \(2,\)",
    ),
    ("query_start_loc", lambda a: a + 1, ValueError, r"query_start_loc\[0\]: expected 0, found 1"),
    ("query_start_loc", lambda a: a * 2, ValueError, r"query_start_loc\[2\]: expected at most num_tokens=21, found 42"),
    (
        "query_start_loc",
        lambda a: a * a.new_tensor([0, 21, 0]),
        ValueError,
        r"query_start_loc\[2\]: expected at least 21",
    ),
    ("rows", lambda a: a + 9, ValueError, r"rows\[0\]: expected a row below 4, found"),
    ("rows", lambda a: a[:1], ValueError, r"rows: expected shape \(num_seqs=2,\), found \(1,\)"),
    ("soft_cap", lambda _: 0.0, ValueError, r"soft_cap: expected a finite number above 0, found 0"),
    ("softmax_scale", lambda _: float("nan"), ValueError, r"softmax_scale: expected a finite number, found NaN"),
    ("sinks", lambda _: torch.zeros(3), ValueError, r"sinks: expected shape \(num_q_heads=4,\), found \(3,\)"),
    ("sinks", lambda _: torch.zeros(4).double(), TypeError, r"sinks: expected dtype float32, .*, found float64"),
    ("sinks", lambda _: 1.0, TypeError, r"sinks: expected an array that speaks DLPack, found float"),
    ("sliding_window", lambda _: 0, ValueError, r"sliding_window: expected at least 1"),
    ("out", lambda _: torch.empty(21, 4, 1).expand(21, 4, 64), ValueError, r"out: expected stride 1"),
    ("out", lambda _: torch.empty(1, 4, 64).expand(21, 4, 64), ValueError, r"out: expected an output whose elements"),
    ("out", lambda _: torch.empty(20, 4, 64), ValueError, r"out: expected shape \(num_tokens=21, .*\), found \(20, 4"),
]


@pytest.mark.parametrize(("argument", "change", "error", "message"), REFUSED)
def test_paged_attention_names_the_argument_when_it_is_refused(make_batch, argument, change, error, message):
    batch = make_batch([(33, 1), (20, 20)])
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc", "rows")
    arguments = dict(zip(names, batch.arrays(), strict=True))
    arguments[argument] = change(arguments.get(argument))
    with pytest.raises(error, match=message):
        paged_attention(**arguments)


def test_paged_attention_refuses_an_output_when_it_overlaps_the_queries(make_batch):
    batch = make_batch([(33, 1), (20, 20)])
    with pytest.raises(ValueError, match="out: expected memory of its own, found an overlap with q"):
        paged_attention(*batch.arrays(), out=batch.q)


def test_paged_attention_refuses_an_output_when_it_is_read_only(make_batch):
    batch = make_batch([(33, 1), (20, 20)])
    out = np.empty((21, 4, 64), np.float32)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="out: expected writable memory, found a read-only array"):
        paged_attention(*batch.arrays(), out=out)


def test_paged_attention_refuses_a_head_dim_when_it_is_no_multiple_of_eight(make_batch):
    with pytest.raises(ValueError, match="head_dim: expected a multiple of 8 up to 512, found 12"):
        paged_attention(*make_batch([(3, 3)], head_dim=12).arrays())


def test_paged_attention_refuses_a_tensor_when_it_requires_grad(make_batch):
    batch = make_batch([(3, 3)])
    batch.q.requires_grad_()
    with pytest.raises(ValueError, match="q: expected a tensor without gradient"):
        paged_attention(*batch.arrays())


@pytest.mark.parametrize("value", ["0", "many", ""])
def test_paged_attention_names_the_variable_when_the_number_of_threads_is_none(make_batch, monkeypatch, value):
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", value)
    with pytest.raises(ValueError, match="PAGEDKV_NUM_THREADS: expected a number above 0"):
        paged_attention(*make_batch([(3, 3)]).arrays())
