"""Requests that go out to host memory and come back: the same tokens as without."""

import logging
import math

import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.exceptions import InvalidArgumentError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7] * 4, [9] * 20, list(range(30, 60)), [3, 1] * 9]


def run(model, params=GREEDY, **options):
    """Return the tokens of every sample, and how often the scheduler preempted and swapped."""
    with LLM(model, block_size=4, **options) as llm:
        llm.kv_cache.pool.fill_(math.nan)
        if llm.kv_cache.host_pool is not None:
            llm.kv_cache.host_pool.fill_(math.nan)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        scheduler = llm.scheduler
        scheduler.check_integrity()
        assert scheduler.usage == 0
        assert len(set(scheduler.num_host_blocks)) == 1, "host blocks are lost"
        tokens = [[sample.token_ids for sample in output.outputs] for output in outputs]
        return tokens, scheduler.num_preemptions, scheduler.num_swaps


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("host_blocks", [None, 12])
def test_generate_gives_the_same_tokens_when_the_pool_is_so_small_that_requests_swap(
    tiny_model, in_flight, host_blocks
):
    want, num_preemptions, _ = run(tiny_model, num_blocks=200)
    assert num_preemptions == 0
    got, _, num_swaps = run(
        tiny_model, num_blocks=18, preemption_mode="swap", host_blocks=host_blocks, max_plans_in_flight=in_flight
    )
    assert num_swaps > 0
    assert got == want


def test_generate_gives_the_same_samples_when_several_of_a_prompt_swap(tiny_model):
    params = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    want, _, _ = run(tiny_model, params, num_blocks=200)
    got, _, num_swaps = run(tiny_model, params, num_blocks=24, preemption_mode="swap")
    assert num_swaps > 0
    assert got == want


def test_llm_says_that_what_goes_to_host_memory_may_not_be_lost(tiny_model, caplog):
    with caplog.at_level(logging.INFO, logger="pagedkv"):
        _, num_preemptions, _ = run(tiny_model, num_blocks=18, preemption_mode="swap")
    assert num_preemptions > 0
    assert caplog.text.count(": at most ") == caplog.text.count("preempted sample ") == num_preemptions


def test_llm_refuses_swap_without_host_blocks(tiny_model):
    with pytest.raises(InvalidArgumentError, match="num_host_blocks: expected at least 1 with preemption_mode"):
        LLM(tiny_model, preemption_mode="swap", host_blocks=0)


def test_llm_names_the_preemption_mode_when_there_is_none_of_that_name(tiny_model):
    with pytest.raises(InvalidArgumentError, match="preemption_mode: expected one of"):
        LLM(tiny_model, preemption_mode="drop")
