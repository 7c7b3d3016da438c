"""Greedy tokens of models with random weights equal those of `transformers.generate`, whatever shares the batch."""

import pytest

OPTIONS = {
    "blocks_of_8": {"block_size": 8},
    "blocks_of_32": {"block_size": 32},
    "chunks": {"block_size": 8, "max_num_batched_tokens": 16},
    "two_plans_in_flight": {"max_plans_in_flight": 2, "max_num_batched_tokens": 64},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "three_seats": {"max_num_seqs": 3},
}


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_transformers_random_model_gives_the_same_tokens(random_case, open_llm, options):
    with open_llm(random_case.model, **options) as llm:
        outputs = llm.generate(random_case.prompts, random_case.params, use_tqdm=False)
        llm.scheduler.check_integrity()
    assert tokens(outputs) == random_case.expected


def test_transformers_random_model_gives_the_same_tokens_whatever_the_instruction_set(random_case, open_llm, isa):
    with open_llm(random_case.model, block_size=8, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(random_case.prompts, random_case.params, use_tqdm=False)
    assert tokens(outputs) == random_case.expected, isa


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_transformers_random_model_gives_the_same_tokens_when_requests_are_preempted(
    random_case, open_llm, max_plans_in_flight
):
    with open_llm(random_case.model, block_size=8, num_blocks=16, max_plans_in_flight=max_plans_in_flight) as llm:
        outputs = llm.generate(random_case.prompts, random_case.params, use_tqdm=False)
        num_preemptions = llm.scheduler.num_preemptions
        llm.scheduler.check_integrity()
    assert tokens(outputs) == random_case.expected
    assert num_preemptions > 0


def test_transformers_random_model_gives_the_same_tokens_when_the_prefix_cache_is_warm(random_case, open_llm):
    with open_llm(random_case.model, block_size=8) as llm:
        llm.generate(random_case.prompts, random_case.params, use_tqdm=False)
        warm = llm.generate(random_case.prompts, random_case.params, use_tqdm=False)
    assert tokens(warm) == random_case.expected
    assert sum(output.num_cached_tokens for output in warm) > 0


@pytest.mark.parametrize("when", ["before_apply", "after_apply", "after_forward", "with_plan_behind"])
def test_transformers_random_model_gives_the_same_tokens_after_rollbacks(random_case, generate_with_rollbacks, when):
    assert generate_with_rollbacks(random_case, when, block_size=8) == random_case.expected


def test_transformers_random_model_gives_the_same_tokens_when_keys_are_packed(random_case, generate_with_rollbacks):
    assert generate_with_rollbacks(random_case, "before_apply", packed=True) == random_case.expected
