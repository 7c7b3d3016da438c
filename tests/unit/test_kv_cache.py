from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kv_cache import KVCache, Tensor, from_dlpack, gather_kv

SIZES = {"num_blocks": 6, "block_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8}
TABLE = {"max_num_seqs": 5, "max_blocks_per_seq": 7}
SHAPE = (6, 3, 2, 2, 4, 8)
SHARED = torch.zeros(SHAPE)
NONE = {"table_updates": (0, 4), "slot_moves": (0, 3), "swap_out": (0, 2), "swap_in": (0, 2), "copies": (0, 2)}
NO_IDS = {"swap_out_ids": (0,), "swap_in_ids": (0,)}
WIDE = ("slot_moves", *NO_IDS)


def make_cache(dtype="float32", **options):
    return KVCache(**SIZES, dtype=dtype, **TABLE, **options)


def make_plan(**arrays):
    """Return a plan that asks of the memory what the arrays say and nothing else."""
    shapes = NONE | NO_IDS
    empty = {name: np.zeros(shape, np.int64 if name in WIDE else np.int32) for name, shape in shapes.items()}
    given = {name: np.array(rows, empty[name].dtype) for name, rows in arrays.items()}
    return SimpleNamespace(**(empty | given))


def number_blocks(cache):
    """Give every element of a block the block's number."""
    for block in range(cache.num_blocks):
        cache.pool[block] = block


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize(
    ("dtype", "item_bytes"),
    [("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1)],
)
def test_memory_has_the_shape_and_bytes_asked_for_when_it_is_made(backend, dtype, item_bytes):
    cache = make_cache(dtype, backend=backend)
    assert (tuple(cache.pool.shape), cache.dtype, cache.device) == (SHAPE, dtype, "cpu")
    assert cache.num_bytes == cache.pool.nbytes == np.prod(SHAPE) * item_bytes
    assert tuple(cache.block_table.shape) == (1, 5, 7)
    assert cache.block_table.sum() == 0


def token_and_scales():
    """Return a key and a value, which FP8 holds exactly where it is divided by these scales."""
    k, v = torch.ones(1, 2, 8), torch.tensor([1.5, 100.0])[:, None].repeat(1, 1, 8)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([1.0, 50.0])}
    return k, v, scales


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_cache_of_fp8_gives_back_values_when_attention_has_the_scales_they_were_written_with(backend, dtype):
    cache = make_cache(dtype, backend=backend)
    k, v, scales = token_and_scales()
    cache.append_kv(1, k, v, np.array([9]), **scales)
    attention = pagedkv.PagedAttention(2, 2, 8, 4)
    attention.plan(np.array([[2]], np.int32), np.array([2], np.int32), np.array([0, 1], np.int32))
    cache.append_kv(1, k, v, np.array([8]), **scales)
    assert torch.equal(attention.run(torch.ones(1, 2, 8), *cache.layer_tensors(1), **scales), v)


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_cache_of_fp8_gathers_numbers_when_out_has_a_type_for_them(backend, dtype):
    cache = make_cache(dtype, backend=backend)
    k, v, scales = token_and_scales()
    cache.append_kv(1, k, v, np.array([8]), **scales)
    cache.block_table[0, 0, 0] = 2
    out = torch.empty(2, 1, 2, 8)
    cache.gather_kv(1, np.array([1], np.int32), out=out, **scales)
    assert torch.equal(out[0], k)
    assert torch.equal(out[1], v)


@pytest.mark.parametrize(("backend", "stored"), [("torch", torch.float8_e5m2), ("numpy", np.uint8)])
def test_cache_of_fp8_gathers_what_is_stored_when_no_out_is_given(backend, stored):
    cache = make_cache("float8_e5m2", backend=backend)
    cache.append_kv(1, torch.ones(1, 2, 8), torch.ones(1, 2, 8), np.array([8]))
    cache.block_table[0, 0, 0] = 2
    k, v = cache.gather_kv(1, np.array([1], np.int32))
    assert (k.dtype, v.dtype) == (stored, stored)
    assert (np.asarray(torch.as_tensor(k).view(torch.uint8)) == 0x3C).all()


def test_dtype_is_taken_when_it_is_torchs():
    assert make_cache(torch.bfloat16).pool.dtype == torch.bfloat16


@pytest.mark.parametrize(("layout", "outermost"), [("block", 0), ("layer", 1)])
@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_outermost_dimension_is_that_of_the_layout(backend, layout, outermost):
    strides = from_dlpack(make_cache(layout=layout, backend=backend).pool).strides
    assert strides[outermost] == max(strides)
    assert strides[2:] == (64, 32, 8, 1)


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_layer_is_a_view_of_keys_and_values_when_the_library_slices(backend, layout):
    cache = make_cache(layout=layout, backend=backend)
    k_cache, v_cache = cache.layer(1)
    k_cache[...], v_cache[...] = 1, 2
    assert tuple(k_cache.shape) == tuple(v_cache.shape) == (6, 2, 4, 8)
    assert (cache.pool[:, 1, 0] == 1).all()
    assert (cache.pool[:, 1, 1] == 2).all()


def test_layer_tensors_know_their_type_when_numpy_does_not():
    cache = make_cache("bfloat16", backend="numpy")
    k_cache, v_cache = cache.layer_tensors(2)
    assert (cache.layer(2)[0].dtype, k_cache.dtype, v_cache.shape) == (np.uint16, "bfloat16", (6, 2, 4, 8))


@pytest.mark.parametrize("layer", [-1, 3])
def test_layer_is_refused_when_there_is_none_of_that_number(layer):
    with pytest.raises(ValueError, match=f"layer: expected 0 to 2, found {layer}"):
        make_cache().layer(layer)


@pytest.mark.parametrize("layer", ["1", None, 1.0])
def test_layer_is_refused_by_name_when_it_is_no_integer(layer):
    with pytest.raises(TypeError, match=f"layer: expected an integer, found {layer!r}"):
        make_cache().layer(layer)


def test_layer_is_found_when_its_number_is_numpys():
    assert make_cache().layer(np.int64(1))[0].shape == (6, 2, 4, 8)


@pytest.mark.parametrize("permutation", [(0, 1, 2, 3, 4, 5), (1, 0, 2, 3, 4, 5), (2, 4, 0, 3, 1, 5)])
def test_given_pool_is_used_in_place_when_its_strides_are_any(permutation):
    memory = torch.zeros([SHAPE[axis] for axis in permutation], dtype=torch.float16)
    pool = memory.permute(*np.argsort(permutation).tolist())
    cache = make_cache("float16", pool=pool)
    ones = torch.ones(1, 2, 8)
    cache.append_kv(1, ones, 2 * ones, torch.tensor([4 * 4 + 3]))
    assert pool[4, 1, 0, :, 3].eq(1).all()
    assert pool[4, 1, 1, :, 3].eq(2).all()
    assert memory.sum() == 3 * 2 * 8


def test_given_pool_is_sliced_by_us_when_its_library_is_another():
    pool = np.zeros(SHAPE, np.float32)
    cache = make_cache(pool=from_dlpack(pool), backend="numpy")
    k_cache, v_cache = cache.layer(1)
    assert isinstance(k_cache, Tensor)
    assert np.shares_memory(np.from_dlpack(v_cache), pool[:, 1, 1])


def test_given_block_table_is_used_in_place():
    table = np.zeros((1, 5, 7), np.int32)
    cache = make_cache(block_table=table)
    cache.apply(make_plan(table_updates=[(0, 4, 6, 5)]))
    assert table[0, 4, 6] == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float64"}, ValueError, "dtype: expected one of float32, .*, float8_e5m2, found 'float64'"),
        ({"device": "mps"}, UnsupportedError, "device: expected cpu, cuda or cuda:N, found mps"),
        ({"device": "cuda:99"}, ValueError, r"device: expected one of the \d+ GPUs that torch finds, found cuda:99"),
        ({"layout": "token"}, ValueError, "layout: expected one of block, layer, found 'token'"),
        ({"backend": "jax"}, ValueError, "backend: expected one of torch, numpy, found 'jax'"),
        ({"block_size": 0}, ValueError, "block_size: expected at least 1, found 0"),
        ({"max_num_seqs": -1}, ValueError, "max_num_seqs: expected at least 1, found -1"),
        ({"pool": torch.zeros(1)}, ValueError, r"pool: expected shape \(6, 3, 2, 2, 4, 8\), found \(1,\)"),
        ({"pool": torch.zeros(SHAPE).half()}, TypeError, "pool: .* read as float32, found dtype float16"),
        (
            {"pool": np.broadcast_to(np.float32(0), SHAPE)},
            ValueError,
            "pool: expected writable memory, found a read-only",
        ),
        (
            {"block_table": np.zeros((5, 7), np.int32)},
            ValueError,
            r"block_table: expected shape \(1, 5, 7\), found \(5, 7\)",
        ),
        ({"block_table": np.zeros((1, 5, 7))}, TypeError, "block_table: expected dtype .*, found float64"),
        ({"num_blocks": "6"}, TypeError, "num_blocks: expected an integer, found '6'"),
        ({"block_size": 4.0}, TypeError, "block_size: expected an integer, found 4.0"),
        ({"num_layers": None}, TypeError, "num_layers: expected an integer, found None"),
        ({"num_kv_heads": True}, TypeError, "num_kv_heads: expected an integer, found True"),
        ({"head_dim": [8]}, TypeError, r"head_dim: expected an integer, found \[8\]"),
        ({"max_num_seqs": None}, TypeError, "max_num_seqs: expected an integer, found None"),
        ({"max_blocks_per_seq": "7"}, TypeError, "max_blocks_per_seq: expected an integer, found '7'"),
        ({"pool": 5}, TypeError, "pool: expected an array that speaks DLPack, found int"),
        (
            {"pool": torch.zeros(1, 3, 2, 2, 4, 8).expand(SHAPE)},
            ValueError,
            r"pool: expected memory that does not overlap itself, found strides \(0, 128,",
        ),
        (
            {"block_table": torch.zeros(12, dtype=torch.int32).as_strided((1, 5, 7), (1, 1, 1))},
            ValueError,
            "block_table: expected memory that does not overlap itself",
        ),
        (
            {"pool": SHARED, "block_table": SHARED.flatten()[-35:].view(torch.int32).view(1, 5, 7)},
            ValueError,
            "block_table: expected memory of its own, found an overlap with pool",
        ),
        ({"num_blocks": 1 << 31}, ValueError, "num_blocks: expected less than 2\\^31, found 2147483648"),
    ],
)
def test_cache_names_the_argument_when_it_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        KVCache(**(SIZES | TABLE | options))


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ((3, pagedkv.SchedulerConfig()), "cache_config: expected a CacheConfig, found int"),
        ((pagedkv.CacheConfig(4), None), "scheduler_config: expected a SchedulerConfig, found NoneType"),
    ],
)
def test_cache_names_what_is_no_configuration(configs, message):
    with pytest.raises(TypeError, match=message):
        KVCache.from_config(*configs)


