"""Cache operations on packed keys, beside the same ones on a natural cache."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagedkv import CacheConfig, GroupSpec, KVCache, SchedulerConfig, paged_attention, reference
from pagedkv.exceptions import UnsupportedError
from pagedkv.kv_cache import append_kv, copy_blocks, from_dlpack, gather_kv, move_kv, swap_blocks

BLOCK_SIZE = 32
NUM_BLOCKS = 6
NUM_HEADS = 3
HEAD_DIM = 24
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def name(dtype):
    return str(dtype).removeprefix("torch.")


def make_cache(dtype=torch.float32, *, packed=True, **options):
    sizes = (NUM_BLOCKS, options.pop("block_size", BLOCK_SIZE), 2, NUM_HEADS, options.pop("head_dim", HEAD_DIM))
    cache = KVCache(*sizes, dtype, max_num_seqs=1, max_blocks_per_seq=NUM_BLOCKS, packed=packed, **options)
    cache.block_table[0, 0] = torch.arange(NUM_BLOCKS)
    return cache


def fill(cache, seed=0):
    """Write random keys and values to every slot; return them."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = NUM_BLOCKS * cache.block_size
    sizes = (2, cache.num_layers, num_slots, NUM_HEADS, cache.head_dim)
    k, v = torch.randn(sizes, generator=generator).to(getattr(torch, cache.dtype))
    for layer in range(cache.num_layers):
        cache.append_kv(layer, k[layer], v[layer], torch.arange(num_slots))
    return k, v


