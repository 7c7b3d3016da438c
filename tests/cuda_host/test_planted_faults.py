"""Faults planted in the kernels: each is found by the first launch, under either schedule.

A fault is an edit of a kernel or a header that must match once, so that a test cannot outlive the line that it breaks.
"""

import functools

import pytest
import torch
from batches import assert_matches_oracle
from host_device import HostDevice, KernelFault, attention
from tight import make_tight_batch

SCHEDULES = ["uniform", "warp-priority"]
DECODE = [(1, 1), (2, 1), (3, 1), (5, 1), (63, 1), (200, 1)]
PREFILL = [(1, 1), (2, 2), (3, 2), (5, 5), (70, 60), (130, 100)]

IN_DECODE = {
    "no barrier: queries staged": ("  sync_block();  // the queries are there\n", ""),
    "no barrier: last stage free": ("    sync_block();  // every warp has them, and the last stage is free\n", ""),
    "no barrier: tile there": (
        "    sync_warp();  // the tile is there, and the stage of the tile before is free\n",
        "",
    ),
    "no barrier: places free": (
        "    sync_warp();\n    store_shared(places + lane * 16,",
        "    store_shared(places + lane * 16,",
    ),
    "no barrier: places there": ("tile + 2, lane);\n    sync_warp();\n", "tile + 2, lane);\n"),
    "no barrier: stages free": ("  sync_block();  // no warp needs the stages\n", ""),
    "no barrier: results there": ("  sync_block();  // all results are there\n", ""),
    "barrier of some threads": ("  sync_block();  // all results are there\n", "  if (warp < 3) sync_block();\n"),
    "exit before a barrier": ("  sync_block();  // no warp", "  if (warp == 3) return;\n  sync_block();  // no warp"),
    "no wait": ("    copy_async_wait<kStages - 2>();\n", ""),
    "weak wait": ("copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();"),
    "no commit": ("    copy_async_commit();\n    const smem_t k_tile", "    const smem_t k_tile"),
    "one stage too far ahead": ("keys, tile + kStages - 1, warp", "keys, tile + kStages, warp"),
    "table read behind its end": ("  if (key >= keys.end_key) return 0;\n", ""),
    "keys read behind the sequence": (
        "minimum(kWarpKeys, keys.end_key - first_key_of(keys, tile))",
        "kWarpKeys",
    ),
    "wrong block id": ("const Place place = {keys.block, key", "const Place place = {keys.block + 1, key"),
    "slot of another block size": ("keys.block, key % p.block_size};", "keys.block, key % 32};"),
    "shuffle of some lanes": (
        "const float sum = quad_sum(rows.sum[half]);",
        "const float sum = lane < 16 ? quad_sum(rows.sum[half]) : rows.sum[half];",
    ),
    "mask off by one": ("bool sees = key < keys.end;", "bool sees = key <= keys.end;"),
    "mask one short": ("rule.position + 1)};", "rule.position)};"),
    "rows not rescaled": ("out[n][e] *= factor[e / 2];", "out[n][e] *= 1.f;"),
    "sums not rescaled": ("      rows.sum[half] *= factor[half];\n", ""),
    "bias off by one": ("position - rules[half].position", "position + 1 - rules[half].position"),
    "logarithm of base 2": ("(row.base + log2_approx(row.sum)) * kLn2", "row.base + log2_approx(row.sum)"),
    "items behind the list": ("  if (index >= load_as<i32>(p.work)) return false;\n", ""),
    "output of another head": ("kv_head * p.group + of_sequence", "of_sequence"),
}


