"""What the CUDA backend does before it launches: refusals, early returns, and what it packs."""

import re

import numpy as np
import pytest
import torch
from batches import make_batch
from recorder import Recorder

from pagedkv.attention import PagedAttention, merge_states, paged_attention
from pagedkv.exceptions import InvalidArgumentError, StateError, UnsupportedError
from pagedkv.kv_cache import append_kv, copy_blocks, gather_kv, move_kv, swap_blocks
from pagedkv.kv_cache.ops import update_block_table

BFLOAT16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
MESSAGE = re.compile(r"(.*): expected .*, found (.*)")  # the argument, and what came
SEQUENCES = [(33, 1), (20, 20), (70, 3)]


@pytest.fixture
def gpu():
    """Return a recorder to which the package launches."""
    with Recorder().in_place_of_gpu() as recorder:
        yield recorder


def ints(*rows, dtype=np.int32):
    return np.array(rows, dtype)


def batch_of(**sizes):
    return make_batch(SEQUENCES, **{"dtype": BFLOAT16} | sizes)


def attend(**changed):
    """Call attention with some arguments changed."""
    batch = batch_of()
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc", "rows")
    arguments = dict(zip(names, batch.arrays(), strict=True))
    paged_attention(**arguments | {name: make(arguments) for name, make in changed.items()})


def appended(**changed):
    """Append tokens with some arguments changed."""
    k, cache = torch.zeros(2, 2, 8), torch.zeros(4, 2, 2, 4, 8)
    arguments = {"k": k, "v": k.clone(), "k_cache": cache[:, 0], "v_cache": cache[:, 1], "slot_mapping": ints(5, -1)}
    arguments["slot_mapping"] = arguments["slot_mapping"].astype(np.int64)
    append_kv(**arguments | changed)


def gathered(**changed):
    """Gather a sequence with some arguments changed."""
    cache = torch.zeros(4, 2, 2, 4, 8)
    arguments = {"k_cache": cache[:, 0], "v_cache": cache[:, 1], "block_table": torch.zeros(2, 3, dtype=torch.int32)}
    gather_kv(**arguments | {"seq_lens": ints(5)} | changed)


def pool(num_blocks=4, dtype=torch.float32):
    return torch.zeros(num_blocks, 3, 2, 2, 4, 8, dtype=dtype)


def table(**changed):
    arguments = {"block_table": torch.zeros(2, 3, 4, dtype=torch.int32), "table_updates": ints((1, 2, 3, 1))}
    update_block_table(**arguments | {"num_blocks": 9} | changed)


def of_heads(num_heads, dtype=torch.float32):
    return torch.ones(num_heads, dtype=dtype)


