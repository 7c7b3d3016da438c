"""Steps filled up to one of a few sizes: how many rows products see, and that nothing else changes."""

import copy

import numpy as np
import pytest
import torch

from pagedkv import LLM, SamplingParams
from pagedkv.models import adapters, padding, transformers
from pagedkv.models.lora_files import LowRank
from pagedkv.models.padding import compiles_products, pad_step, padded_rows

PROMPTS = [[length, *range(1, length)] for length in (4, 12, 35, 41, 60)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_sizes_waste_a_quarter_at_most_and_are_few():
    sizes = [padded_rows(count) for count in range(2049)]
    assert all(count <= size <= 1.25 * count for count, size in enumerate(sizes))
    assert len(set(sizes)) < 45


def test_sizes_are_multiples_of_256_beyond_2048():
    assert [padded_rows(count) for count in (2049, 2304, 9000)] == [2304, 2304, 9216]


def test_products_of_bfloat16_are_compiled_on_a_cpu_that_multiplies_it(monkeypatch):
    monkeypatch.setattr(padding, "has_bf16_product", lambda: True)
    assert compiles_products(torch.bfloat16, torch.device("cpu"))
    assert not compiles_products(torch.float32, torch.device("cpu"))
    assert not compiles_products(torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(padding, "has_bf16_product", lambda: False)
    assert not compiles_products(torch.bfloat16, torch.device("cpu"))


def run(model, **options):
    with LLM(model, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_every_product_of_a_padded_model_has_one_of_the_sizes(tiny_model, monkeypatch):
    plain = run(tiny_model)
    model, seen = copy.deepcopy(tiny_model), set()
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, __: seen.add(inputs[0].shape[-2]))
    model.lm_head.register_forward_hook(lambda _, inputs, __: seen.add(inputs[0].shape[-2]))
    monkeypatch.setattr(transformers, "compiles_products", lambda *_: True)
    assert run(model) == plain
    assert seen == {padded_rows(count) for count in seen}
    assert padded_rows(sum(map(len, PROMPTS))) in seen


def test_probabilities_of_a_prompt_are_those_without_padding(tiny_model, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, ignore_eos=True)

    def ask():
        with LLM(tiny_model) as llm:
            return llm.generate(PROMPTS, params, use_tqdm=False)

    plain = ask()
    monkeypatch.setattr(transformers, "compiles_products", lambda *_: True)
    for one, other in zip(plain, ask(), strict=True):
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
        for a, b in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert {token: pytest.approx(found.logprob, abs=1e-4) for token, found in a.items()} == {
                token: found.logprob for token, found in b.items()
            }


@pytest.mark.parametrize("pads", [False, True])
def test_adapters_see_filled_up_rows_and_add_to_their_own_tokens_alone(pads, monkeypatch):
    monkeypatch.setattr(adapters, "compiles_products", lambda *_: pads)
    base = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    base.dtype, base.device = torch.float32, torch.device("cpu")
    base.get_output_embeddings = lambda: None
    own = adapters.Adapters(base)
    own.add(1, {"0": LowRank(torch.ones(1, 4), torch.ones(4, 1), 2.0)})
    num_tokens = np.array([20, 9, 4], np.int32)
    x = torch.randn(padded_rows(33) if pads else 33, 4, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.functional.linear(x, base[0].weight)
    seen = []
    multiply = adapters.linear
    monkeypatch.setattr(adapters, "linear", lambda x, weight: seen.append(len(x)) or multiply(x, weight))
    with torch.inference_mode(), own.step(np.array([0, 1, 0]), num_tokens):
        found = base(x)
    expected = plain.clone()
    expected[20:29] += 2 * x[20:29].sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected.detach())
    assert set(seen) == {10 if pads else 9}


class Plan:
    """A plan made by hand."""

    token_ids = np.arange(9, dtype=np.int32)
    sample_rows = np.array([8], np.int32)
    seq_lens = np.array([9], np.int32)


def test_plan_made_by_hand_stays_as_it_is_but_rows_are_filled_up():
    plan, rows = pad_step(Plan, np.arange(9, dtype=np.int32))
    assert plan is Plan
    assert rows.tolist() == [*range(9), 0]
    assert rows.dtype == np.int32
