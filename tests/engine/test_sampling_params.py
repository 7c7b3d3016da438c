"""SamplingParams: vLLM's names and defaults, and mistakes that name their field."""

import dataclasses

import pytest

from pagedkv import SamplingParams
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError

WRONG = [
    ("n", 0),
    ("n", 1.5),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "warm"),
    ("temperature", 1e39),
    ("top_k", -2),
    ("top_k", 1.0),
    ("top_k", 2**63),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", float("nan")),
    ("top_p", None),
    ("seed", 0.5),
    ("max_tokens", 0),
    ("max_tokens", "many"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["the"]),
    ("stop_token_ids", 5),
    ("presence_penalty", 2.1),
    ("presence_penalty", None),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-40),
    ("repetition_penalty", float("inf")),
    ("min_p", 1.5),
    ("min_p", -0.1),
    ("stop", ""),
    ("stop", ["end", ""]),
    ("stop", 5),
    ("stop", [5]),
    ("bad_words", [""]),
    ("bad_words", [1]),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "no"),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("logprobs", True),
    ("prompt_logprobs", 1.5),
    ("detokenize", None),
    ("skip_special_tokens", 0),
    ("truncate_prompt_tokens", 0),
    ("output_kind", 1),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1: 101}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
]
NOT_IMPLEMENTED = [
    ("spaces_between_special_tokens", False),
    ("structured_outputs", {}),
    ("extra_args", {"a": 1}),
]


def test_sampling_params_have_the_defaults_of_vllm():
    params = SamplingParams()
    found = (params.n, params.temperature, params.top_k, params.top_p, params.seed, params.max_tokens)
    assert found == (1, 1.0, 0, 1.0, None, 16)
    assert params.ignore_eos is False


def test_sampling_params_never_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_sampling_params_name_the_field_when_its_value_is_wrong(field, value):
    with pytest.raises(InvalidArgumentError, match=f"^{field}: expected .*, found "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("field", "value"), NOT_IMPLEMENTED)
def test_sampling_params_refuse_by_name_what_is_not_implemented(field, value):
    with pytest.raises(UnsupportedError, match=f"^{field}: "):
        SamplingParams(**{field: value})


def test_sampling_params_refuse_several_samples_when_greedy():
    with pytest.raises(ValueError, match="^n: expected 1"):
        SamplingParams(n=2, temperature=0)


def test_sampling_params_read_top_k_of_minus_one_as_all():
    assert SamplingParams(top_k=-1).top_k == -1


def test_sampling_params_show_what_was_changed():
    assert repr(SamplingParams(n=3, stop_token_ids=[2])) == "SamplingParams(n=3, stop_token_ids=(2,))"


def test_sampling_params_refuse_stop_texts_when_there_is_no_text():
    with pytest.raises(InvalidArgumentError, match="^stop: expected none, because detokenize is False"):
        SamplingParams(stop="end", detokenize=False)


def test_sampling_params_take_one_stop_text_as_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
