"""What comes back of a request: texts that end it, log-probabilities, streams."""

import pytest
import torch

from pagedkv import LLMEngine, RequestOutputKind, SamplingParams
from pagedkv.exceptions import InvalidArgumentError

PROMPT = list(range(30, 50))
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def llm(tiny_model, letters, open_llm):
    with open_llm(tiny_model, letters, block_size=8) as llm:
        yield llm


@pytest.fixture
def engine(tiny_model, letters):
    with LLMEngine(tiny_model, letters, block_size=8) as engine:
        yield engine


def complete(llm, prompt=PROMPT, **params):
    return llm.generate(prompt, SamplingParams(**(GREEDY | params)), use_tqdm=False)[0].outputs[0]


def letters_of(token_ids):
    return "".join(chr(0x100 + token) for token in token_ids)


def run(engine):
    """Return all outputs of an engine, in order."""
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


# --- texts that end a sample


def test_stop_text_ends_a_sample_and_is_left_out(llm):
    whole = complete(llm)
    found = complete(llm, stop=whole.text[4:6])
    assert found.text == whole.text[: whole.text.index(whole.text[4:6])]
    assert found.token_ids == whole.token_ids[: len(found.text) + 2]
    assert (found.finish_reason, found.stop_reason) == ("stop", whole.text[4:6])


def test_stop_text_is_kept_when_asked_for(llm):
    whole = complete(llm)
    found = complete(llm, stop=[whole.text[4:6]], include_stop_str_in_output=True)
    assert found.text == whole.text[: whole.text.index(whole.text[4:6]) + 2]


def test_first_of_several_stop_texts_ends_a_sample(llm):
    whole = complete(llm)
    assert complete(llm, stop=["nowhere", whole.text[6:8], whole.text[2:4]]).text == whole.text[:2]


def test_stop_text_is_not_looked_for_before_min_tokens(llm):
    whole = complete(llm)
    later = whole.text.find(whole.text[2], 6)
    found = complete(llm, stop=whole.text[2], min_tokens=6)
    assert len(found.token_ids) == (later + 1 if later >= 0 else 12)


def test_stop_text_frees_the_sample_at_once_beside_others(llm):
    whole = complete(llm)
    both = llm.generate(
        [PROMPT, [7, 8]],
        [SamplingParams(**GREEDY, stop=whole.text[3:5]), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)],
        use_tqdm=False,
    )
    assert both[0].outputs[0].text == whole.text[:3]
    assert len(both[1].outputs[0].token_ids) == 30
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_stop_text_ends_each_of_several_samples(tiny_model, letters, open_llm, max_plans_in_flight):
    with open_llm(tiny_model, letters, block_size=8, max_plans_in_flight=max_plans_in_flight) as llm:
        params = {"n": 3, "seed": 3, "max_tokens": 20, "ignore_eos": True}
        whole = llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)[0].outputs
        stop = whole[1].text[5:7]
        ended = llm.generate(PROMPT, SamplingParams(**params, stop=stop), use_tqdm=False)[0].outputs
        assert [found.text for found in ended] == [text.text.partition(stop)[0] for text in whole]
        assert llm.scheduler.usage == 0
        llm.scheduler.check_integrity()


def test_stop_token_of_the_request_is_left_out_of_the_text(llm):
    whole = complete(llm)
    found = complete(llm, stop_token_ids=[whole.token_ids[4]])
    assert found.text == letters_of(found.token_ids[:-1])


def test_text_is_left_out_when_nobody_wants_it(llm):
    assert complete(llm, detokenize=False).text == ""


def test_stop_text_is_refused_when_there_is_no_tokenizer(tiny_model):
    with LLMEngine(tiny_model) as engine, pytest.raises(InvalidArgumentError, match="^stop: "):
        engine.add_request("a", PROMPT, SamplingParams(stop="end"))


# --- what changes logits


def test_end_token_is_not_drawn_before_min_tokens(tiny_model, open_llm):
    with open_llm(tiny_model) as llm:
        whole = complete(llm)
    tiny_model.generation_config.eos_token_id = whole.token_ids[2]
    with open_llm(tiny_model) as llm:
        assert len(complete(llm, ignore_eos=False).token_ids) == 3
        found = complete(llm, ignore_eos=False, min_tokens=8)
    assert len(found.token_ids) >= 8
    assert whole.token_ids[2] not in found.token_ids[:7]


