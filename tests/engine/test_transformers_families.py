"""Architectures beyond Llama: their greedy tokens equal those of `transformers.generate` too."""

import pytest
import torch
from transformers import LlamaForCausalLM

from pagedkv import SamplingParams

# A seed that leaves the margin that `reference` asks for, and options beside those of `build`.
FAMILIES = {
    "gpt2": (1, {}),
    "opt": (1, {"word_embed_proj_dim": 64, "ffn_dim": 128}),
    "phi3": (0, {}),
    "qwen2": (0, {}),
    "qwen3": (0, {"head_dim": 16}),
    # Windows on every other layer, and a cap on the scores.
    "gemma2": (
        0,
        {
            "head_dim": 16,
            "sliding_window": 24,
            "attn_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": (
        0,
        {
            "head_dim": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
    ),
    # Does not hand keywords down to its layers.
    "stablelm": (0, {}),
    "mixtral": (2, {"num_local_experts": 4, "head_dim": 16}),
}


# Blocks that hold the longest request but not all; with cache groups a block has room for one layer, not for three.
NUM_BLOCKS = {"gemma2": 40, "gemma3_text": 40}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_family_gives_the_same_tokens(family, make_case, open_llm):
    seed, options = FAMILIES[family]
    case = make_case(family, seed, num_key_value_heads=2, **options)
    num_blocks = NUM_BLOCKS.get(family, 24)
    with open_llm(case.model, block_size=8, num_blocks=num_blocks, max_num_batched_tokens=48) as llm:
        outputs = llm.generate(case.prompts, case.params, use_tqdm=False)
        assert llm.scheduler.num_preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == case.expected


class AllLogits(LlamaForCausalLM):
    """A model that always returns the logits of all tokens."""

    def forward(self, input_ids, position_ids, use_cache, **kwargs):
        return super().forward(input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs)


def test_transformers_model_without_logits_to_keep_gives_the_same_tokens(tiny_model, open_llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    prompts = [[1, 2, 3], [4] * 30]
    other = AllLogits(tiny_model.config).eval()
    other.load_state_dict(tiny_model.state_dict())
    with open_llm(tiny_model) as plain, open_llm(other, max_num_batched_tokens=16) as fallback:
        expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (plain, fallback))
    assert [output.outputs for output in found] == [output.outputs for output in expected]
    assert torch.equal(other.lm_head.weight, tiny_model.lm_head.weight)
