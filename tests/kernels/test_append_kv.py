import numpy as np
import pytest
import torch

from pagedkv import reference
from pagedkv.kv_cache import append_kv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM = 7, 3, 5, 16


def name(dtype):
    return str(dtype).removeprefix("torch.")


def make_tokens(num_tokens, dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.randn(num_tokens, HEADS, HEAD_DIM).to(dtype) for _ in range(2)]


def make_slots(*slots):
    return torch.tensor(slots, dtype=torch.int64)


@pytest.fixture
def caches(make_pool):
    """Return the caches of one layer, and the pool that holds them."""
    pool = make_pool(NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM)
    return pool[:, 1, 0], pool[:, 1, 1], pool


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=name)
def test_append_kv_matches_oracle_when_types_and_layout_vary(operations, make_pool, dtype, cache_dtype, layout):
    pool = make_pool(NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM, cache_dtype, layout)
    k, v = make_tokens(8, dtype)
    slots = make_slots(34, 0, -1, 7, 6, 5, -1, 20)
    want = pool.float().numpy()
    exact = [tokens.to(cache_dtype).float().numpy() for tokens in (k, v)]
    reference.append_kv(*exact, want[:, 1, 0], want[:, 1, 1], slots.numpy())
    operations.append_kv(k, v, pool[:, 1, 0], pool[:, 1, 1], slots)
    np.testing.assert_array_equal(pool.float().numpy(), want)


def test_append_kv_reads_the_right_rows_when_k_and_v_are_parts_of_one_array(operations, caches):
    k_cache, v_cache, _ = caches
    fused = torch.randn(4, 3, HEADS, HEAD_DIM)
    operations.append_kv(fused[:, 1], fused[:, 2], k_cache, v_cache, make_slots(3, 2, 1, 0))
    assert torch.equal(k_cache[0, :, :4], fused[:, 1].flip(0).transpose(0, 1))
    assert torch.equal(v_cache[0, :, :4], fused[:, 2].flip(0).transpose(0, 1))


def test_append_kv_keeps_the_later_token_when_a_slot_comes_twice(caches):
    k_cache, v_cache, _ = caches
    k, v = make_tokens(3)
    append_kv(k, v, k_cache, v_cache, make_slots(9, 9, -1))
    assert torch.equal(k_cache[1, :, 4], k[1])
    assert torch.equal(v_cache[1, :, 4], v[1])


@pytest.mark.parametrize("num_threads", [1, 4], indirect=True)
def test_append_kv_keeps_the_last_token_of_each_slot_when_there_are_many(make_pool, num_threads):
    pool = make_pool(40, HEADS, BLOCK_SIZE, 128)
    k, v = torch.randn(2, 2000, HEADS, 128)
    slots = torch.randint(-1, 40 * BLOCK_SIZE, (2000,))
    want = pool.numpy().copy()
    reference.append_kv(k.numpy(), v.numpy(), want[:, 1, 0], want[:, 1, 1], slots.numpy())
    append_kv(k, v, pool[:, 1, 0], pool[:, 1, 1], slots)
    np.testing.assert_array_equal(pool.numpy(), want)


