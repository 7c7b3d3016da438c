"""What `LLM.generate` promises, on a small model with random weights."""

import logging
import re

import pytest
import torch

from pagedkv import LLM, SamplingParams
from pagedkv.exceptions import InvalidArgumentError, NeverFitsError, StateError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 20, list(range(30, 60))]


@pytest.fixture
def llm(tiny_model, letters, open_llm):
    with open_llm(tiny_model, letters, block_size=8) as llm:
        yield llm


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_generate_takes_text(llm):
    output = llm.generate("abc", GREEDY, use_tqdm=False)[0]
    assert (output.prompt, output.prompt_token_ids) == ("abc", [97, 98, 99])
    assert output.outputs[0].text == "".join(chr(0x100 + token) for token in output.outputs[0].token_ids)


def test_generate_takes_token_ids(llm):
    output = llm.generate([97, 98, 99], GREEDY, use_tqdm=False)[0]
    assert output.prompt is None
    assert tokens([output]) == tokens(llm.generate("abc", GREEDY, use_tqdm=False))


def test_generate_takes_a_dict_with_token_ids(llm):
    output = llm.generate({"prompt_token_ids": [97, 98, 99]}, GREEDY, use_tqdm=False)[0]
    assert tokens([output]) == tokens(llm.generate("abc", GREEDY, use_tqdm=False))


def test_generate_takes_a_list_of_prompts_of_each_kind(llm):
    outputs = llm.generate(["abc", [97, 98, 99], {"prompt_token_ids": [97, 98, 99]}], GREEDY, use_tqdm=False)
    assert len({tuple(ids) for ids in tokens(outputs)}) == 1


def test_generate_returns_outputs_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 1, 5)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(ids) for ids in tokens(outputs)] == [9, 1, 5]


def test_generate_of_no_prompts_returns_nothing(llm):
    assert llm.generate([], use_tqdm=False) == []