def test_only_allowed_tokens_are_drawn(llm):
    assert set(complete(llm, allowed_token_ids=[4, 5, 6]).token_ids) <= {4, 5, 6}


def test_biased_token_is_drawn(llm):
    assert complete(llm, logit_bias={77: 100}).token_ids == [77] * 12


def test_bad_word_is_not_drawn(llm):
    whole = complete(llm)
    word = "".join(chr(token) for token in whole.token_ids[3:5])
    assert whole.token_ids[3:5] == [ord(letter) % 256 for letter in word]
    assert word not in "".join(chr(token) for token in complete(llm, bad_words=[word]).token_ids)


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_penalties_are_the_same_with_plans_ahead(tiny_model, open_llm, field, max_plans_in_flight):
    def tokens(**options):
        with open_llm(tiny_model, block_size=8, **options) as llm:
            params = SamplingParams(**GREEDY | {"max_tokens": 30}, repetition_penalty=1.2, **{field: 1.5})
            return [output.outputs[0].token_ids for output in llm.generate([PROMPT, [5]], params, use_tqdm=False)]

    assert tokens(max_plans_in_flight=max_plans_in_flight) == tokens(num_blocks=8)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"logit_bias": {256: 1}}, "^logit_bias: expected ids of 0 to 255, found 256"),
        ({"logprobs": 257}, "^logprobs: "),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(llm, params, match):
    with pytest.raises(InvalidArgumentError, match=match):
        complete(llm, **params)


# --- log-probabilities


def expected_logprobs(model, token_ids):
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def test_logprobs_are_those_of_the_model(llm, tiny_model):
    found = complete(llm, logprobs=3)
    expected = expected_logprobs(tiny_model, PROMPT + found.token_ids)[len(PROMPT) - 1 : -1]
    for row, token, entries in zip(expected, found.token_ids, found.logprobs, strict=True):
        assert next(iter(entries)) == token
        assert set(entries) == {token, *row.topk(3).indices.tolist()}
        assert all(entry.logprob == pytest.approx(float(row[other]), abs=1e-3) for other, entry in entries.items())
        assert entries[token].rank == 1
        assert entries[token].decoded_token == chr(0x100 + token)
    own = [entries[token].logprob for entries, token in zip(found.logprobs, found.token_ids, strict=True)]
    assert found.cumulative_logprob == pytest.approx(sum(own))


def test_logprobs_are_those_before_penalties_and_temperature(llm):
    plain, hot = complete(llm, logprobs=2), complete(llm, logprobs=2, logit_bias={77: 100}, temperature=0.5, seed=1)
    assert hot.token_ids[0] == 77
    best = plain.token_ids[0]
    assert hot.logprobs[0][best].logprob == pytest.approx(plain.logprobs[0][best].logprob, abs=1e-3)
    assert hot.logprobs[0][77].rank > 1


def test_logprobs_of_the_whole_vocabulary_sum_to_one(llm):
    entries = complete(llm, logprobs=-1, max_tokens=1).logprobs[0]
    assert len(entries) == 256
    assert torch.tensor([entry.logprob for entry in entries.values()]).exp().sum().item() == pytest.approx(1, abs=1e-4)


def test_logprobs_of_none_are_given_when_zero_are_wanted(llm):
    found = complete(llm, logprobs=0)
    assert [list(entries) for entries in found.logprobs] == [[token] for token in found.token_ids]


def test_logprobs_are_left_out_when_nobody_wants_them(llm):
    assert (complete(llm).logprobs, complete(llm).cumulative_logprob) == (None, None)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"num_blocks": 9}])