def test_sizes_come_from_the_configuration_when_there_is_one():
    group = pagedkv.GroupSpec(2, 3, 16, "bfloat16")
    cache_config = pagedkv.CacheConfig(10, 8, groups=[group])
    scheduler_config = pagedkv.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=41)
    cache = KVCache.from_config(cache_config, scheduler_config, backend="numpy", layout="layer")
    assert (cache.pool.shape, cache.dtype) == ((10, 2, 2, 3, 8, 16), "bfloat16")
    assert cache.block_table.shape == (1, 4, 6)


def test_lookahead_widens_the_block_table_when_it_is_configured():
    group = pagedkv.GroupSpec(1, 1, 8)
    cache_config = pagedkv.CacheConfig(4, 8, groups=[group])
    scheduler_config = SimpleNamespace(max_num_seqs=2, max_model_len=40, lookahead=1)
    assert KVCache.from_config(cache_config, scheduler_config, backend="numpy").block_table.shape == (1, 2, 6)


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_apply_updates_the_table_then_copies_blocks(backend):
    cache = make_cache(backend=backend)
    number_blocks(cache)
    address = from_dlpack(cache.block_table)
    cache.apply(make_plan(table_updates=[(0, 1, 0, 3), (0, 4, 6, 5)], copies=[(2, 3), (2, 5)]))
    assert cache.block_table[0].tolist()[1] == [3, 0, 0, 0, 0, 0, 0]
    assert cache.block_table[0, 4, 6] == 5
    assert [int(cache.pool[block].max()) for block in range(6)] == [0, 1, 2, 2, 4, 2]
    assert np.from_dlpack(address)[0, 4, 6] == 5