def contents(cache, layer=0):
    """Return keys and values of every slot."""
    return cache.gather_kv(layer, torch.tensor([NUM_BLOCKS * cache.block_size], dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("layout", ["block", "layer"])
def test_gather_kv_returns_what_was_appended_when_keys_are_packed(dtype, layout):
    cache = make_cache(dtype, layout=layout)
    written = fill(cache)
    for layer in range(2):
        for found, wanted in zip(contents(cache, layer), written, strict=True):
            assert torch.equal(found, wanted[layer])


def test_append_kv_writes_the_named_slots_alone_when_keys_are_packed():
    cache, natural = make_cache(), make_cache(packed=False)
    for each in (cache, natural):
        fill(each)
    slots = torch.tensor([40, 41, 42, -1, 100, 15, 16, 17, 63, 64, 31, 3])
    k = torch.randn(len(slots), NUM_HEADS, HEAD_DIM)
    for each in (cache, natural):
        each.append_kv(1, k, -k, slots)
    for layer in range(2):
        for found, wanted in zip(contents(cache, layer), contents(natural, layer), strict=True):
            assert torch.equal(found, wanted)


def test_append_kv_lets_the_later_token_win_when_a_packed_slot_comes_twice():
    cache = make_cache()
    k = torch.arange(3.0)[:, None, None].expand(3, NUM_HEADS, HEAD_DIM).contiguous()
    cache.append_kv(0, k, k, torch.tensor([7, 9, 7]))
    assert contents(cache)[0][7].eq(2).all()


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_append_kv_rounds_when_packed_keys_are_of_another_type(dtype, cache_dtype):
    cache = make_cache(cache_dtype)
    k = torch.randn(50, NUM_HEADS, HEAD_DIM).to(dtype)
    cache.append_kv(0, k, k, torch.arange(5, 55))
    assert torch.equal(contents(cache)[0][5:55], k.to(cache_dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=name)
def test_append_kv_divides_by_the_scale_when_packed_keys_are_fp8(dtype):
    cache, natural = make_cache(dtype), make_cache(dtype, packed=False)
    k = torch.randn(50, NUM_HEADS, HEAD_DIM)
    scale = torch.tensor([0.5, 1.0, 3.0])
    for each in (cache, natural):
        each.append_kv(0, k, k, torch.arange(5, 55), k_scale=scale, v_scale=scale)
    # Scores of one-hot queries say what the keys are.
    q = torch.eye(HEAD_DIM)[:, None].expand(-1, NUM_HEADS, -1).contiguous()
    assert torch.equal(scores(cache, q, 20), scores(natural, q, 20))


def scores(cache, q, slot):
    """Return what each query makes of the key in a slot of the first two blocks."""
    lengths = torch.full((len(q),), slot + 1, dtype=torch.int32)
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    rows = torch.zeros(len(q), dtype=torch.int32)
    table = cache.block_table[0]
    options = {"sliding_window": 1, "softmax_scale": 1.0, "return_lse": True}
    return paged_attention(q, *cache.layer_tensors(0), table, lengths, starts, rows, **options)[1]


def test_copy_blocks_copies_packed_blocks_whole(make_pairs):
    cache = make_cache()
    k, _ = fill(cache)
    cache.copy_blocks(make_pairs((1, 4), (2, 5)))
    found = contents(cache, 1)[0].unflatten(0, (NUM_BLOCKS, BLOCK_SIZE))
    wanted = k[1].unflatten(0, (NUM_BLOCKS, BLOCK_SIZE))
    assert torch.equal(found[4], wanted[1])
    assert torch.equal(found[5], wanted[2])
    assert torch.equal(found[:4], wanted[:4])


def test_move_kv_moves_packed_tokens_in_every_layer():
    cache, natural = make_cache(torch.bfloat16), make_cache(torch.bfloat16, packed=False)
    moves = np.array([[0, 17, 3], [0, 3, 90], [0, 64, 16], [0, 5, 5]])
    for each in (cache, natural):
        fill(each)
        each.move_kv(moves)
    for layer in range(2):
        for found, wanted in zip(contents(cache, layer), contents(natural, layer), strict=True):
            assert torch.equal(found, wanted)


def test_move_kv_takes_a_packed_pool():
    cache = make_cache()
    k, _ = fill(cache)
    move_kv(cache.pool_tensor, np.array([[0, 17, 3]]))
    assert torch.equal(contents(cache)[0][3], k[0, 17])


def test_swap_blocks_moves_blocks_when_both_pools_are_packed(make_pairs):
    source, destination = make_cache(), make_cache(layout="layer")
    k, _ = fill(source)
    fill(destination, 1)
    swap_blocks(source.pool_tensor, destination.pool_tensor, make_pairs((3, 1)))
    assert torch.equal(contents(destination, 1)[0][BLOCK_SIZE : 2 * BLOCK_SIZE], k[1, 3 * BLOCK_SIZE : 4 * BLOCK_SIZE])


@pytest.mark.parametrize("is_source_packed", [True, False])
def test_swap_blocks_refuses_a_pool_when_one_alone_is_packed(make_pairs, is_source_packed):
    source, destination = make_cache(packed=is_source_packed), make_cache(packed=not is_source_packed)
    fill(source)
    _, v = fill(destination, 1)
    with pytest.raises(ValueError, match="destination: expected .* as source has, found"):
        swap_blocks(source.pool_tensor, destination.pool_tensor, make_pairs((3, 1)))
    assert torch.equal(contents(destination)[1], v[0])


def test_copy_blocks_takes_a_packed_pool(make_pairs):
    cache = make_cache()
    k, _ = fill(cache)
    copy_blocks(cache.pool_tensor, make_pairs((1, 4)))
    assert torch.equal(contents(cache)[0][4 * BLOCK_SIZE : 5 * BLOCK_SIZE], k[0, BLOCK_SIZE : 2 * BLOCK_SIZE])


def test_gather_kv_converts_packed_keys_when_the_output_is_of_another_type():
    cache = make_cache(torch.bfloat16)
    k, v = fill(cache)
    out = tuple(torch.empty(70, NUM_HEADS, HEAD_DIM) for _ in range(2))
    lengths = torch.tensor([70], dtype=torch.int32)
    gather_kv(*cache.layer_tensors(1), cache.block_table[0], lengths, out=out)
    assert torch.equal(out[0], k[1, :70].float())
    assert torch.equal(out[1], v[1, :70].float())


@pytest.mark.parametrize("ask", [lambda c: c.layer(0), lambda c: c.pool, lambda c: c.host_pool])
def test_kv_cache_refuses_to_give_packed_memory_away(ask):
    with pytest.raises(UnsupportedError, match=r"expected keys in the natural layout, found packed keys"):
        ask(make_cache())


@pytest.mark.parametrize("part", [lambda c: c.pool_tensor, lambda c: c.layer_tensors(1)[0]], ids=["pool", "keys"])
def test_tensor_refuses_to_export_packed_keys(part):
    tensor = part(make_cache())
    assert tensor.is_packed
    with pytest.raises(UnsupportedError, match="export by DLPack of packed keys"):
        torch.from_dlpack(tensor)


def test_values_of_a_packed_cache_leave_by_dlpack():
    cache = make_cache()
    _, v = fill(cache)
    values = cache.layer_tensors(1)[1]
    assert not values.is_packed
    assert torch.equal(torch.from_dlpack(values)[2], v[1, 2 * BLOCK_SIZE : 3 * BLOCK_SIZE].transpose(0, 1))


@pytest.mark.parametrize("index", [(1, 0), (2, 0), (3, 0)])
def test_tensor_refuses_to_take_packed_keys_apart_inside_a_layer(index):
    with pytest.raises(UnsupportedError, match="select inside a layer of packed keys"):
        make_cache().layer_tensors(0)[0].select(*index)


def test_tensor_refuses_to_reinterpret_packed_keys():
    with pytest.raises(UnsupportedError, match="reinterpret of packed keys"):
        make_cache().pool_tensor.reinterpret(2, [2, NUM_HEADS, BLOCK_SIZE, HEAD_DIM], "float32")


def test_tensor_refuses_to_call_packed_what_is_no_pool():
    with pytest.raises(ValueError, match=r"tensor: expected a pool \(\.\.\., 2, num_kv_heads"):
        from_dlpack(torch.zeros(3, 16, 8)).packed()


@pytest.mark.parametrize("block_size", [8, 24, 40])
def test_kv_cache_refuses_a_block_size_when_packed_groups_do_not_fill_it(block_size):
    with pytest.raises(ValueError, match=f"block_size: expected a multiple of 16, .* found {block_size}"):
        make_cache(block_size=block_size)


def test_kv_cache_refuses_a_head_dim_when_it_cannot_be_packed():
    with pytest.raises(ValueError, match="head_dim: expected a multiple of 8, because keys are packed, found 12"):
        make_cache(head_dim=12)


def test_kv_cache_refuses_given_memory_when_keys_are_packed():
    pool = torch.zeros(NUM_BLOCKS, 2, 2, NUM_HEADS, BLOCK_SIZE, HEAD_DIM)
    with pytest.raises(UnsupportedError, match="pool: expected none, because only memory that KVCache makes"):
        make_cache(pool=pool)


def test_append_kv_names_the_values_when_they_are_packed():
    k_cache, _ = make_cache().layer_tensors(0)
    k = torch.zeros(3, NUM_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="v_cache: expected an array in the natural layout, found packed keys"):
        append_kv(k, k, k_cache, k_cache, torch.arange(3))


def test_append_kv_names_the_keys_when_they_come_packed():
    cache = KVCache(4, 16, 1, 16, 8, max_num_seqs=1, max_blocks_per_seq=4, packed=True)
    k_cache, v_cache = cache.layer_tensors(0)
    # Of one block: (16, 16, 8), the shape of sixteen tokens.
    with pytest.raises(ValueError, match="k: expected an array in the natural layout, found packed keys"):
        append_kv(k_cache.select(0, 0), torch.zeros(16, 16, 8), k_cache, v_cache, torch.arange(16))


def make_plan(**arrays):
    """Return a plan that asks of the memory what the arrays say and nothing else."""
    pairs = ("swap_out", "swap_in", "copies")
    empty = {"table_updates": np.zeros((0, 4), np.int32), "slot_moves": np.zeros((0, 3), np.int64)}
    empty |= {name: np.zeros((0, 2), np.int32) for name in pairs}
    empty |= {f"{name}_ids": np.arange(1, 1 + len(arrays.get(name, ()))) for name in pairs}
    return SimpleNamespace(**empty | {name: np.array(rows, empty[name].dtype) for name, rows in arrays.items()})


def test_apply_moves_copies_and_swaps_packed_tokens():
    cache = make_cache(torch.bfloat16, host_blocks=2)
    k, _ = fill(cache)
    cache.apply(make_plan(slot_moves=[(0, 40, 33)], swap_out=[(1, 0)], copies=[(2, 3)]))
    fill(cache, 1)
    plan = make_plan(swap_in=[(0, 5)])
    plan.swap_in_ids += 1
    cache.apply(plan)
    wanted = k[1].unflatten(0, (NUM_BLOCKS, BLOCK_SIZE))[1].clone()
    wanted[1] = wanted[8]
    assert torch.equal(contents(cache, 1)[0].unflatten(0, (NUM_BLOCKS, BLOCK_SIZE))[5], wanted)


GROUPS = (GroupSpec([1, 3], 2, 32), GroupSpec([0, 2, 4, 5], 2, 16, sliding_window=5))


@pytest.mark.parametrize("layer", range(6))
def test_attention_reads_each_layer_when_packed_groups_differ(layer):
    limits = SchedulerConfig(max_num_seqs=3, max_model_len=64)
    cache = KVCache.from_config(CacheConfig(9, 16, groups=GROUPS), limits, packed=True)
    group = cache.groups[cache.group_of(layer)]
    generator = torch.Generator().manual_seed(layer)
    k, v = torch.randn(2, 40, group.num_kv_heads, group.head_dim, generator=generator)
    blocks = torch.tensor([4, 2, 7])
    slots = (blocks[:, None] * group.block_size + torch.arange(group.block_size)).flatten()[:40]
    for other in range(cache.num_layers):
        # Other layers' slots in the same blocks are other memory.
        shape = (40, *(getattr(cache.groups[cache.group_of(other)], name) for name in ("num_kv_heads", "head_dim")))
        if cache.group_of(other) == cache.group_of(layer) and other != layer:
            cache.append_kv(other, torch.full(shape, torch.nan), torch.full(shape, torch.nan), slots)
    cache.append_kv(layer, k, v, slots)
    table = blocks.int()[None]
    lengths, starts = torch.tensor([40], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    q = torch.randn(3, 4, group.head_dim, generator=generator)
    out = paged_attention(q, *cache.layer_tensors(layer), table, lengths, starts, sliding_window=group.sliding_window)
    natural = [x.double().numpy().transpose(1, 0, 2)[None] for x in (k, v)]
    index = [np.array(x, np.int32) for x in ([[0]], [40], [0, 3])]
    wanted = reference.paged_attention(q.double().numpy(), *natural, *index, sliding_window=group.sliding_window)
    np.testing.assert_allclose(out.numpy(), wanted, atol=1e-5)


def test_from_config_refuses_a_group_when_its_blocks_cannot_be_packed():
    limits = SchedulerConfig(max_num_seqs=3, max_model_len=64)
    with pytest.raises(ValueError, match="block_size: expected a multiple of 16, because keys are packed, found 8"):
        KVCache.from_config(CacheConfig(9, 8, groups=GROUPS), limits, packed=True)