def test_prompt_logprobs_are_those_of_the_model(tiny_model, letters, open_llm, options):
    prompts = [list(range(30, 60)), [9] * 20]
    with open_llm(tiny_model, letters, block_size=8, **options) as llm:
        llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
        outputs = llm.generate(prompts, SamplingParams(**GREEDY, prompt_logprobs=2), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = expected_logprobs(tiny_model, prompt)
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs[0] is None
        for row, token, entries in zip(expected[:-1], prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert len(entries) in (2, 3)


def test_prompt_logprobs_of_one_token_are_none(llm):
    output = llm.generate([[5]], SamplingParams(**GREEDY, prompt_logprobs=1), use_tqdm=False)[0]
    assert output.prompt_logprobs == [None]


# --- streams


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_are_together_the_whole(engine, llm, n):
    params = {"n": n, "seed": 4, "max_tokens": 9, "ignore_eos": True, "logprobs": 1}
    engine.add_request("a", PROMPT, SamplingParams(**params, output_kind=RequestOutputKind.DELTA))
    outputs = run(engine)
    whole = llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)[0].outputs
    for sample in whole:
        deltas = [delta for output in outputs for delta in output.outputs if delta.index == sample.index]
        assert [token for delta in deltas for token in delta.token_ids] == sample.token_ids
        assert "".join(delta.text for delta in deltas) == sample.text
        assert [len(delta.logprobs) for delta in deltas] == [len(delta.token_ids) for delta in deltas]
        assert [delta.finish_reason for delta in deltas if delta.finished] == ["length"]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_cumulative_outputs_grow(engine):
    engine.add_request("a", PROMPT, SamplingParams(**GREEDY))
    outputs = run(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 13))
    assert all(outputs[-1].outputs[0].text.startswith(output.outputs[0].text) for output in outputs)


def test_final_output_alone_comes_when_asked_for(engine):
    engine.add_request("a", PROMPT, SamplingParams(**GREEDY, output_kind=RequestOutputKind.FINAL_ONLY))
    assert [output.finished for output in run(engine)] == [True]


def test_stream_never_tells_the_beginning_of_a_stop_text(engine, llm):
    whole = complete(llm).text
    stop = whole[4:7]
    params = SamplingParams(**GREEDY, stop=stop, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", PROMPT, params)
    texts = [delta.text for output in run(engine) for delta in output.outputs]
    assert "".join(texts) == whole.partition(stop)[0]


def test_stream_reports_cached_tokens_from_its_first_output(engine):
    engine.add_request("a", PROMPT, SamplingParams(**GREEDY))
    run(engine)
    engine.add_request("b", [*PROMPT, 1], SamplingParams(**GREEDY))
    assert {output.num_cached_tokens for output in run(engine)} == {16}


# --- the engine's verbs


def test_aborted_request_gives_its_blocks_back(engine):
    engine.add_request("a", PROMPT, SamplingParams(**GREEDY))
    engine.add_request("b", [7] * 30, SamplingParams(**GREEDY))
    engine.step()
    assert engine.abort_request(["a", "nobody"]) == ["a"]
    assert {output.request_id for output in run(engine)} == {"b"}
    assert engine.scheduler.usage == 0
    engine.scheduler.check_integrity()


def test_request_id_may_be_used_again_when_its_request_was_aborted(engine):
    engine.add_request("a", PROMPT, SamplingParams(**GREEDY))
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", PROMPT, SamplingParams(**GREEDY))
    assert run(engine)[-1].finished


def test_request_id_that_is_in_use_is_refused(engine):
    engine.add_request("a", PROMPT)
    with pytest.raises(InvalidArgumentError, match="^request_id: "):
        engine.add_request("a", PROMPT)


def test_priority_is_refused_where_it_decides_nothing(engine):
    with pytest.raises(InvalidArgumentError, match="^priority: expected 0, because scheduling_policy is 'fcfs'"):
        engine.add_request("a", PROMPT, priority=1)


def test_prompts_with_other_salts_share_nothing(engine):
    for salt, expected in (("x", 0), ("y", 0), ("x", 16)):
        engine.add_request("a", {"prompt_token_ids": PROMPT, "cache_salt": salt}, SamplingParams(**GREEDY))
        assert run(engine)[-1].num_cached_tokens == expected


@pytest.mark.parametrize(("kept", "expected"), [(5, 5), (100, 20), (-1, 20)])
def test_prompt_is_truncated_from_the_left(engine, kept, expected):
    engine.add_request("a", list(range(20)), SamplingParams(**GREEDY, truncate_prompt_tokens=kept))
    assert run(engine)[-1].prompt_token_ids == list(range(20))[-expected:]


def test_finished_request_tells_its_times(engine):
    engine.add_request("a", PROMPT, SamplingParams(**GREEDY))
    metrics = run(engine)[-1].metrics
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (20, 12)
    assert metrics.time_to_first_token > 0