def test_apply_takes_a_schedulers_plan_when_it_comes_from_one():
    cache_config = pagedkv.CacheConfig(16, 4, groups=[pagedkv.GroupSpec(1, 1, 8)])
    scheduler_config = pagedkv.SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=40)
    scheduler = pagedkv.Scheduler(cache_config, scheduler_config)
    cache = KVCache.from_config(cache_config, scheduler_config)
    scheduler.add_request("r", np.arange(9), max_tokens=4)
    plan = scheduler.schedule()
    cache.apply(plan)
    k = torch.randn(9, 1, 8)
    cache.append_kv(0, k, 2 * k, plan.slot_mapping[0])
    got_k, got_v = cache.gather_kv(0, plan.seq_lens, plan.rows)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, 2 * k)


def test_apply_moves_slots_before_it_copies_blocks():
    cache = make_cache(backend="numpy")
    number_blocks(cache)
    cache.apply(make_plan(slot_moves=[(0, 4, 9), (0, 9, 13)], copies=[(2, 5)]))
    assert cache.pool[2, 0, 0, 0, :, 0].tolist() == [2, 1, 2, 2]
    assert cache.pool[3, 2, 1, 1, :, 7].tolist() == [3, 2, 3, 3]
    assert cache.pool[5, 0, 0, 0, :, 0].tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize(
    ("moves", "message"), [([(1, 0, 1)], "groups below 1, found 1"), ([(0, 24, 1)], "slots below 24, found 24 and 1")]
)
def test_apply_names_the_move_and_writes_nothing_when_the_memory_has_no_such_slot(moves, message):
    cache = make_cache(backend="numpy")
    number_blocks(cache)
    with pytest.raises(ValueError, match=rf"plan\.slot_moves: expected {message}"):
        cache.apply(make_plan(slot_moves=moves, table_updates=[(0, 0, 0, 1)]))
    assert cache.block_table.sum() == 0


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_apply_swaps_out_then_in_then_copies_when_a_plan_asks_for_all(layout):
    cache = make_cache(layout=layout, host_blocks=3)
    number_blocks(cache)
    cache.host_pool.fill_(9)
    plan = make_plan(swap_out=[(1, 2), (5, 0)], swap_out_ids=[4, 4], swap_in=[(1, 3)], swap_in_ids=[5], copies=[(3, 4)])
    cache.apply(plan)
    assert [int(block.max()) for block in cache.host_pool] == [5, 9, 1]
    assert [int(block.max()) for block in cache.pool] == [0, 1, 2, 9, 9, 5]
    assert cache.finished_transfers(np.array([4, 5, 6])).tolist() == [4, 5]


