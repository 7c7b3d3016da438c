"""Keys and values that are stored in another type than the weights."""

import math

import pytest
import torch

from pagedkv import CacheConfig, KVCache, SamplingParams, Scheduler, SchedulerConfig
from pagedkv.models import AttentionMetadata, TransformersModel

FP8 = ["float8_e4m3fn", "float8_e5m2"]
PROMPT = list(range(40))


def first_logits(model, cache_type=KVCache, **options):
    """Return the logits behind a prompt that ran in two chunks, and the cache."""
    paged = TransformersModel(model, **options)
    config = CacheConfig(16, 16, groups=paged.cache_groups())
    limits = SchedulerConfig(max_model_len=256, max_num_batched_tokens=24)
    scheduler, cache = Scheduler(config, limits), cache_type.from_config(config, limits)
    cache.pool.fill_(math.nan)
    scheduler.add_request("0", PROMPT, max_tokens=2)
    while True:
        plan = scheduler.schedule()
        cache.apply(plan)
        logits = paged.forward(plan, cache)
        if len(logits):
            return logits[0], cache
        scheduler.commit(plan, logits.argmax(-1).int())


@pytest.mark.parametrize("dtype", ["bfloat16", *FP8])
def test_logits_are_those_of_keys_and_values_that_were_rounded(tiny_model, dtype):
    class Rounding(KVCache):
        def append_kv(self, layer, k, v, slot_mapping, **_):
            k, v = (array.to(getattr(torch, dtype)).float() for array in (k, v))
            super().append_kv(layer, k, v, slot_mapping)

    want, _ = first_logits(tiny_model, Rounding)
    narrow, _ = first_logits(tiny_model, kv_cache_dtype=dtype)
    torch.testing.assert_close(narrow, want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("dtype", "bound"), [("float8_e4m3fn", 0.04), ("float8_e5m2", 0.08)])
def test_attention_of_a_step_is_close_to_that_of_bfloat16_when_the_cache_is_fp8(dtype, bound):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 40, 2, 16).bfloat16()
    index = (torch.arange(16, 56)[None], torch.arange(1, 5, dtype=torch.int32)[None, None], torch.zeros(1).int())
    outs = []
    for kind in ("bfloat16", dtype):
        cache = KVCache(5, 16, 1, 2, 16, kind, max_num_seqs=1, max_blocks_per_seq=4)
        scale = torch.tensor([0.5]) if kind == dtype else None
        step = AttentionMetadata(
            cache, *index, torch.tensor([40]).int(), torch.tensor([0, 40]).int(), k_scale=scale, v_scale=scale
        )
        options = {"softmax_scale": None, "sliding_window": None, "soft_cap": None, "sinks": None}
        outs.append(step.attend(0, q, k, v, **options).float())
    assert 0 < (outs[1] - outs[0]).norm() / outs[0].norm() < bound


@pytest.mark.parametrize("dtype", FP8)
def test_llm_generates_greedy_tokens_when_the_cache_is_fp8(tiny_model, open_llm, dtype):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [PROMPT, [*PROMPT, 7], [3, 4]]
    with open_llm(tiny_model, block_size=8, kv_cache_dtype=dtype) as llm:
        cold, warm = ([o.outputs[0].token_ids for o in llm.generate(prompts, params, False)] for _ in range(2))
        assert llm.kv_cache.dtype == dtype
        llm.scheduler.check_integrity()
    assert [len(token_ids) for token_ids in cold] == [20] * 3
    assert warm == cold


@pytest.mark.parametrize("options", [{}, {"num_blocks": 6, "preemption_mode": "swap"}], ids=["roomy", "swapped"])
def test_llm_generates_the_tokens_of_natural_keys_when_keys_are_packed(tiny_model, open_llm, options):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [PROMPT, [*PROMPT, 7], [3, 4]]
    tokens = {}
    for packed_keys in (False, True):
        with open_llm(tiny_model, block_size=16, packed_keys=packed_keys, **options) as llm:
            tokens[packed_keys] = [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]
            num_preemptions = llm.scheduler.num_preemptions
            assert llm.kv_cache.packed is packed_keys
    assert tokens[True] == tokens[False]
    assert (num_preemptions > 0) is bool(options)


def test_block_takes_a_quarter_of_the_bytes_when_the_cache_of_float32_weights_is_fp8(tiny_model, open_llm):
    sizes = []
    for dtype in ("auto", "float8_e4m3fn"):
        with open_llm(tiny_model, num_blocks=8, kv_cache_dtype=dtype) as llm:
            sizes.append(llm.kv_cache.num_bytes)
    assert sizes[0] == 4 * sizes[1]


def test_cache_takes_torchs_name_of_a_type(tiny_model, open_llm):
    with open_llm(tiny_model, kv_cache_dtype=torch.bfloat16) as llm:
        assert llm.kv_cache.dtype == "bfloat16"


def test_stored_numbers_are_divided_by_the_scales(tiny_model):
    plain_logits, plain = first_logits(tiny_model, kv_cache_dtype="float8_e5m2")
    logits, scaled = first_logits(tiny_model, kv_cache_dtype="float8_e5m2", k_scale=0.5, v_scale=0.25)
    for layer, factor in ((0, 2), (1, 4)):
        stored, expected = (cache.pool[:, 0, layer].float() for cache in (scaled, plain))
        is_written = expected.isfinite() & (expected.abs() > 1e-3)
        assert torch.equal(stored[is_written], factor * expected[is_written])
    torch.testing.assert_close(logits, plain_logits, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_scale": 0.5}, "k_scale: expected 1 beside a cache that is not FP8, found 0.5 and float32"),
        ({"v_scale": 2.0, "kv_cache_dtype": "bfloat16"}, "v_scale: expected 1 beside a cache that is not FP8"),
        ({"k_scale": 0.0, "kv_cache_dtype": "float8_e4m3fn"}, "k_scale: expected a finite number above 0, found 0.0"),
        ({"v_scale": math.nan}, "v_scale: expected a finite number above 0, found nan"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected one of auto, float32, .*, found 'fp8'"),
        ({"packed_keys": True, "block_size": 8}, "block_size: expected a multiple of 16, because"),
        ({"kv_cache_dtype": torch.int8}, "kv_cache_dtype: expected one of auto, float32, .*, found torch.int8"),
    ],
    ids=str,
)
def test_llm_names_the_argument_when_a_cache_cannot_be_stored_so(tiny_model, open_llm, options, message):
    with pytest.raises(ValueError, match=message):
        open_llm(tiny_model, **options)
