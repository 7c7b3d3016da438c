"""Several cache groups in one pool: what each layer sees of it, and which blocks belong to it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagedkv import CacheConfig, GroupSpec, SchedulerConfig, reference
from pagedkv.attention import paged_attention
from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kv_cache import KVCache, Tensor, from_dlpack

NUM_BLOCKS = 9
LIMITS = SchedulerConfig(max_num_seqs=3, max_model_len=30)
NONE = {"table_updates": (0, 4), "slot_moves": (0, 3), "swap_out": (0, 2), "swap_in": (0, 2), "copies": (0, 2)}


def fake_config(*groups, num_layer_slots=2):
    """Return what `CacheConfig` refuses: groups of (layers, num_kv_heads, head_dim, block_size, dtype, window)."""
    names = ("layers", "num_kv_heads", "head_dim", "block_size", "dtype", "sliding_window")
    specs = [SimpleNamespace(num_layers=0, **dict(zip(names, group, strict=True))) for group in groups]
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": 4, "num_layer_slots": num_layer_slots, "num_host_blocks": 0}
    return SimpleNamespace(**sizes, groups=specs)


def make_config(*groups):
    return CacheConfig(NUM_BLOCKS, 4, groups=groups)


# Layers 1 and 3 see all tokens; the others have heads of half the size and a window, and are split into two groups.
TWO_HEAD_DIMS = make_config(GroupSpec([1, 3], 2, 16), GroupSpec([0, 2, 4, 5], 2, 8, sliding_window=5))
TWO_DTYPES = make_config(GroupSpec([0, 1], 2, 8), GroupSpec([2, 3], 2, 8, "bfloat16"))
EQUAL_SHAPES = make_config(GroupSpec([0, 1], 2, 8), GroupSpec([2, 3], 2, 8, sliding_window=6))


def make_cache(config=TWO_HEAD_DIMS, **options):
    return KVCache.from_config(config, LIMITS, **options)


def make_plan(**arrays):
    """Return a plan that asks of the memory what the arrays say and nothing else."""
    empty = {name: np.zeros(shape, np.int64 if name == "slot_moves" else np.int32) for name, shape in NONE.items()}
    given = {name: np.array(rows, empty[name].dtype) for name, rows in arrays.items()}
    return SimpleNamespace(**(empty | given))


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_kv_cache_has_one_pool_and_a_table_per_group(backend):
    cache = make_cache(backend=backend)
    assert tuple(cache.pool.shape) == (NUM_BLOCKS, 2, 2, 2, 4, 16)
    assert cache.num_bytes == cache.pool.nbytes == NUM_BLOCKS * 2 * 2 * 2 * 4 * 16 * 4
    assert tuple(cache.block_table.shape) == (3, 3, 8)  # 30 tokens in the smallest blocks, those of 4
    assert (cache.num_layers, cache.num_layer_slots) == (6, 2)


def test_kv_cache_finds_the_group_of_a_layer():
    assert [make_cache().group_of(layer) for layer in range(6)] == [1, 0, 1, 0, 2, 2]


def test_kv_cache_reports_slots_without_a_layer():
    sizes = (2, 8, 4, "float32", None)
    assert make_cache(fake_config(([0, 1], *sizes), ([2, 3], *sizes), ([4], *sizes))).padding == pytest.approx(1 / 6)
    assert make_cache().padding == 0


def test_kv_cache_describes_its_groups():
    groups = make_cache().groups
    assert [(group.layers, group.block_size, group.sliding_window) for group in groups] == [
        ((1, 3), 4, None),
        ((0, 2), 8, 5),
        ((4, 5), 8, 5),
    ]


@pytest.mark.parametrize("name", ["head_dim", "block_size"])
def test_kv_cache_has_no_single_answer_where_groups_differ(name):
    cache = make_cache()
    assert (cache.num_kv_heads, cache.dtype) == (2, "float32")
    with pytest.raises(AttributeError, match=f"{name}: the groups differ"):
        getattr(cache, name)


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_layers_of_all_groups_have_the_shape_of_their_group(backend, layout):
    cache = make_cache(backend=backend, layout=layout)
    shapes = [tuple(cache.layer(layer)[0].shape) for layer in range(6)]
    wide, narrow = (NUM_BLOCKS, 2, 4, 16), (NUM_BLOCKS, 2, 8, 8)
    assert shapes == [narrow, wide, narrow, wide, narrow, narrow]
    assert [cache.layer_tensors(layer)[1].shape for layer in range(6)] == shapes


@pytest.mark.parametrize("config", [TWO_HEAD_DIMS, TWO_DTYPES, EQUAL_SHAPES], ids=["head_dims", "dtypes", "equal"])
@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_layers_hold_what_was_written_when_each_block_belongs_to_one_group(backend, layout, config):
    cache = make_cache(config, backend=backend, layout=layout)
    written = {}
    for layer in range(cache.num_layers):
        group = cache.groups[cache.group_of(layer)]
        # Two blocks of its own for each group.
        first = (1 + 2 * cache.group_of(layer)) * group.block_size
        slots = np.arange(first, first + 2 * group.block_size)
        k = torch.randn(len(slots), group.num_kv_heads, group.head_dim).bfloat16().float()
        cache.append_kv(layer, k, -k, slots)
        written[layer] = k
    cells = [(number, 0, column, 1 + 2 * number + column) for number in range(len(cache.groups)) for column in (0, 1)]
    cache.apply(make_plan(table_updates=cells))
    for layer, k in written.items():
        assert cache.gather_kv(layer, np.array([len(k)], np.int32), np.array([0], np.int32))[0].shape == k.shape
        both = cache.gather_kv(layer, np.array([len(k)], np.int32))
        got_k, got_v = (as_float(array) for array in both)
        torch.testing.assert_close(got_k, k, rtol=0, atol=0)
        torch.testing.assert_close(got_v, -k, rtol=0, atol=0)


def as_float(array):
    if isinstance(array, np.ndarray):
        bits = array.dtype == np.uint16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float() if bits else torch.from_numpy(array)
    return array.float()


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_layer_is_a_view_of_the_pools_bytes_when_groups_differ(backend, layout):
    cache = make_cache(TWO_DTYPES, backend=backend, layout=layout)
    cache.pool[...] = 0
    k_cache, v_cache = cache.layer(3)
    k_cache[5], v_cache[5] = 1, 2
    changed = (cache.pool != 0).any(-1).any(-1).any(-1)
    assert np.argwhere(np.asarray(changed)).tolist() == [[5, 1, 0], [5, 1, 1]]


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_copies_take_whole_blocks_of_every_group_once(layout):
    cache = make_cache(layout=layout)
    cache.pool[...] = 0
    for layer in range(6):
        for array in cache.layer(layer):
            array[3 if cache.group_of(layer) else 2] = layer + 1
    cache.apply(make_plan(copies=[(2, 4), (3, 5)]))
    assert [float(cache.layer(layer)[1][5 if cache.group_of(layer) else 4].min()) for layer in (1, 3)] == [2, 4]
    assert torch.equal(cache.pool[5], cache.pool[3])


def test_apply_writes_the_tables_of_all_groups():
    cache = make_cache(backend="numpy")
    cache.apply(make_plan(table_updates=[(0, 1, 7, 3), (1, 1, 0, 4), (2, 2, 1, 8)]))
    assert np.argwhere(cache.block_table).tolist() == [[0, 1, 7], [1, 1, 0], [2, 2, 1]]
    assert cache.table_tensors()[2].shape == (3, 8)
    assert np.from_dlpack(cache.table_tensors()[2])[2, 1] == 8


@pytest.mark.parametrize("group", [-1, 3])
def test_apply_names_the_group_when_there_is_none_of_that_number(group):
    cache = make_cache(backend="numpy")
    with pytest.raises(ValueError, match=rf"table_updates\[1, 0\]: expected a group below 3, found {group}"):
        cache.apply(make_plan(table_updates=[(0, 0, 0, 1), (group, 0, 0, 1)]))
    assert not cache.block_table.any()


def test_attention_reads_a_layer_by_its_groups_blocks():
    cache = make_cache()
    cache.pool.fill_(float("nan"))
    torch.manual_seed(0)
    # 19 tokens; the window of 5 leaves layer 0 blocks 1 and 2 of 8 tokens, and the null block before them.
    cache.apply(make_plan(table_updates=[*((0, 2, i, 1 + i) for i in range(5)), (1, 2, 1, 6), (1, 2, 2, 7)]))
    q, k = {1: torch.randn(1, 4, 16), 0: torch.randn(1, 4, 8)}, {}
    for layer, first in ((1, 0), (0, 8)):
        group = cache.groups[cache.group_of(layer)]
        k[layer] = torch.randn(19, 2, group.head_dim)
        table = cache.block_table[cache.group_of(layer), 2].long()
        positions = torch.arange(first, 19)
        slots = table[positions // group.block_size] * group.block_size + positions % group.block_size
        cache.append_kv(layer, k[layer][first:], k[layer][first:], slots)
    lens, starts, rows = (np.array(values, np.int32) for values in ([19], [0, 1], [2]))
    for layer, window in ((1, None), (0, 5)):
        table = cache.table_tensors()[cache.group_of(layer)]
        out = paged_attention(q[layer], *cache.layer_tensors(layer), table, lens, starts, rows, sliding_window=window)
        dense = k[layer].transpose(0, 1)[None].double().numpy()
        want = reference.paged_attention(
            q[layer].double().numpy(), dense, dense, np.array([[0]]), lens, starts, sliding_window=window
        )
        np.testing.assert_allclose(out.numpy(), want, atol=1e-5)


@pytest.mark.parametrize("permutation", [(0, 1, 2, 3, 4, 5), (1, 0, 2, 3, 4, 5)])
def test_given_pool_is_seen_by_every_group_when_a_layers_part_is_one_span(permutation):
    shape = (NUM_BLOCKS, 2, 2, 2, 4, 16)
    memory = torch.zeros([shape[axis] for axis in permutation])
    cache = make_cache(pool=memory.permute(*np.argsort(permutation).tolist()))
    ones = torch.ones(1, 2, 8)
    cache.append_kv(4, ones, ones, torch.tensor([3 * 8 + 7]))
    assert memory.sum() == 2 * 2 * 8


def test_given_pool_of_another_library_is_seen_by_every_group():
    pool = np.zeros((NUM_BLOCKS, 2, 2, 2, 4, 16), np.float32)
    cache = make_cache(pool=from_dlpack(pool), backend="numpy")
    k_cache, _ = cache.layer(2)
    assert isinstance(k_cache, Tensor)
    assert np.from_dlpack(k_cache).shape == (NUM_BLOCKS, 2, 8, 8)
    assert np.shares_memory(np.from_dlpack(k_cache), pool)


def test_given_pool_is_refused_when_groups_differ_and_slots_are_outermost():
    memory = torch.zeros(NUM_BLOCKS, 4, 2, 2, 2, 16)
    with pytest.raises(InvalidArgumentError, match="^pool: expected one span of memory from dimension 2 on"):
        make_cache(pool=memory.permute(0, 2, 3, 4, 1, 5))
    strided = KVCache.from_config(
        EQUAL_SHAPES, LIMITS, pool=torch.zeros(NUM_BLOCKS, 4, 2, 2, 2, 8).permute(0, 2, 3, 4, 1, 5)
    )
    assert strided.layer(3)[0].shape == (NUM_BLOCKS, 2, 4, 8)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (fake_config(), ValueError, "cache_config: expected groups that describe the layers, found none"),
        (
            fake_config(([0], 2, 8, 4, "float32", None), ([1], 2, 8, 8, "float32", None)),
            ValueError,
            r"groups: expected equal bytes per block and layer, found \[512, 1024\]",
        ),
        (
            fake_config(([0, 1], 2, 8, 4, "float32", None), ([1], 2, 8, 4, "float32", None)),
            ValueError,
            "groups: expected each layer once, found layer 1 again",
        ),
    ],
)
def test_configuration_is_refused_when_its_groups_do_not_fit_one_pool(config, error, message):
    with pytest.raises(error, match=message):
        make_cache(config)


@pytest.mark.parametrize(("layer", "found"), [(6, "6"), (-1, "-1")])
def test_layer_is_refused_when_no_group_has_it(layer, found):
    with pytest.raises(InvalidArgumentError, match=f"layer: expected 0 to 5, found {found}"):
        make_cache().group_of(layer)