def test_apply_moves_slots_before_blocks_go_out():
    cache = make_cache(backend="numpy", host_blocks=1)
    number_blocks(cache)
    cache.apply(make_plan(slot_moves=[(0, 9, 4)], swap_out=[(1, 0)], swap_out_ids=[1]))
    assert cache.host_pool[0, 0, 0, 0, :, 0].tolist() == [2, 1, 1, 1]


def test_apply_passes_over_a_transfer_when_it_was_started_before():
    cache = make_cache(backend="numpy", host_blocks=2)
    number_blocks(cache)
    cache.apply(make_plan(swap_out=[(1, 0)], swap_out_ids=[1]))
    cache.pool[1] = 7
    cache.apply(make_plan(swap_out=[(1, 0), (2, 1)], swap_out_ids=[1, 2]))
    assert cache.host_pool[:, 0, 0, 0, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "pair", "message"),
    [
        ("swap_out", (6, 0), r"plan.swap_out: expected pairs of blocks below \(6, 2\), found \[6, 0\]"),
        ("swap_in", (2, 1), r"plan.swap_in: expected pairs of blocks below \(2, 6\), found \[2, 1\]"),
        ("swap_in", (0, -1), r"plan.swap_in: expected pairs of blocks below \(2, 6\), found \[0, -1\]"),
    ],
)
def test_apply_names_the_swap_and_writes_nothing_when_it_is_outside(name, pair, message):
    cache = make_cache(backend="numpy", host_blocks=2)
    plan = make_plan(**{name: [pair], f"{name}_ids": [1], "table_updates": [(0, 0, 0, 1)]})
    with pytest.raises(InvalidArgumentError, match=message):
        cache.apply(plan)
    assert cache.block_table.sum() == 0


def test_apply_refuses_swaps_when_there_is_no_host_tier():
    with pytest.raises(InvalidArgumentError, match="host_blocks: expected a host tier, because the plan has swaps"):
        make_cache().apply(make_plan(swap_out=[(1, 0)], swap_out_ids=[1]))


def test_host_tier_has_the_blocks_of_the_configuration_when_nothing_else_is_said():
    cache_config = pagedkv.CacheConfig(16, 4, groups=[pagedkv.GroupSpec(2, 1, 8)], num_host_blocks=5)
    cache = KVCache.from_config(cache_config, pagedkv.SchedulerConfig(max_model_len=40))
    assert (cache.host_blocks, tuple(cache.host_pool.shape)) == (5, (5, 2, 2, 1, 4, 8))