def test_generate_draws_sixteen_tokens_by_default(llm):
    assert len(llm.generate(PROMPTS[0], use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_generate_fills_the_sequence_when_max_tokens_is_none(tiny_model, open_llm):
    with open_llm(tiny_model, max_model_len=40) as llm:
        output = llm.generate(PROMPTS[2], SamplingParams(max_tokens=None), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 10


def test_generate_says_why_a_sample_ended_when_it_reached_its_length(llm):
    completion = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)


def test_generate_ends_at_a_stop_token_and_names_it(llm):
    whole = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[whole[4]])
    completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == whole[: whole.index(whole[4]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", whole[4])


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_generate_ends_at_the_end_token_of_the_model(tiny_model, open_llm, max_plans_in_flight):
    with open_llm(tiny_model) as llm:
        whole = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    tiny_model.generation_config.eos_token_id = [255, whole[4]]
    with open_llm(tiny_model, max_plans_in_flight=max_plans_in_flight) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        completion = llm.generate([PROMPTS[0], PROMPTS[1]], params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == whole[: whole.index(whole[4]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


@pytest.mark.parametrize("ending", [0, 1, 2])
def test_generate_keeps_tokens_apart_when_a_sample_ended_in_a_plan_that_was_still_in_flight(
    tiny_model, open_llm, ending
):
    with open_llm(tiny_model, block_size=8) as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    stop = expected[ending][4]
    expected[ending] = expected[ending][: expected[ending].index(stop) + 1]
    params = [GREEDY] * 3
    params[ending] = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    ignored = []
    with open_llm(tiny_model, block_size=8, max_plans_in_flight=2) as llm:
        llm.step_hooks.append(lambda event: ignored.append(event.result.num_ignored))
        assert tokens(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    assert sum(ignored) == 1


def test_generate_goes_on_after_the_end_token_when_ignore_eos(tiny_model, open_llm):
    with open_llm(tiny_model) as llm:
        whole = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    tiny_model.generation_config.eos_token_id = whole[4]
    with open_llm(tiny_model) as llm:
        assert tokens(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == [whole]


def test_generate_reports_cached_prompt_tokens(llm):
    assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([*PROMPTS[2], 1, 2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 24


def test_generate_caches_nothing_when_prefix_caching_is_off(tiny_model, open_llm):
    with open_llm(tiny_model, enable_prefix_caching=False) as llm:
        llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
        assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_reset_prefix_cache_forgets_prompts(llm):
    llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_generate_shows_a_bar_with_speeds(llm, capsys):
    llm.generate(PROMPTS, GREEDY)
    bar = capsys.readouterr().err
    assert "Processed prompts: 100%" in bar
    assert "est. speed input: " in bar


def test_generate_uses_the_bar_that_it_is_given(llm):
    bars = []

    class Bar:
        def __init__(self, *, total, desc, dynamic_ncols):
            self.total, self.done, self.closed = total, 0, False
            bars.append(self)

        def set_postfix_str(self, text, refresh):
            pass

        def update(self):
            self.done += 1

        def close(self):
            self.closed = True

    llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(3, 3, True)]


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ("", "^prompt_token_ids: expected at least one integer"),
        ([[]], "^prompt_token_ids: expected at least one integer"),
        ([[1, 256]], "^prompt_token_ids: expected ids of 0 to 255, found 256"),
        ([[1, -1]], "^prompt_token_ids: expected ids of 0 to 255, found -1"),
        ([1.5], "^prompts: expected a str, .*, found a float"),
        ({"token_ids": [1]}, r"^prompts: expected a str, .*, found a dict with \['token_ids'\]"),
        (5, "^prompts: expected a str, .*, found a int"),
        ([1] * 250, "max_model_len"),
    ],
)
def test_generate_refuses_what_is_no_prompt(llm, prompts, match):
    with pytest.raises(InvalidArgumentError, match=match):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_generate_refuses_text_when_there_is_no_tokenizer(tiny_model):
    with LLM(tiny_model) as llm, pytest.raises(InvalidArgumentError, match="no tokenizer"):
        llm.generate("abc")


def test_generate_refuses_another_number_of_params_than_prompts(llm):
    with pytest.raises(InvalidArgumentError, match="^sampling_params: .* 3 prompts, found 2"):
        llm.generate(PROMPTS, [GREEDY, GREEDY], use_tqdm=False)


def test_generate_runs_no_prompt_when_one_can_never_fit(tiny_model, open_llm):
    with open_llm(tiny_model, block_size=8, num_blocks=6) as llm:
        steps = []
        llm.step_hooks.append(steps.append)
        with pytest.raises(NeverFitsError):
            llm.generate([*PROMPTS, [1] * 60], GREEDY, use_tqdm=False)
        assert steps == []
        assert tokens(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_llm_remains_usable_when_a_step_is_interrupted(tiny_model, open_llm, max_plans_in_flight):
    with open_llm(tiny_model, block_size=8, max_plans_in_flight=max_plans_in_flight) as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        llm.reset_prefix_cache()

        def interrupt(event):
            raise KeyboardInterrupt

        llm.step_hooks.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SamplingParams(n=3), use_tqdm=False)
        llm.step_hooks.clear()
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        assert llm.scheduler.usage == 0
        llm.scheduler.check_integrity()


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
@pytest.mark.parametrize("calls_before", [0, 1, 5])
def test_llm_remains_usable_when_the_model_fails(tiny_model, open_llm, max_plans_in_flight, calls_before):
    with open_llm(tiny_model, block_size=8, max_plans_in_flight=max_plans_in_flight) as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        calls = iter(range(calls_before))

        def fail(module, arguments):
            if next(calls, None) is None:
                raise MemoryError("no room for activations")

        hook = tiny_model.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            llm.generate(PROMPTS, SamplingParams(n=2), use_tqdm=False)
        hook.remove()
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        llm.scheduler.check_integrity()


def test_llm_leaves_the_model_as_it_was_between_steps(tiny_model, open_llm):
    before = tiny_model.config._attn_implementation
    with open_llm(tiny_model) as llm:
        seen = []
        llm.step_hooks.append(lambda event: seen.append(tiny_model.config._attn_implementation))
        expected = tokens(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False))
        ids = torch.tensor([PROMPTS[1]])
        found = tiny_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert set(seen) == {before}
    assert found[0, 20:].tolist() == expected[0]


def test_llm_restores_the_model_when_a_step_fails(tiny_model, open_llm):
    before = tiny_model.config._attn_implementation

    def fail(module, arguments):
        raise MemoryError

    with open_llm(tiny_model) as llm:
        tiny_model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert tiny_model.config._attn_implementation == before


def test_llm_refuses_to_run_when_closed(tiny_model):
    llm = LLM(tiny_model)
    llm.close()
    llm.close()
    with pytest.raises(StateError, match="closed"):
        llm.generate(PROMPTS[0])


def test_llm_logs_what_the_cache_holds(tiny_model, caplog):
    with caplog.at_level(logging.INFO, logger="pagedkv"), LLM(tiny_model, num_blocks=33, max_model_len=128):
        pass
    assert "KV cache size: 512 tokens in blocks of 16" in caplog.text
    assert "maximum concurrency for 128 tokens per request: 4.00x" in caplog.text


def test_llm_logs_preemptions(tiny_model, open_llm, caplog):
    with caplog.at_level(logging.INFO, logger="pagedkv"), open_llm(tiny_model, block_size=8, num_blocks=10) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.scheduler.num_preemptions > 0
    told = r"preempted sample 0 of request 2, .*: (\d+) tokens lost, cache usage (.*) % before and (.*) % now"
    num_tokens, before, now = map(float, re.search(told, caplog.text).groups())
    assert len(PROMPTS[2]) <= num_tokens < len(PROMPTS[2]) + GREEDY.max_tokens
    assert 100 >= before > now > 0


def test_llm_fills_the_memory_that_it_is_given(tiny_model):
    with LLM(tiny_model, kv_cache_memory_bytes=1_000_000) as llm:
        assert 1_000_000 - 16 * 768 < llm.kv_cache.num_bytes <= 1_000_000


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_cache_memory_bytes": 1000}, "^kv_cache_memory_bytes: expected at least"),
        ({"kv_cache_memory_bytes": 10**6, "num_blocks": 9}, "^kv_cache_memory_bytes: expected None beside num_blocks"),
        ({"max_model_len": 257}, "^max_model_len: expected at most 256"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 1}, "num_blocks"),
    ],
)
def test_llm_refuses_sizes_that_make_no_sense(tiny_model, options, match):
    with pytest.raises(InvalidArgumentError, match=match):
        LLM(tiny_model, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_llm_keeps_keys_and_values_in_the_dtype_of_the_model(tiny_model, dtype):
    with LLM(tiny_model.to(dtype)) as llm:
        assert f"torch.{llm.kv_cache.dtype}" == str(dtype)
        assert len(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize("reason", ["min_tokens", "bad_words"])
def test_generate_refuses_requests_that_might_have_no_token_to_draw(llm, reason):
    text = llm.get_tokenizer().decode([9], skip_special_tokens=False)
    ends, word = {"stop_token_ids": [9], "min_tokens": 1}, {"bad_words": [text]}
    params = SamplingParams(allowed_token_ids=[9], max_tokens=4, **(ends if reason == "min_tokens" else word))
    with pytest.raises(ValueError, match="allowed_token_ids: expected a token that ends no bad word"):
        llm.generate([[3, 4]], params, use_tqdm=False)