IN_PREFILL = {
    "no barrier: first places there": ("  sync_block();  // it is known where the first tile lies\n", ""),
    "no barrier: queries staged": ("  sync_block();  // the queries are there\n", ""),
    "no barrier: tile there": ("    sync_block();  // the tile is there, it is known", "    // it is known"),
    "no barrier: queries free": ("  sync_warp();  // the warp needs its queries no more\n", ""),
    "no barrier: rows there": ("  sync_warp();  // the rows are there\n", ""),
    "barrier of some threads": ("    sync_block();  // the tile is there,", "    if (warp < 3) sync_block();  //"),
    "no wait": ("    copy_async_wait<0>();\n    sync_block();", "    sync_block();"),
    "weak wait": ("    copy_async_wait<0>();\n    sync_block();", "    copy_async_wait<1>();\n    sync_block();"),
    "no commit": ("load_tile(p, item, 0);\n  copy_async_commit();", "load_tile(p, item, 0);"),
    "table read behind its end": ("threadIdx.x >= kKeys || key >= item.end_key", "threadIdx.x >= kKeys"),
    "keys read behind the sequence": ("item.end_key - item.first_key - tile * kKeys;", "kKeys;"),
    "wrong block id": ("const Place place = {block, key", "const Place place = {block + 1, key"),
    "places where those in use are": ("(tile % 2 * kKeys + threadIdx.x) * 16", "threadIdx.x * 16"),
    "tile skipped that some rows see": ("first_key >= seen.end ||", "first_key + kKeys >= seen.end ||"),
    "not masked where it must be": ("key + kStepKeys > seen.end_of_all", "key > seen.end_of_all"),
    "rows stored that are not there": ("row >= item.num_rows || chunk * 8", "chunk * 8"),
    "shuffle of some lanes": (
        "quad_sum(rows[m].sum[half])}",
        "lane < 16 ? quad_sum(rows[m].sum[half]) : 0.f}",
    ),
    "mask off by one": ("bool sees = key < keys.end;", "bool sees = key <= keys.end;"),
    "mask one short": ("rule.position + 1)};", "rule.position)};"),
    "window too wide": ("keys.first = rule.position + 1 - p", "keys.first = rule.position - p"),
}
IN_MERGE = {
    "piece left out": (
        "    for (i32 piece = 0; piece < item.num_pieces; piece++) {\n      const i64 index",
        "    for (i32 piece = 1; piece < item.num_pieces; piece++) {\n      const i64 index",
    ),
    "items behind the list": ("  if (index >= load_as<i32>(p.merges)) return false;\n", ""),
    "pieces not weighted": ("const float weight = exp2_approx(lse - total.base);", "const float weight = 1.f;"),
}

# What these break shows with such options only.
FP8 = {"dtype": torch.float8_e4m3fn, "q_dtype": torch.bfloat16}
OPTIONS = {
    "no barrier: queries staged": FP8,  # of others nothing is read before the next barrier
    "rows not rescaled": {"softmax_scale": 2.0},
    "sums not rescaled": {"softmax_scale": 2.0},
    "window too wide": {"sliding_window": 3},
    "bias off by one": {"alibi_slopes": torch.full((8,), 0.5)},
    "piece left out": {"piece": 48},
    "items behind the list": {"piece": 48},
    "pieces not weighted": {"piece": 48},
}


def find(kernel, fault, sequences, schedule, *, edited=None, piece=None, dtype=torch.float16, q_dtype=None, **options):
    """Return what is found wrong, or None; the fault is planted in the kernel, or in the `edited` one."""
    batch = make_tight_batch(sequences, num_kv_heads=2, dtype=dtype, q_dtype=q_dtype)
    device = HostDevice(schedule=schedule, edits={edited or kernel: (fault,)} if fault else {})
    attend = functools.partial(attention.paged_attention, device, kernel=kernel, piece=piece)
    try:
        assert_matches_oracle(attend, batch, **options)
    except KernelFault as found:
        return str(found)
    except AssertionError:
        return "wrong result"
    return None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fault", IN_DECODE)
def test_a_fault_planted_in_paged_decode_is_found_by_one_launch(fault, schedule):
    assert find("paged_decode", IN_DECODE[fault], DECODE, schedule, **OPTIONS.get(fault, {}))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fault", IN_PREFILL)
def test_a_fault_planted_in_paged_prefill_is_found_by_one_launch(fault, schedule):
    assert find("paged_prefill", IN_PREFILL[fault], PREFILL, schedule, **OPTIONS.get(fault, {}))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fault", IN_MERGE)
def test_a_fault_planted_in_merge_partials_is_found_by_one_launch(fault, schedule):
    options = OPTIONS.get(fault, {})
    assert find("paged_decode", IN_MERGE[fault], DECODE, schedule, edited="merge_partials", **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{}, *{str(options): options for options in OPTIONS.values()}.values()], ids=str)
def test_nothing_is_found_where_nothing_is_planted(options, schedule):
    assert find("paged_decode", None, DECODE, schedule, **options) is None
    assert find("paged_prefill", None, PREFILL, schedule, **options) is None


@pytest.mark.parametrize("text", ["no such text", "sync_block();"])
def test_an_edit_that_matches_never_or_twice_is_refused(text):
    with pytest.raises(ValueError, match="an edit must match once, this one matches"):
        find("paged_decode", (text, ""), DECODE, "uniform")
