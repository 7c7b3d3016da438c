"""What kernels move, by the counters: every key and value once, in whole sectors, and without bank conflicts."""

import pytest
import torch
from batches import make_batch
from host_device import HostDevice, attention

SEQUENCES = [(300, 1), (64, 1), (17, 1), (1, 1), (0, 1)]
FP8 = torch.float8_e4m3fn
KV = "k_cache+v_cache"


def moved(batch, kernel, **options):
    """Return what the first launch of an attention moved."""
    device = HostDevice(count=True)
    attention.paged_attention(device, *batch.arrays(), kernel=kernel, **options)
    return device.launched[0][1]


def bytes_of_tokens(batch, num_tokens):
    """Return the bytes of keys and values of so many tokens, under all heads."""
    _, num_kv_heads, _, head_dim = batch.k_cache.shape
    return 2 * num_tokens * num_kv_heads * head_dim * batch.k_cache.element_size()


@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 80), (FP8, 128), (FP8, 64)])
def test_decode_reads_each_key_and_value_once_in_whole_sectors(dtype, head_dim, group):
    q_dtype = torch.bfloat16 if dtype == FP8 else dtype
    batch = make_batch(
        SEQUENCES, dtype=dtype, q_dtype=q_dtype, head_dim=head_dim, num_kv_heads=2, num_q_heads=2 * group
    )
    done = moved(batch, "paged_decode")
    least = bytes_of_tokens(batch, sum(length for length, _ in SEQUENCES))
    assert done.traffic[KV].bytes_read <= 1.03 * least
    assert done.traffic[KV].sectors * 32 == done.traffic[KV].bytes_read
    assert done.bank_conflicts == 0


@pytest.mark.parametrize("piece", [None, 64])
def test_decode_reads_keys_once_when_they_are_cut_and_windows_when_they_slide(piece):
    batch = make_batch(SEQUENCES, dtype=torch.bfloat16, head_dim=128)
    done = moved(batch, "paged_decode", piece=piece, sliding_window=40)
    least = bytes_of_tokens(batch, sum(min(length, 40) for length, _ in SEQUENCES))
    assert done.traffic[KV].bytes_read <= 1.03 * least


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 64), (FP8, 128)])
def test_prefill_reads_keys_once_per_tile_of_queries(dtype, head_dim):
    q_dtype = torch.bfloat16 if dtype == FP8 else dtype
    sequences = [(150, 150), (200, 40), (30, 30)]
    batch = make_batch(sequences, dtype=dtype, q_dtype=q_dtype, head_dim=head_dim)
    done = moved(batch, "paged_prefill")
    rows, group = attention.rows_of_item("paged_prefill", head_dim), 2
    tokens = 0
    for length, queries in sequences:
        for first in range(0, queries * group, rows):
            last = min(first + rows, queries * group) - 1
            tokens += length - queries + last // group + 1
    assert done.traffic[KV].bytes_read <= 1.1 * bytes_of_tokens(batch, tokens)
    assert done.traffic[KV].sectors * 32 == done.traffic[KV].bytes_read
    assert done.traffic["out"].sectors == done.traffic["out"].least_sectors
    assert done.traffic["q"].bytes_read == batch.q.nbytes
    assert done.bank_conflicts == 0


def test_bank_conflicts_are_counted_where_rows_are_not_permuted():
    batch = make_batch([(64, 1)], dtype=torch.bfloat16, head_dim=128)
    device = HostDevice(count=True, edits={"paged_decode": (("(chunk ^ turn) << 4", "chunk << 4"),)})
    attention.paged_attention(device, *batch.arrays(), kernel="paged_decode")
    assert device.launched[0][1].bank_conflicts > 0