# What neither device takes.
REFUSED_BY_BOTH = {
    "q-shape": lambda: attend(q=lambda a: a["q"][:, 0]),
    "q-dtype": lambda: attend(q=lambda a: a["q"].double()),
    "q-strides": lambda: attend(q=lambda a: a["q"].transpose(1, 2).contiguous().transpose(1, 2)),
    "q-heads": lambda: attend(q=lambda a: a["q"][:, :3].contiguous()),
    "cache-shape": lambda: attend(v_cache=lambda a: a["v_cache"][:, :1]),
    "cache-dtype": lambda: attend(k_cache=lambda a: a["k_cache"].view(torch.int16)),
    "out-shape": lambda: attend(out=lambda a: torch.empty(3, 4, 64, dtype=BFLOAT16)),
    "out-is-q": lambda: attend(out=lambda a: a["q"]),
    "out-overlaps-itself": lambda: attend(out=lambda a: a["q"][:1].clone().expand(24, 4, 64)),
    "seq_lens-range": lambda: attend(seq_lens=lambda a: a["seq_lens"] + 1000),
    "seq_lens-dtype": lambda: attend(seq_lens=lambda a: a["seq_lens"].long()),
    "rows-range": lambda: attend(rows=lambda a: a["rows"] + 100),
    "sinks-shape": lambda: attend(sinks=lambda a: of_heads(3)),
    "sinks-dtype": lambda: attend(sinks=lambda a: of_heads(4, torch.float64)),
    "alibi-shape": lambda: attend(alibi_slopes=lambda a: of_heads(5)),
    "scale-beside-bfloat16": lambda: attend(k_scale=lambda a: of_heads(1)),
    "softmax_scale": lambda: attend(softmax_scale=lambda a: float("inf")),
    "soft_cap": lambda: attend(soft_cap=lambda a: -1.5),
    "append-shape": lambda: appended(v=torch.zeros(3, 2, 8)),
    "append-dtype": lambda: appended(k=torch.zeros(2, 2, 8, dtype=torch.float64)),
    "append-slots": lambda: appended(slot_mapping=ints(5, 16, dtype=np.int64)),
    "append-slots-below": lambda: appended(slot_mapping=ints(-2, 1, dtype=np.int64)),
    "append-slots-dtype": lambda: appended(slot_mapping=ints(5, 1)),
    "append-scale": lambda: appended(k_scale=of_heads(1)),
    "copy-range": lambda: copy_blocks(pool(), ints((1, 4))),
    "copy-below": lambda: copy_blocks(pool(), ints((1, 2), (-1, 0))),
    "copy-twice": lambda: copy_blocks(pool(), ints((1, 2), (3, 2))),
    "copy-shape": lambda: copy_blocks(pool(), ints((1, 2, 3))),
    "copy-dtype": lambda: copy_blocks(pool(), ints((1, 2), dtype=np.int64)),
    "move-range": lambda: move_kv(pool(), ints((1, 99, 99), (0, 1, 16), dtype=np.int64)),
    "move-source": lambda: move_kv(pool(), ints((0, -1, 2), dtype=np.int64)),
    "move-twice": lambda: move_kv(pool(), ints((0, 1, 2), (1, 3, 2), (0, 5, 2), dtype=np.int64)),
    "swap-range": lambda: swap_blocks(pool(), pool(2), ints((1, 0), (3, 2))),
    "swap-twice": lambda: swap_blocks(pool(), pool(2), ints((1, 0), (3, 0))),
    "swap-dtype": lambda: swap_blocks(pool(), pool(2, torch.float16), ints((1, 0))),
    "swap-shape": lambda: swap_blocks(pool(), torch.zeros(2, 3, 2, 2, 8, 4), ints((1, 0))),
    "gather-lens": lambda: gathered(seq_lens=ints(5, 13)),
    "gather-below": lambda: gathered(seq_lens=ints(-1)),
    "gather-rows": lambda: gathered(rows=ints(2)),
    "gather-out": lambda: gathered(out=(torch.zeros(5, 2, 8), torch.zeros(4, 2, 8))),
    "gather-scale": lambda: gathered(k_scale=of_heads(1)),
    "table-group": lambda: table(table_updates=ints((0, 0, 0, 1), (2, 0, 0, 1))),
    "table-row": lambda: table(table_updates=ints((1, 3, 0, 1))),
    "table-column": lambda: table(table_updates=ints((1, 2, -1, 1))),
    "table-block": lambda: table(table_updates=ints((1, 2, 3, 9))),
    "merge-shape": lambda: merge_states(torch.zeros(2, 1, 8), torch.zeros(2, 1), torch.zeros(2, 1, 8), of_heads(2)),
}


@pytest.mark.parametrize("call", REFUSED_BY_BOTH.values(), ids=list(REFUSED_BY_BOTH))
def test_gpu_refuses_what_the_cpu_refuses_and_names_the_same(call):
    with pytest.raises((TypeError, InvalidArgumentError)) as on_cpu:
        call()
    with Recorder().in_place_of_gpu() as gpu, pytest.raises(on_cpu.type) as on_gpu:
        call()
    assert MESSAGE.fullmatch(str(on_gpu.value)).groups() == MESSAGE.fullmatch(str(on_cpu.value)).groups()
    assert gpu.launches == []


def float32_cache(arguments):
    return arguments["k_cache"].float()


def fp8(arguments):
    return arguments["v_cache"].to(E4M3)


def shifted(arguments, elements, name="q"):
    """Return the same values at an address that is moved by some elements."""
    array = arguments[name]
    memory = torch.empty(array.numel() + elements, dtype=array.dtype)
    return memory[elements:].view(array.shape).copy_(array)


# What only a GPU refuses, by the name and the words of its reason.
REFUSED_BY_GPU = {
    "float32": ("k_cache, v_cache: expected bfloat16 or .* on a GPU, found float32", TypeError, {
        "k_cache": float32_cache, "v_cache": lambda a: a["v_cache"].float()}),
    "float32-queries": ("q: expected float16 or bfloat16, found float32", TypeError, {
        "q": lambda a: a["q"].float(), "out": lambda a: a["q"].float()}),
    "two-cache-types": ("k_cache, v_cache: expected one dtype for both", TypeError, {"v_cache": fp8}),
    "float16-beside-bfloat16": ("k_cache, v_cache: expected float16 or", TypeError, {"q": lambda a: a["q"].half()}),
    "out-type": ("out: expected the dtype of q, bfloat16", TypeError, {"out": lambda a: torch.zeros(a["q"].shape)}),
    "q-address": ("q: expected rows at multiples of 16 bytes", UnsupportedError, {"q": lambda a: shifted(a, 4)}),
    "out-address": ("out: expected rows at multiples of 16 bytes", UnsupportedError, {"out": lambda a: shifted(a, 4)}),
    "v-address": ("v_cache: expected rows at multiples of 8 bytes", UnsupportedError, {
        "v_cache": lambda a: shifted(a, 2, "v_cache")}),
}  # fmt: skip