@pytest.mark.parametrize("num_threads", [1, 4], indirect=True)
def test_append_kv_matches_oracle_when_runs_of_slots_are_split_among_threads(make_pool, num_threads):
    pool = make_pool(200, HEADS, BLOCK_SIZE, 128, torch.bfloat16)
    k, v = torch.randn(2, 900, HEADS, 128).bfloat16()
    slots = (torch.randperm(180)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    want = pool.float().numpy()
    reference.append_kv(k.float().numpy(), v.float().numpy(), want[:, 1, 0], want[:, 1, 1], slots.numpy())
    append_kv(k, v, pool[:, 1, 0], pool[:, 1, 1], slots)
    np.testing.assert_array_equal(pool.float().numpy(), want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_append_kv_divides_by_the_scale_of_each_head_when_the_cache_is_fp8(operations, make_pool, dtype):
    pool = make_pool(NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM, dtype)
    k, v = make_tokens(6)
    k_scale, v_scale = torch.tensor([0.25, 1.0, 4.0]), torch.tensor([0.5])
    operations.append_kv(
        k, v, pool[:, 1, 0], pool[:, 1, 1], make_slots(0, 1, 2, 3, 4, 5), k_scale=k_scale, v_scale=v_scale
    )
    want_k = (k / k_scale[:, None]).to(dtype).float()
    want_v = (v / v_scale).to(dtype).float()
    rows = pool[:2, 1].float().transpose(2, 3)
    stored = torch.cat([rows[0], rows[1]], dim=1)[:, :6]
    torch.testing.assert_close(stored[0], want_k, atol=0, rtol=0)
    torch.testing.assert_close(stored[1], want_v, atol=0, rtol=0)


def test_append_kv_stores_the_largest_number_when_fp8_has_no_larger_one(operations, make_pool):
    pool = make_pool(NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM, torch.float8_e4m3fn)
    k = torch.full((1, HEADS, HEAD_DIM), 1e6)
    operations.append_kv(k, -k, pool[:, 1, 0], pool[:, 1, 1], make_slots(0))
    assert (pool[0, 1, 0, :, 0].float() == 448).all()
    assert (pool[0, 1, 1, :, 0].float() == -448).all()


def test_append_kv_writes_nothing_when_there_are_no_tokens(operations, caches):
    k_cache, v_cache, pool = caches
    operations.append_kv(*make_tokens(0), k_cache, v_cache, make_slots())
    assert pool.isnan().all()


def test_append_kv_takes_an_empty_array_when_its_strides_are_zero(caches):
    k_cache, v_cache, pool = caches
    nothing = np.broadcast_to(np.zeros((1, 1, 1), np.float32), (0, k_cache.shape[1], k_cache.shape[3]))
    append_kv(nothing, nothing, k_cache, v_cache, make_slots())
    assert pool.isnan().all()


def test_append_kv_rounds_the_quotient_when_a_product_with_the_inverse_would_round_elsewhere(operations, make_pool):
    """The quotient lies in the middle between two numbers of FP8, the product just below it."""
    scale, value = torch.tensor([0.14285715]), torch.tensor(0.24107143)
    assert value / scale == 1.6875
    assert value * (1 / scale) < 1.6875
    pool = make_pool(NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM, torch.float8_e4m3fn, fill=0)
    k, v = (value.expand(1, HEADS, HEAD_DIM).contiguous() for _ in range(2))
    operations.append_kv(k, v, pool[:, 1, 0], pool[:, 1, 1], make_slots(0), k_scale=scale, v_scale=scale)
    assert pool[0, 1, :, :, 0].float().unique().tolist() == [1.75]


@pytest.mark.parametrize("num_threads", [1, 2, 4], indirect=True)
def test_append_kv_matches_oracle_when_threads_share_the_work(num_threads):
    torch.manual_seed(num_threads)
    k, v = torch.randn(2, 1000, 4, 80)
    cache, want = np.zeros((2, 2, 70, 4, 16, 80), np.float32)
    slots = torch.randint(-1, 70 * 16, (1000,))
    append_kv(k, v, *cache, slots)
    reference.append_kv(k.numpy(), v.numpy(), *want, slots.numpy())
    np.testing.assert_array_equal(cache, want)


@pytest.mark.parametrize(("slot", "index"), [(35, 2), (-2, 0), (2**40, 1), (-(2**63), 2)])
def test_append_kv_names_the_slot_and_writes_nothing_when_it_is_outside(caches, slot, index):
    k_cache, v_cache, pool = caches
    slots = make_slots(0, 1, 2)
    slots[index] = slot
    with pytest.raises(ValueError, match=rf"slot_mapping\[{index}\]: expected -1 or a slot below 35, found {slot}"):
        append_kv(*make_tokens(3), k_cache, v_cache, slots)
    assert pool.isnan().all()


REFUSED = [
    ("k", lambda a: a.double(), TypeError, r"k: expected dtype float32, .*, found float64"),
    ("k", lambda a: a.int(), TypeError, r"k: expected dtype float32, float16 or bfloat16, found int32"),
    (
        "v",
        lambda a: a[1:],
        ValueError,
        r"v: expected shape \(num_tokens=3, num_kv_heads=3, head_dim=16\), found \(2, 3",
    ),
    ("v", lambda a: a.mT.contiguous().mT, ValueError, r"v: expected stride 1 in the last dimension, found strides"),
    (
        "k_cache",
        lambda a: a[:, :2],
        ValueError,
        r"k_cache: expected shape \(.*, num_kv_heads=3, .*\), found \(7, 2, 5, 16\)",
    ),
    ("v_cache", lambda a: a[:6], ValueError, r"v_cache: expected shape \(num_blocks=7, .*\), found \(6, 3, 5, 16\)"),
    ("v_cache", lambda a: a.int(), TypeError, r"v_cache: expected dtype .*, found int32"),
    ("k_scale", lambda _: torch.ones(1), ValueError, r"k_scale: expected none beside a cache that is not FP8, found a"),
    (
        "k_cache",
        lambda a: a[:1].expand(7, 3, 5, 16),
        ValueError,
        r"k_cache: expected an output whose elements do not overl",
    ),
    ("slot_mapping", lambda a: a.int(), TypeError, r"slot_mapping: expected dtype int64, found int32"),
    ("slot_mapping", lambda a: a[1:], ValueError, r"slot_mapping: expected shape \(num_tokens=3,\), found \(2,\)"),
    ("slot_mapping", lambda a: a[None], ValueError, r"slot_mapping: expected shape \(n,\), found \(1, 3\)"),
    (
        "slot_mapping",
        lambda a: a.tolist(),
        TypeError,
        r"slot_mapping: expected an array that speaks DLPack, found list",
    ),
]


@pytest.mark.parametrize(("argument", "change", "error", "message"), REFUSED)
def test_append_kv_names_the_argument_when_it_is_refused(caches, argument, change, error, message):
    k_cache, v_cache, pool = caches
    k, v = make_tokens(3)
    arguments = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": make_slots(0, 1, 2)}
    arguments[argument] = change(arguments.get(argument))
    with pytest.raises(error, match=message):
        append_kv(**arguments)
    assert pool.isnan().all()


def test_append_kv_refuses_a_cache_when_it_is_read_only():
    cache = np.zeros((2, NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM), np.float32)
    cache.setflags(write=False)
    with pytest.raises(ValueError, match="k_cache: expected writable memory, found a read-only array"):
        append_kv(*make_tokens(1), cache[0], cache[1], make_slots(0))


def test_append_kv_refuses_keys_when_they_lie_in_the_cache(caches):
    k_cache, v_cache, _ = caches
    inside = v_cache[:, :, 0]
    with pytest.raises(ValueError, match="_cache: expected memory of its own, found an overlap with k"):
        append_kv(inside, inside, k_cache, v_cache, make_slots(*range(7)))
