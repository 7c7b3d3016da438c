"""Greedy tokens of SmolLM2 equal those of `transformers.generate`, token for token, in one continuous batch."""

import pytest

from pagedkv import SamplingParams


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_transformers_smollm2_gives_the_same_tokens(smollm_case, open_llm):
    with open_llm(smollm_case.model, block_size=8, num_blocks=512, max_model_len=1024) as llm:
        outputs = llm.generate(smollm_case.prompts, smollm_case.params, use_tqdm=False)
    assert tokens(outputs) == smollm_case.expected


@pytest.mark.slow
def test_transformers_smollm2_gives_the_same_tokens_whatever_the_instruction_set(smollm_case, open_llm, isa):
    with open_llm(smollm_case.model, max_num_batched_tokens=256, num_blocks=256, max_model_len=1024) as llm:
        outputs = llm.generate(smollm_case.prompts, smollm_case.params, use_tqdm=False)
    assert tokens(outputs) == smollm_case.expected, isa


def test_transformers_smollm2_gives_the_same_tokens_when_prompts_come_in_chunks(smollm_case, open_llm):
    options = {"block_size": 32, "num_blocks": 128, "max_num_batched_tokens": 48, "max_model_len": 1024}
    with open_llm(smollm_case.model, **options) as llm:
        outputs = llm.generate(smollm_case.prompts, smollm_case.params, use_tqdm=False)
    assert tokens(outputs) == smollm_case.expected


def test_transformers_smollm2_gives_the_same_tokens_when_two_plans_are_in_flight(smollm_case, open_llm):
    with open_llm(smollm_case.model, max_plans_in_flight=2, num_blocks=256, max_model_len=1024) as llm:
        filled_in = []
        llm.step_hooks.append(lambda event: filled_in.append(int((event.plan.input_from >= 0).sum())))
        outputs = llm.generate(smollm_case.prompts, smollm_case.params, use_tqdm=False)
    assert tokens(outputs) == smollm_case.expected
    assert sum(filled_in) > 0


def test_transformers_smollm2_gives_the_same_tokens_when_requests_are_preempted_and_when_the_cache_is_warm(
    smollm_case, open_llm
):
    with open_llm(smollm_case.model, num_blocks=90, max_model_len=1024) as llm:
        cold = llm.generate(smollm_case.prompts, smollm_case.params, use_tqdm=False)
        num_preemptions = llm.scheduler.num_preemptions
        warm = llm.generate(smollm_case.prompts, smollm_case.params, use_tqdm=False)
        llm.scheduler.check_integrity()
    assert tokens(cold) == smollm_case.expected
    assert tokens(warm) == smollm_case.expected
    assert num_preemptions > 0
    assert sum(output.num_cached_tokens for output in warm) > 600


def test_transformers_smollm2_gives_the_same_tokens_after_rollbacks_before_and_after_apply(
    smollm_case, generate_with_rollbacks
):
    assert generate_with_rollbacks(smollm_case, "before_apply", "after_apply") == smollm_case.expected


def test_transformers_smollm2_continues_the_capital_of_france_as_documented(smollm, open_llm):
    """The ids of a run of transformers alone, written down before this package was."""
    model, tokenizer = smollm
    expected = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]
    prompt = tokenizer("The capital of France is", add_special_tokens=False).input_ids
    with open_llm(model, tokenizer, max_model_len=256, max_num_seqs=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == expected
    assert output.text == " Paris.\n\nThe answer is: 2018-01-22 "