@pytest.mark.parametrize(("message", "error", "changed"), REFUSED_BY_GPU.values(), ids=list(REFUSED_BY_GPU))
def test_gpu_refuses_by_name_what_its_kernels_do_not_have(gpu, message, error, changed):
    with pytest.raises(error, match=message):
        attend(**changed)
    assert gpu.launches == []


def test_gpu_refuses_by_name_heads_that_are_too_long(gpu):
    batch = batch_of(head_dim=264)
    with pytest.raises(UnsupportedError, match="head_dim: expected at most 256 on a GPU, found 264"):
        paged_attention(*batch.arrays())


def test_gpu_takes_caches_at_multiples_of_8_bytes(gpu):
    attend(v_cache=lambda a: shifted(a, 4, "v_cache"))
    assert gpu.params("paged_decode")["copy_bytes"] == 8


def test_window_is_clamped_where_32_bits_would_not_hold_it(gpu):
    attend(sliding_window=lambda a: 2**31 + 5)
    assert gpu.params("paged_decode")["sliding_window"] == 2**30 - 1


def test_nothing_is_launched_for_an_empty_batch(gpu):
    batch = make_batch([], dtype=BFLOAT16)
    assert paged_attention(*batch.arrays()).shape == (0, 4, 64)
    appended(k=torch.zeros(0, 2, 8), v=torch.zeros(0, 2, 8), slot_mapping=ints(dtype=np.int64))
    copy_blocks(pool(), ints().reshape(0, 2))
    move_kv(pool(), ints(dtype=np.int64).reshape(0, 3))
    gathered(seq_lens=ints(0))
    merge_states(torch.zeros(0, 1, 8), torch.zeros(0, 1), torch.zeros(0, 1, 8), torch.zeros(0, 1))
    assert gpu.launches == []


def test_plan_is_refused_while_a_graph_is_captured(gpu):
    batch = batch_of()
    attention = PagedAttention(4, 2, 64, 16)
    gpu.capturing = True
    with pytest.raises(StateError, match="plan: expected a stream that is not being captured"):
        attention.plan(*batch.arrays()[3:])


def test_later_token_wins_when_slots_on_the_host_come_twice(gpu):
    appended(k=torch.zeros(4, 2, 8), v=torch.zeros(4, 2, 8), slot_mapping=ints(5, 3, 5, -1, dtype=np.int64))
    (launch,) = gpu.launches
    assert launch.arrays["slot_mapping"].tolist() == [-1, 3, 5, -1]


def test_moves_are_put_in_an_order_in_which_all_sources_are_read_in_time(gpu):
    move_kv(pool(), ints((0, 1, 2), (0, 2, 3), (0, 3, 4), (0, 8, 8), dtype=np.int64))
    (launch,) = gpu.launches
    moves = launch.arrays["slot_moves"][:, 1:].tolist()
    assert sorted(moves) == [[1, 2], [2, 3], [3, 4], [8, 8]]
    for index, (_, destination) in enumerate(moves):
        assert destination not in [source for source, _ in moves[index + 1 :]]


def test_moves_in_a_ring_are_refused(gpu):
    with pytest.raises(UnsupportedError, match="slot_moves: expected no ring of slots"):
        move_kv(pool(), ints((0, 1, 2), (0, 2, 1), dtype=np.int64))
    assert gpu.launches == []


def test_swap_copies_runs_of_neighbours_whatever_the_layout(gpu):
    source = torch.randn(3, 6, 2, 2, 4, 8).transpose(0, 1)
    destination = torch.zeros(8, 3, 2, 2, 4, 8)
    pairs = ints((2, 5), (1, 4), (5, 0), (3, 7))
    swap_blocks(source, destination, pairs)
    for of, to in pairs:
        assert torch.equal(destination[to], source[of])
    assert (destination[[1, 2, 3, 6]] == 0).all()


def test_table_keeps_the_later_block_when_a_cell_comes_twice(gpu):
    block_table = torch.zeros(2, 3, 4, dtype=torch.int32)
    table(block_table=block_table, table_updates=ints((1, 2, 3, 1), (0, 0, 1, 7), (1, 2, 3, 8)))
    assert block_table.nonzero().tolist() == [[0, 0, 1], [1, 2, 3]]
    assert block_table[0, 0, 1] == 7
    assert block_table[1, 2, 3] == 8
