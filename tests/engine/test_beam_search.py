"""Beam search finds what `transformers.generate` finds, over shared blocks."""

from pathlib import Path

import pytest
import torch

from pagedkv import BeamSearchParams, SamplingParams
from pagedkv.exceptions import InvalidArgumentError

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 4
BLOCK_SIZE = 8


def expected(model, prompt, max_tokens, width=WIDTH, **options):
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    ends = options["eos_token_id"] or ()
    sequences = [trimmed(sequence, len(prompt), max_tokens, ends) for sequence in found.sequences.tolist()]
    return sequences, found.sequences_scores.tolist()


def trimmed(sequence, num_prompt_tokens, max_tokens, ends):
    """Return a sequence without the padding that transformers puts behind its end."""
    stops = [at for at, token in enumerate(sequence) if at >= num_prompt_tokens and token in ends]
    return sequence[: stops[0] + 1 if stops else num_prompt_tokens + max_tokens]


def check(outputs, model, prompts, max_tokens, width=WIDTH, **options):
    for prompt, output in zip(prompts, outputs, strict=True):
        sequences, scores = expected(model, prompt, max_tokens, width, **options)
        assert [sequence.tokens for sequence in output.sequences] == sequences
        assert [sequence.score for sequence in output.sequences] == pytest.approx(scores, abs=1e-3)


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 256, (length,), generator=generator).tolist() for length in range(3, 63, 3)]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16}, {"max_plans_in_flight": 2}, {"num_blocks": 24, "max_num_seqs": 16}],
    ids=["plain", "chunks", "two_plans", "preemption"],
)
def test_beam_search_finds_what_transformers_finds(tiny_model, prompts, open_llm, options):
    with open_llm(tiny_model, block_size=BLOCK_SIZE, max_model_len=128, **options) as llm:
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=WIDTH, max_tokens=12, ignore_eos=True))
        assert (llm.scheduler.num_preemptions > 0) == ("num_blocks" in options)
        assert llm.scheduler.usage == 0
        llm.scheduler.check_integrity()
    check(outputs, tiny_model, prompts, 12, eos_token_id=None)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0])
def test_beam_search_ends_where_transformers_does(tiny_model, prompts, open_llm, early_stopping, length_penalty):
    # So many end tokens that sequences end all along.
    tiny_model.generation_config.eos_token_id = list(range(200, 256))
    with open_llm(tiny_model, block_size=BLOCK_SIZE) as llm:
        params = BeamSearchParams(
            beam_width=WIDTH, max_tokens=10, length_penalty=length_penalty, early_stopping=early_stopping
        )
        outputs = llm.beam_search(prompts[:6], params)
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    check(outputs, tiny_model, prompts[:6], 10, eos_token_id=list(range(200, 256)), **options)


def shares_of_unshared_blocks(llm, model, prompts, max_tokens):
    """Search from each prompt alone; return what came, and the share of unshared blocks held."""
    held, outputs, shares = [], [], []
    # Within a step: when it ends, beams that do not go on have given their blocks back.
    hook = model.register_forward_pre_hook(lambda *_: held.append(llm.scheduler.stats().num_held_blocks))
    for prompt in prompts:
        held.clear()
        outputs += llm.beam_search([prompt], BeamSearchParams(beam_width=WIDTH, max_tokens=max_tokens, ignore_eos=True))
        assert len(held) == max_tokens
        shares.append(max(held) / (WIDTH * -(-(len(prompt) + max_tokens - 1) // BLOCK_SIZE)))
    hook.remove()
    return outputs, shares


def test_beam_search_holds_at_most_60_percent_of_the_blocks_of_unshared_beams(tiny_model, prompts, open_llm):
    with open_llm(tiny_model, block_size=BLOCK_SIZE) as llm:
        _, shares = shares_of_unshared_blocks(llm, tiny_model, prompts, 24)
    assert sum(shares) / len(shares) <= 0.6


@pytest.mark.slow
def test_beam_search_of_smollm2_finds_what_transformers_finds_in_60_percent_of_the_blocks(smollm, open_llm):
    model, tokenizer = smollm
    text = tokenizer((ROOT / "LICENSE").read_text()).input_ids
    prompts = [text[50 * number : 50 * number + 3 + 2 * number] for number in range(20)]
    with open_llm(model, block_size=BLOCK_SIZE, max_model_len=128) as llm:
        outputs, shares = shares_of_unshared_blocks(llm, model, prompts, 12)
    check(outputs, model, prompts, 12, eos_token_id=None)
    assert sum(shares) / len(shares) <= 0.6


def test_beam_search_runs_beside_sampling(tiny_model, prompts, open_llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    beams = BeamSearchParams(beam_width=WIDTH, max_tokens=12, ignore_eos=True)
    with open_llm(tiny_model, block_size=BLOCK_SIZE) as llm:
        alone = llm.beam_search(prompts[:1], beams)[0]
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts[1:4], params, use_tqdm=False)]
        engine, found = llm.llm_engine, {}
        engine.add_request("beams", prompts[0], beams)
        for number, prompt in enumerate(prompts[1:4]):
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
    assert [found[str(number)].outputs[0].token_ids for number in range(3)] == plain
    tokens = [prompts[0] + completion.token_ids for completion in found["beams"].outputs]
    assert tokens == [sequence.tokens for sequence in alone.sequences]


def test_beam_of_one_is_greedy(tiny_model, prompts, open_llm):
    with open_llm(tiny_model, block_size=BLOCK_SIZE) as llm:
        greedy = llm.generate(prompts[:3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        beams = llm.beam_search(prompts[:3], BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))
    expected = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts[:3], greedy, strict=True)]
    assert [output.sequences[0].tokens for output in beams] == expected


def test_aborted_beam_search_gives_its_blocks_back(tiny_model, prompts, open_llm):
    with open_llm(tiny_model, block_size=BLOCK_SIZE) as llm:
        engine = llm.llm_engine
        engine.add_request("beams", prompts[5], BeamSearchParams(beam_width=WIDTH, max_tokens=30))
        for _ in range(5):
            engine.step()
        engine.abort_request("beams")
        llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)
        assert llm.scheduler.usage == 0
        llm.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("field", "value"),
    [("beam_width", 0), ("max_tokens", 0), ("length_penalty", "x"), ("early_stopping", "soon"), ("temperature", -1)],
)
def test_beam_search_params_name_the_field_when_its_value_is_wrong(field, value):
    with pytest.raises(InvalidArgumentError, match=f"^{field}: expected .*, found "):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | {field: value}))
