"""What the transformers hook does not implement, it refuses by name."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from pagedkv import LLM, CacheConfig, KVCache, Scheduler, SchedulerConfig
from pagedkv.exceptions import UnsupportedError
from pagedkv.models import AttentionMetadata, TransformersModel, register_attention

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(model_type, **options):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **options)).eval()


@pytest.fixture
def call(tiny_model):
    """Return a function that runs two tokens through a model whose attention is paged, with further keywords."""
    model = TransformersModel(tiny_model)
    config, limits = CacheConfig(8, groups=model.cache_groups()), SchedulerConfig(max_num_seqs=2, max_model_len=32)
    scheduler, cache = Scheduler(config, limits), KVCache.from_config(config, limits)
    scheduler.add_request("a", [1, 2], max_tokens=1)
    plan = scheduler.schedule()
    cache.apply(plan)
    register_attention()
    tiny_model.set_attn_implementation("pagedkv")
    step = AttentionMetadata.from_plan(plan, cache)
    ids, positions = torch.tensor([[1, 2]]), torch.tensor([[0, 1]])

    def call(**keywords):
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False, "pagedkv": step} | keywords
        return tiny_model(**inputs)

    return call


def test_transformers_model_can_be_called_with_metadata_as_a_keyword(call):
    with torch.inference_mode():
        assert call().logits.shape == (1, 2, 256)


@torch.inference_mode()
def test_transformers_hook_refuses_to_run_without_metadata(call):
    with pytest.raises(
        UnsupportedError, match="^pagedkv: expected an AttentionMetadata.*, found None in LlamaAttention"
    ):
        call(pagedkv=None)


@torch.inference_mode()
def test_transformers_hook_refuses_an_attention_mask(call):
    with pytest.raises(
        UnsupportedError, match=r"^attention_mask: expected None.*, found a tensor of shape \(1, 1, 2, 2\)"
    ):
        call(attention_mask=torch.zeros(1, 1, 2, 2))


@torch.inference_mode()
def test_transformers_hook_refuses_position_bias(call):
    with pytest.raises(UnsupportedError, match="^position_bias: "):
        call(position_bias=torch.zeros(1, 4, 2, 2))


@torch.inference_mode()
def test_transformers_hook_refuses_sinks_that_are_not_one_for_each_query_head(call):
    with pytest.raises(ValueError, match=r"^sinks: expected shape \(num_q_heads=4,\), found \(2,\)"):
        call(s_aux=torch.zeros(2))


@torch.inference_mode()
def test_transformers_hook_refuses_keywords_that_it_does_not_know(call):
    with pytest.raises(UnsupportedError, match="^block_indices: "):
        call(block_indices=[1])


@torch.inference_mode()
def test_transformers_hook_refuses_attention_that_is_not_causal(call):
    with pytest.raises(UnsupportedError, match="^is_causal: "):
        call(is_causal=False)


@torch.inference_mode()
def test_transformers_hook_refuses_a_batch_of_rows(call):
    with pytest.raises(UnsupportedError, match="^query: expected a batch of 1"):
        call(input_ids=torch.tensor([[1], [2]]), position_ids=torch.tensor([[0], [0]]))


@torch.inference_mode()
def test_transformers_hook_refuses_to_drop_probabilities(call, tiny_model):
    tiny_model.train()
    for layer in tiny_model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(UnsupportedError, match=r"^dropout: expected 0: call model.eval\(\), found 0.1"):
        call()


def test_transformers_hook_refuses_gradients(call):
    with pytest.raises(UnsupportedError, match="^query: expected no gradient: use torch.inference_mode"):
        call()


def test_transformers_model_refuses_training_mode(tiny_model):
    with pytest.raises(UnsupportedError, match=r"^model: LlamaForCausalLM is in training mode: call model.eval\(\)"):
        LLM(tiny_model.train())


def test_transformers_model_refuses_values_of_another_head_dim():
    model = build("deepseek_v3", n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2)
    with pytest.raises(UnsupportedError, match="^value: expected the head_dim of the queries, 192, found .* 128"):
        LLM(model)


def test_transformers_model_refuses_an_encoder():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    with pytest.raises(UnsupportedError, match=r"^model: T5ForConditionalGeneration has an encoder"):
        LLM(model)


def test_transformers_model_refuses_linear_attention():
    types = ["linear_attention", "full_attention"]
    model = build("minimax", head_dim=16, layer_types=types, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(UnsupportedError, match="not full or sliding attention .*'linear_attention'"):
        LLM(model)


def test_transformers_model_refuses_chunked_attention():
    model = build("llama4_text", head_dim=16, num_local_experts=2, intermediate_size_mlp=64)
    with pytest.raises(UnsupportedError, match="not full or sliding attention .*'chunked_attention'"):
        LLM(model)


def test_transformers_model_refuses_a_recurrent_state():
    sizes = {"vocab_size": 64, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes)).eval()
    with pytest.raises(UnsupportedError, match="^model: RwkvForCausalLM keeps a recurrent state"):
        LLM(model)


def test_transformers_model_refuses_a_model_without_the_attention_interface():
    with pytest.raises(UnsupportedError, match="^model: FalconForCausalLM .*AttentionInterface"):
        LLM(build("falcon"))


def test_transformers_model_refuses_a_model_without_position_ids():
    with pytest.raises(UnsupportedError, match="^model: BloomForCausalLM takes no position_ids"):
        LLM(build("bloom"))


class WholeRotation(torch.nn.Module):
    """Angles of zero, which fit any head_dim."""

    def forward(self, x, position_ids):
        zero = torch.zeros(*position_ids.shape, 1)
        return zero + 1, zero


def test_transformers_model_refuses_layers_of_which_no_blocks_have_equal_bytes():
    model = build("llama", head_dim=16)
    attention = model.model.layers[1].self_attn
    attention.head_dim = 24
    attention.q_proj, attention.k_proj, attention.v_proj = (torch.nn.Linear(64, 24 * n) for n in (4, 2, 2))
    attention.o_proj = torch.nn.Linear(96, 64)
    model.model.rotary_emb = WholeRotation()
    with pytest.raises(UnsupportedError, match="a token takes 256 bytes per layer in group 0 and 384 in another"):
        LLM(model)


def test_transformers_model_refuses_a_window_that_is_only_in_the_mask():
    model = build("llama", head_dim=16, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UnsupportedError, match="hides the window of layer 1 in its mask"):
        LLM(model)


def test_transformers_model_refuses_layers_without_attention(tiny_model):
    class Nothing(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return torch.zeros_like(hidden_states), None

    tiny_model.model.layers[1].self_attn = Nothing()
    with pytest.raises(UnsupportedError, match=r"has layers without attention through the AttentionInterface: \[1\]"):
        LLM(tiny_model)


def test_transformers_model_refuses_a_layer_that_attends_twice(tiny_model):
    tiny_model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedError, match="layer 0 attends twice"):
        LLM(tiny_model)


def test_transformers_model_refuses_a_model_without_a_head(tiny_model):
    with pytest.raises(UnsupportedError, match="^model: LlamaModel has no head"):
        LLM(tiny_model.model)


def test_transformers_model_refuses_lengths_at_which_rope_changes_for_the_whole_batch():
    factors = [1.0] * 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 32,
    }
    model = build("llama", head_dim=16, rope_parameters=rope)
    with pytest.raises(ValueError, match="^max_model_len: expected at most 32"):
        LLM(model, max_model_len=64)
