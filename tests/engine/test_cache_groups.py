"""Models whose layers see windows, or differ in head dimension, have cache groups and give transformers' tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagedkv import CacheConfig, GroupSpec, KVCache, SamplingParams, Scheduler, SchedulerConfig
from pagedkv.config import choose_layer_slots
from pagedkv.engine.cache_size import choose_num_blocks
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.models import AttentionMetadata, TransformersModel
from pagedkv.planning.layers import LayerShape, group_layers

WINDOW = 32
BLOCK_SIZE = 4
LENGTHS = (1, 17, 45, 70, 120)
SLIDING, FULL = "sliding_attention", "full_attention"
# A seed that leaves the margin that `reference` asks for, and options beside those of `build`.
MODELS = {
    # Two head dimensions: 16 in the layers with a window, 32 in the others.
    "gemma4_text": (
        0,
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": (
        0,
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": (
        0,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attn_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
    ),
    # Sinks, and a window in every other layer.
    "gpt_oss": (
        2,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # A window from the third layer on.
    "qwen2": (0, {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2}),
    # A window in every layer.
    "mistral": (1, {"head_dim": 16}),
}
# Layers and window of each group.
GROUPS = {
    "gemma4_text": [([2, 5], None), ([0, 1], WINDOW), ([3, 4], WINDOW)],
    "gemma3_text": [([2, 5], None), ([0, 1], WINDOW), ([3, 4], WINDOW)],
    "gemma2": [([1, 3], None), ([0, 2], WINDOW)],
    "gpt_oss": [([1, 3], None), ([0, 2], WINDOW)],
    "qwen2": [([0, 1], None), ([2, 3], WINDOW)],
    "mistral": [([0, 1, 2], WINDOW)],
}


@pytest.fixture(scope="module", params=MODELS)
def case(request, make_case):
    """Return one model with windows after the other."""
    seed, options = MODELS[request.param]
    return make_case(request.param, seed, LENGTHS, num_key_value_heads=2, sliding_window=WINDOW, **options)


@pytest.fixture(scope="module")
def gemma4(make_case):
    """Return a model of two head dimensions."""
    seed, options = MODELS["gemma4_text"]
    return make_case("gemma4_text", seed, LENGTHS, num_key_value_heads=2, sliding_window=WINDOW, **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def family(case):
    return case.model.config.model_type


def test_groups_are_the_models_shapes_and_windows(case, open_llm):
    with open_llm(case.model, block_size=BLOCK_SIZE) as llm:
        groups = llm.kv_cache.groups
    assert [(list(group.layers), group.sliding_window) for group in groups] == GROUPS[family(case)]


def test_groups_of_two_head_dims_have_blocks_of_two_sizes(gemma4, open_llm):
    with open_llm(gemma4.model, block_size=BLOCK_SIZE) as llm:
        groups = llm.kv_cache.groups
    assert [(group.head_dim, group.block_size) for group in groups] == [(32, 4), (16, 8), (16, 8)]


ALIKE_IN_BYTES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


@pytest.mark.parametrize(
    "options",
    [ALIKE_IN_BYTES, {"num_kv_shared_layers": 2}],
    ids=["heads_that_make_up_for_head_dims", "layers_that_read_anothers_keys"],
)
def test_variant_of_a_model_with_groups_gives_the_same_tokens(make_case, open_llm, options):
    seed, sizes = MODELS["gemma4_text"]
    case = make_case("gemma4_text", seed, LENGTHS, num_key_value_heads=2, sliding_window=WINDOW, **sizes, **options)
    with open_llm(case.model, block_size=BLOCK_SIZE, max_num_batched_tokens=32) as llm:
        assert {group.block_size for group in llm.kv_cache.groups} == ({4} if options is ALIKE_IN_BYTES else {4, 8})
        assert tokens(llm.generate(case.prompts, case.params, use_tqdm=False)) == case.expected


OPTIONS = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16},
    "two_plans_in_flight": {"max_plans_in_flight": 2, "max_num_batched_tokens": 64},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "three_seats": {"max_num_seqs": 3},
    "blocks_of_32": {"block_size": 32},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_model_with_groups_gives_the_same_tokens(case, open_llm, options):
    with open_llm(case.model, **({"block_size": BLOCK_SIZE} | options)) as llm:
        outputs = llm.generate(case.prompts, case.params, use_tqdm=False)
        llm.scheduler.check_integrity()
    assert tokens(outputs) == case.expected


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_model_with_groups_gives_the_same_tokens_when_requests_are_preempted(case, open_llm, max_plans_in_flight):
    options = {"max_num_batched_tokens": 8, "max_plans_in_flight": max_plans_in_flight}
    num_blocks = blocks_per_sequence(case, **options) + 1
    with open_llm(case.model, block_size=BLOCK_SIZE, num_blocks=num_blocks, max_model_len=160, **options) as llm:
        outputs = llm.generate(case.prompts, case.params, use_tqdm=False)
        num_preemptions = llm.scheduler.num_preemptions
        llm.scheduler.check_integrity()
    assert tokens(outputs) == case.expected
    assert num_preemptions > 0


def blocks_per_sequence(case, **limits):
    """Return the most blocks that one sequence of 160 tokens takes in all groups."""
    groups = TransformersModel(case.model).cache_groups()
    config = CacheConfig(2, BLOCK_SIZE, groups=groups, num_layer_slots=choose_layer_slots(groups))
    return choose_num_blocks(config, SchedulerConfig(max_num_seqs=1, max_model_len=160, **limits)) - 1


def test_model_with_groups_gives_the_same_tokens_when_the_prefix_cache_is_warm(case, open_llm):
    with open_llm(case.model, block_size=BLOCK_SIZE) as llm:
        cold = llm.generate(case.prompts, case.params, use_tqdm=False)
        warm = llm.generate(case.prompts, case.params, use_tqdm=False)
        llm.scheduler.check_integrity()
    assert tokens(cold) == tokens(warm) == case.expected
    assert [output.num_cached_tokens for output in warm] >= [0, 16, 40, 64, 112]


@pytest.mark.parametrize("when", ["before_apply", "after_apply", "after_forward", "with_plan_behind"])
def test_model_with_groups_gives_the_same_tokens_after_rollbacks(case, generate_with_rollbacks, when):
    assert generate_with_rollbacks(case, when, block_size=BLOCK_SIZE) == case.expected


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 16}, {"max_plans_in_flight": 2}, {"num_blocks": 112}],
    ids=["chunks", "two_plans_in_flight", "preemption"],
)
def test_samples_of_a_model_with_groups_are_the_same_whatever_else_runs(gemma4, open_llm, options):
    params = SamplingParams(n=3, max_tokens=40, seed=7, temperature=0.8, top_k=40)
    prompt = gemma4.prompts[3]
    with open_llm(gemma4.model, block_size=BLOCK_SIZE) as llm:
        cold, warm = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    alone = [completion.token_ids for completion in cold.outputs]
    assert [completion.token_ids for completion in warm.outputs] == alone
    assert warm.num_cached_tokens >= 64
    with open_llm(gemma4.model, block_size=BLOCK_SIZE, max_model_len=160, **options) as llm:
        rest = SamplingParams(n=2, max_tokens=40, seed=3)
        crowd = llm.generate([*gemma4.prompts, prompt], [rest] * 5 + [params], use_tqdm=False)
        assert (llm.scheduler.num_preemptions > 0) == ("num_blocks" in options)
        llm.scheduler.check_integrity()
    assert [completion.token_ids for completion in crowd[5].outputs] == alone


def peak_bytes(case, groups):
    """Return the tokens of a loop over a cache of these groups, and the most bytes that sequences held."""
    model = TransformersModel(case.model)
    config = CacheConfig(512, BLOCK_SIZE, groups=groups, num_layer_slots=choose_layer_slots(groups))
    limits = SchedulerConfig(max_num_batched_tokens=16, max_model_len=160)
    scheduler, cache = Scheduler(config, limits), KVCache.from_config(config, limits)
    cache.pool.fill_(float("nan"))
    handles = [scheduler.add_request(str(i), p, max_tokens=case.max_tokens) for i, p in enumerate(case.prompts)]
    outputs = {handle: [] for handle in handles}
    peak = 0
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        cache.apply(plan)
        drawn = model.forward(plan, cache).argmax(-1).int()
        result = scheduler.commit(plan, drawn)
        for handle, token in zip(result.handles.tolist(), drawn.tolist(), strict=True):
            outputs[handle].append(token)
        _, _, held, _ = scheduler.num_blocks_by_state
        peak = max(peak, held * config.block_bytes)
    return [outputs[handle] for handle in handles], peak


def test_groups_hold_less_than_one_that_keeps_all_tokens(case):
    model = TransformersModel(case.model)
    endless = {layer: LayerShape(shape.num_kv_heads, shape.head_dim, None) for layer, shape in model.layers.items()}
    with_groups, least = peak_bytes(case, model.cache_groups())
    without, most = peak_bytes(case, group_layers(endless, model.dtype))
    assert with_groups == without == case.expected
    assert least < 0.8 * most


def test_window_groups_hold_the_windows_blocks_only(gemma4):
    model = TransformersModel(gemma4.model)
    config = CacheConfig(512, BLOCK_SIZE, groups=model.cache_groups())
    limits = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=240)
    scheduler, cache = Scheduler(config, limits), KVCache.from_config(config, limits)
    cache.pool.fill_(float("nan"))
    handle = scheduler.add_request("a", gemma4.prompts[3], max_tokens=120)
    most = [0] * 3
    while True:
        plan = scheduler.schedule()
        cache.apply(plan)
        drawn = model.forward(plan, cache).argmax(-1).int()
        scheduler.commit(plan, drawn)
        if not scheduler.has_unfinished_requests():
            break
        for group in range(3):
            held = np.count_nonzero(scheduler.block_table(handle, group=group))
            most[group] = max(most[group], held)
    assert most[0] == 47  # 188 computed tokens in blocks of 4
    assert most[1:] == [5, 5]  # the 31 tokens before the next one in blocks of 8


def test_hand_made_plan_runs_a_model_with_groups(gemma4):
    model = TransformersModel(gemma4.model)
    groups = model.cache_groups()
    config = CacheConfig(64, BLOCK_SIZE, groups=groups)
    cache = KVCache.from_config(config, SchedulerConfig(max_num_seqs=2, max_model_len=64))
    prompt = np.array(gemma4.prompts[2], np.int32)
    positions = np.arange(len(prompt), dtype=np.int32)
    slots = []
    for number, group in enumerate(cache.groups):
        blocks = 1 + 20 * number + positions // group.block_size
        cache.block_table[number, 1, : blocks[-1] - blocks[0] + 1] = torch.arange(blocks[0], blocks[-1] + 1)
        slots.append(blocks * group.block_size + positions % group.block_size)
    plan = SimpleNamespace(
        token_ids=prompt,
        positions=positions,
        sample_rows=positions,
        slot_mapping=np.array(slots, np.int64),
        rows=np.array([1], np.int32),
        seq_lens=np.array([len(prompt)], np.int32),
        query_start_loc=np.array([0, len(prompt)], np.int32),
    )
    with torch.inference_mode():
        want = gemma4.model(input_ids=torch.from_numpy(prompt)[None], use_cache=False).logits[0]
    torch.testing.assert_close(model.forward(plan, cache), want, rtol=1e-4, atol=1e-4)


def test_metadata_is_refused_when_it_lacks_a_group(gemma4):
    config = CacheConfig(64, BLOCK_SIZE, groups=TransformersModel(gemma4.model).cache_groups())
    cache = KVCache.from_config(config, SchedulerConfig(max_num_seqs=2, max_model_len=64))
    one = np.zeros((1, 4), np.int64)
    with pytest.raises(InvalidArgumentError, match=r"slot_mapping: .* num_groups=3, found shape \(1, 4\)"):
        AttentionMetadata(cache, one, cache.block_table, *[np.zeros(1, np.int32)] * 3)
    with pytest.raises(InvalidArgumentError, match=r"block_table: .* num_groups=3, found shape \(\)"):
        AttentionMetadata(cache, np.zeros((3, 4), np.int64), np.array(1, np.int32), *[np.zeros(1, np.int32)] * 3)


def test_layer_is_refused_when_it_sees_further_than_its_group_keeps(gemma4):
    config = CacheConfig(64, BLOCK_SIZE, groups=TransformersModel(gemma4.model).cache_groups())
    cache = KVCache.from_config(config, SchedulerConfig(max_num_seqs=2, max_model_len=64))
    step = AttentionMetadata(cache, np.zeros((3, 0), np.int64), cache.block_table, *[np.zeros(1, np.int32)] * 3)
    for window in (None, WINDOW + 1):
        with pytest.raises(
            UnsupportedError, match=f"sliding_window: expected at most 32, .* layer 1 keeps, found {window}"
        ):
            step.attend(1, None, None, None, softmax_scale=None, sliding_window=window, soft_cap=None, sinks=None)


def test_window_is_no_group_of_its_own_when_it_holds_the_longest_sequence(gemma4, make_case, open_llm):
    seed, options = MODELS["gemma2"]
    case = make_case("gemma2", seed, (17,), num_key_value_heads=2, sliding_window=WINDOW, **options)
    with open_llm(case.model, max_model_len=WINDOW) as llm:
        assert [group.sliding_window for group in llm.kv_cache.groups] == [None]
    with open_llm(case.model, max_model_len=WINDOW + 1) as llm:
        assert [group.sliding_window for group in llm.kv_cache.groups] == [None, WINDOW]


def test_groups_of_sizes_that_do_not_divide_are_cut_so_that_little_is_padding():
    groups = [GroupSpec(list(range(5)), 1, 8), GroupSpec(list(range(5, 12)), 1, 8, sliding_window=8)]
    slots = choose_layer_slots(groups)
    assert slots == 1
    assert len(CacheConfig(2, groups=groups, num_layer_slots=slots).groups) == 12
    assert choose_layer_slots(groups[:1]) == 5
