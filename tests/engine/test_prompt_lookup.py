"""Guesses from the text itself: right in themselves, and they change no token."""

import numpy as np
import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.engine.prompt_lookup import PromptLookup
from pagedkv.exceptions import InvalidArgumentError

CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
REPEATING = [5, 6, 7, 8] * 8


def propose(tokens, **options):
    return PromptLookup(**options).propose(np.array(tokens, np.int32)).tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        ([7, 1, 2, 8, 8, 8, 8, 9, 1, 2, 4, 4, 4, 4, 7, 1, 2], [8, 8, 8, 8]),
        ([1, 2, 3, 4], []),
        ([2, 9, 3, 2], []),
        ([1], []),
        ([4, 4, 4, 4, 4, 4, 4, 4], [4, 4, 4, 4]),
    ],
    ids=["again", "short", "longest_match", "new", "one_token_is_too_few", "one", "repetition"],
)
def test_lookup_proposes_what_followed_last_time(tokens, expected):
    assert propose(tokens) == expected


@pytest.mark.parametrize("options", [{}, {"num_blocks": 16}, {"max_num_batched_tokens": 24}])
def test_lookup_changes_no_token(tiny_model, open_llm, options):
    prompts = [REPEATING, [9] * 20, list(range(30, 60)), REPEATING[2:]]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.3, seed=3, n=2, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.1),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1),
    ]

    def tokens(**more):
        with open_llm(tiny_model, block_size=8, **more) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            llm.scheduler.check_integrity()
            return [[completion.token_ids for completion in output.outputs] for output in outputs]

    assert tokens(speculative_config=CONFIG, **options) == tokens()


def test_lookup_takes_fewer_steps_on_text_that_repeats_itself(tiny_model, open_llm):
    steps = []
    params = SamplingParams(max_tokens=40, allowed_token_ids=[5], temperature=0, ignore_eos=True)
    with open_llm(tiny_model, block_size=8, speculative_config=CONFIG) as llm:
        llm.step_hooks.append(steps.append)
        output = llm.generate([REPEATING], params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == [5] * 40
    assert len(steps) <= 12


def test_lookup_ends_at_a_stop_text_in_the_middle_of_its_guesses(tiny_model, letters, open_llm):
    params = {"max_tokens": 40, "logit_bias": {5: 100}, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    with open_llm(tiny_model, letters, block_size=8, speculative_config=CONFIG) as llm:
        stop = chr(0x105) * 7
        found = llm.generate([REPEATING], SamplingParams(**params, stop=stop), use_tqdm=False)[0].outputs[0]
        llm.scheduler.check_integrity()
        assert llm.scheduler.usage == 0
    assert (found.token_ids, found.text, found.stop_reason) == ([5] * 7, "", stop)
    assert len(found.logprobs) == 7


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"method": "eagle"}, "the method 'ngram', found 'eagle'"),
        ({"num_speculative_tokens": 0}, "^num_speculative_tokens: "),
        ({"prompt_lookup_min": 4}, "^prompt_lookup_min: expected at most 3"),
        ({"model": "x"}, "found 'model'"),
        (5, "^speculative_config: expected a mapping"),
    ],
)
def test_lookup_refuses_a_configuration_by_name(tiny_model, config, match):
    with pytest.raises(InvalidArgumentError, match=match):
        LLM(tiny_model, speculative_config=config)


def test_lookup_is_refused_with_plans_ahead(tiny_model):
    with pytest.raises(InvalidArgumentError, match="^max_plans_in_flight: expected 1"):
        LLM(tiny_model, speculative_config=CONFIG, max_plans_in_flight=2)
