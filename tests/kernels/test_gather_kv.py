import numpy as np
import pytest
import torch

from pagedkv import reference
from pagedkv.kv_cache import gather_kv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SEQUENCES = [(0, 0), (1, 0), (16, 0), (15, 0), (0, 0), (17, 0), (100, 0)]


def arrays(batch):
    """Return the arguments of an operation that has no queries."""
    return batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens, batch.rows


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("dtype", DTYPES + FP8, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16, 40])
def test_gather_kv_matches_oracle_when_lengths_are_ragged(operations, make_batch, dtype, layout, block_size):
    sizes = {"layout": layout, "block_size": block_size, "head_dim": 8}
    batch = make_batch(SEQUENCES, dtype=dtype, q_dtype=torch.float32, **sizes)
    k, v = operations.gather_kv(*arrays(batch))
    _, k_cache, v_cache, table, lens, _, rows = batch.oracle_arrays()
    want_k, want_v = reference.gather_kv(k_cache, v_cache, table, lens, rows)
    assert (k.dtype, v.dtype) == (dtype, dtype)
    np.testing.assert_array_equal(k.double().numpy(), want_k)
    np.testing.assert_array_equal(v.double().numpy(), want_v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_kv_converts_when_out_is_of_another_type(operations, make_batch, dtype):
    batch = make_batch(SEQUENCES, dtype=torch.float32)
    out = torch.empty(2, 149, 2, 64, dtype=dtype)
    k, v = operations.gather_kv(*arrays(batch), out=out)
    want_k, want_v = operations.gather_kv(*arrays(batch))
    assert torch.equal(k, want_k.to(dtype))
    assert torch.equal(v, want_v.to(dtype))


def test_gather_kv_writes_where_it_is_told_when_outputs_are_interleaved(operations, make_batch):
    batch = make_batch([(5, 0)], block_size=2)
    out = torch.full((5, 2, 2, 64), torch.nan)
    operations.gather_kv(*arrays(batch), out=out.unbind(1))
    assert torch.equal(out, torch.stack(operations.gather_kv(*arrays(batch)), dim=1))


def test_gather_kv_returns_numpy_when_caches_are_numpy(make_batch):
    batch = make_batch(SEQUENCES)
    k, v = gather_kv(*(array.numpy() for array in arrays(batch)))
    want_k, want_v = gather_kv(*arrays(batch))
    np.testing.assert_array_equal(k, want_k.numpy())
    np.testing.assert_array_equal(v, want_v.numpy())


def test_gather_kv_takes_row_s_when_rows_are_not_given(operations, make_batch):
    batch = make_batch(SEQUENCES)
    table = batch.block_table[batch.rows.long()]
    k, _ = operations.gather_kv(batch.k_cache, batch.v_cache, table, batch.seq_lens)
    assert torch.equal(k, operations.gather_kv(*arrays(batch))[0])


def test_gather_kv_returns_nothing_when_there_are_no_sequences(operations, make_batch):
    k, v = operations.gather_kv(*arrays(make_batch([])))
    assert k.shape == v.shape == (0, 2, 64)


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_scales", [None, 1, 2])
def test_gather_kv_makes_numbers_of_fp8(operations, make_batch, dtype, out_dtype, num_scales):
    batch = make_batch(SEQUENCES, dtype=dtype, q_dtype=torch.float32, head_dim=24)
    scales = {} if num_scales is None else {"k_scale": torch.rand(num_scales), "v_scale": torch.rand(num_scales)}
    k, v = operations.gather_kv(*arrays(batch), **scales, out=torch.empty(2, 149, 2, 24, dtype=out_dtype))
    _, k_cache, v_cache, table, lens, _, rows = batch.oracle_arrays()
    scales = {name: scale.double().numpy() for name, scale in scales.items()}
    want_k, want_v = reference.gather_kv(k_cache, v_cache, table, lens, rows, **scales)
    torch.testing.assert_close(k, torch.from_numpy(want_k).to(out_dtype))
    torch.testing.assert_close(v, torch.from_numpy(want_v).to(out_dtype))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_scale": torch.ones(1)}, ValueError, "k_scale: expected none beside an output of FP8, which is a copy"),
        ({"v_scale": torch.ones(1)}, ValueError, "v_scale: expected none beside an output of FP8, which is a copy"),
        (
            {"out": torch.empty(2, 18, 2, 64, dtype=torch.float8_e5m2)},
            TypeError,
            "k_out: expected dtype float8_e4m3fn, found float8_e5m2",
        ),
        (
            {"out": torch.empty(2, 18, 2, 64), "v_scale": torch.ones(3)},
            ValueError,
            r"v_scale: expected shape \(1,\) or \(num_kv_heads=2,\), found \(3,\)",
        ),
    ],
)
def test_gather_kv_names_the_argument_when_fp8_is_refused(make_batch, change, error, message):
    batch = make_batch([(1, 0), (17, 0)], dtype=torch.float8_e4m3fn, q_dtype=torch.float32)
    with pytest.raises(error, match=message):
        gather_kv(*arrays(batch), **change)


def test_gather_kv_refuses_a_scale_when_the_cache_is_not_fp8(make_batch):
    message = "v_scale: expected none beside a cache that is not FP8, found a cache of float32"
    with pytest.raises(ValueError, match=message):
        gather_kv(*arrays(make_batch([(1, 0)])), v_scale=torch.ones(1))


@pytest.mark.parametrize("num_threads", [2, 3], indirect=True)
def test_gather_kv_matches_one_thread_when_threads_share_the_work(make_batch, num_threads, monkeypatch):
    batch = make_batch([(1500, 0), (700, 0)], num_kv_heads=4)
    k, v = gather_kv(*arrays(batch))
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
    alone_k, alone_v = gather_kv(*arrays(batch))
    assert torch.equal(k, alone_k)
    assert torch.equal(v, alone_v)


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("v_cache", lambda a: a[..., :8], r"v_cache: expected shape \(.*, head_dim=64\), found \(.*, 8\)"),
        ("block_table", lambda a: a[:, :1], r"seq_lens\[1\]: expected at most 16 \(1 blocks of 16\), found 17"),
        ("block_table", lambda a: a * 0 + 7, r"block_table\[\d, 0\]: expected a block below 6, found 7"),
        ("seq_lens", lambda a: a - 2, r"seq_lens\[0\]: expected a length, found -1"),
        ("rows", lambda a: a - 9, r"rows\[0\]: expected a row below 4, found -"),
        (
            "out",
            lambda _: torch.empty(2, 17, 2, 64),
            r"k_out: expected shape \(sum\(seq_lens\)=18, .*\), found \(17, 2, 64",
        ),
        ("out", lambda _: [torch.empty(1, 2, 64).expand(18, 2, 64)] * 2, r"k_out: expected an output whose elements"),
    ],
)
def test_gather_kv_names_the_argument_when_it_is_refused(make_batch, argument, change, message):
    batch = make_batch([(1, 0), (17, 0)])
    names = ("k_cache", "v_cache", "block_table", "seq_lens", "rows")
    arguments = dict(zip(names, arrays(batch), strict=True)) | {"out": None}
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=message):
        gather_kv(**arguments)


def test_gather_kv_refuses_an_output_when_it_overlaps_the_cache(make_batch):
    batch = make_batch([(2, 0)])
    inside = batch.k_cache[1].transpose(0, 1)[:2]
    with pytest.raises(ValueError, match="k_out: expected memory of its own, found an overlap with k_cache"):
        gather_kv(*arrays(batch), out=(inside, inside))