def test_host_blocks_are_refused_when_they_are_negative():
    with pytest.raises(InvalidArgumentError, match="host_blocks: expected at least 0, found -1"):
        make_cache(host_blocks=-1)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ((1, 0, 0, 1), r"table_updates\[1, 0\]: expected a group below 1, found 1"),
        ((0, 5, 0, 1), r"table_updates\[1, 1\]: expected a row below 5, found 5"),
        ((0, 0, -1, 1), r"table_updates\[1, 2\]: expected a column below 7, found -1"),
        ((0, 0, 0, -3), r"table_updates\[1, 3\]: expected a block below 6, found -3"),
        ((0, 0, 0, 6), r"table_updates\[1, 3\]: expected a block below 6, found 6"),
    ],
)
def test_apply_names_the_cell_and_writes_nothing_when_it_is_outside(update, message):
    cache = make_cache(backend="numpy")
    with pytest.raises(ValueError, match=message):
        cache.apply(make_plan(table_updates=[(0, 0, 0, 1), update]))
    assert cache.block_table.sum() == 0


def test_copy_blocks_copies_all_layers_when_called_alone():
    cache = make_cache(layout="layer")
    number_blocks(cache)
    cache.copy_blocks(np.array([(5, 0)], np.int32))
    assert cache.pool[0].eq(5).all()


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_gather_kv_returns_what_was_appended_when_the_table_names_it(backend):
    cache = make_cache("float16", backend=backend)
    cache.apply(make_plan(table_updates=[(0, 3, 0, 5), (0, 3, 1, 2)]))
    k = torch.randn(6, 2, 8).half()
    slots = torch.tensor([20, 21, 22, 23, 8, 9])
    cache.append_kv(0, k, -k, slots)
    got_k, got_v = cache.gather_kv(0, np.array([6], np.int32), np.array([3], np.int32))
    np.testing.assert_array_equal(np.asarray(got_k), k.numpy())
    np.testing.assert_array_equal(np.asarray(got_v), -k.numpy())


def test_gather_kv_returns_bits_when_numpy_holds_bfloat16():
    cache = make_cache("bfloat16", backend="numpy")
    ones = np.ones((1, 2, 8), np.float32)
    cache.append_kv(0, ones, ones, np.array([0]))
    k, _ = cache.gather_kv(0, np.array([1], np.int32))
    assert k.dtype == np.uint16
    assert (k == 0x3F80).all()


@pytest.mark.parametrize(
    ("seq_lens", "rows", "error", "message"),
    [
        (np.array([2**31 - 1], np.int32), None, ValueError, r"seq_lens\[0\]: expected at most 28 .*, found 2147483647"),
        (np.array([4, -1], np.int32), None, ValueError, r"seq_lens\[1\]: expected a length, found -1"),
        (np.array([1], np.int32), np.array([5], np.int32), ValueError, r"rows\[0\]: expected a row below 5, found 5"),
        (5, None, TypeError, "seq_lens: expected an array that speaks DLPack, found int"),
    ],
)
def test_gather_kv_makes_no_output_when_a_length_is_refused(monkeypatch, seq_lens, rows, error, message):
    cache = make_cache()
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was allocated"))
    with pytest.raises(error, match=message):
        cache.gather_kv(0, seq_lens, rows)
    with pytest.raises(error, match=message):
        gather_kv(*cache.layer(0), cache.block_table[0], seq_lens, rows)


def test_apply_names_the_plan_when_it_is_none():
    with pytest.raises(TypeError, match="plan: expected a StepPlan, found NoneType"):
        make_cache().apply(None)


def test_pool_is_imported_once_when_operations_repeat():
    class Counting:
        imports = 0

        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options):
            type(self).imports += 1
            return self.array.__dlpack__(**options)

    cache = make_cache(pool=Counting(np.zeros(SHAPE, np.float32)))
    ones = np.ones((1, 2, 8), np.float32)
    for layer in range(3):
        cache.append_kv(layer, ones, ones, np.array([0]))
    cache.copy_blocks(np.array([(0, 1)], np.int32))
    assert Counting.imports == 1


def test_kv_cache_apply_writes_nothing_when_a_copy_is_outside_its_memory():
    scheduler = pagedkv.Scheduler(pagedkv.CacheConfig(64, 4), pagedkv.SchedulerConfig(8, 64, 128))
    scheduler.add_request("r", [1, 2, 3], max_tokens=6, n=2)
    scheduler.commit(scheduler.schedule(), [7, 8])
    small = KVCache(2, 4, 1, 1, 8, max_num_seqs=8, max_blocks_per_seq=32, backend="numpy")
    with pytest.raises(InvalidArgumentError, match="plan.copies: expected blocks below 2"):
        small.apply(scheduler.schedule())
    assert not small.block_table.any()
