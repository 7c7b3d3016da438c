"""Llama and Qwen2 from a GGUF file, beside the same file in transformers."""

import gguf
import pytest
import torch

from pagedkv import LLM, SamplingParams
from pagedkv.exceptions import UnsupportedError
from pagedkv.models import GGUFLlama, TransformersModel, gguf_llama, load_model, open_model
from pagedkv.models.padding import padded_rows

VOCABULARY, HIDDEN, HEADS, KV_HEADS, MLP, LAYERS = 256, 64, 4, 2, 96, 3
PROMPTS = [[5], [9] * 17, list(range(30, 75))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def write(path, architecture="llama", *, bias=False, tied=False, factors=None, more_tensors=(), **fields):
    """Write a model with random weights."""
    generator = torch.Generator().manual_seed(4)
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "context_length": 256,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "vocab_size": VOCABULARY,
    }
    for name, value in (sizes | {key: value for key, value in fields.items() if isinstance(value, int)}).items():
        writer.add_uint32(f"{architecture}.{name}", value)
    floats = {"rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5}
    for name, value in (floats | {key: value for key, value in fields.items() if isinstance(value, float)}).items():
        writer.add_float32(f"{architecture}.{name}", value)
    for name, value in fields.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{name}", value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)

    def put(name, *shape, scale=0.25, center=0.0):
        writer.add_tensor(name, (torch.randn(*shape, generator=generator) * scale + center).numpy())

    kv_size = HIDDEN // HEADS * KV_HEADS
    put("token_embd.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for name, size in (("attn_q", HIDDEN), ("attn_k", kv_size), ("attn_v", kv_size)):
            put(f"blk.{layer}.{name}.weight", size, HIDDEN)
            if bias:
                put(f"blk.{layer}.{name}.bias", size)
        put(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        put(f"blk.{layer}.ffn_gate.weight", MLP, HIDDEN)
        put(f"blk.{layer}.ffn_up.weight", MLP, HIDDEN)
        put(f"blk.{layer}.ffn_down.weight", HIDDEN, MLP)
        put(f"blk.{layer}.attn_norm.weight", HIDDEN, scale=0.1, center=1.0)
        put(f"blk.{layer}.ffn_norm.weight", HIDDEN, scale=0.1, center=1.0)
    put("output_norm.weight", HIDDEN, scale=0.1, center=1.0)
    if not tied:
        put("output.weight", VOCABULARY, HIDDEN)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())
    for name in more_tensors:
        put(name, 4, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens(model, **options):
    with LLM(model, object.__new__(NoTokenizer), block_size=8, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


class NoTokenizer:
    eos_token_id = None

    def decode(self, token_ids, skip_special_tokens):
        return ""


VARIANTS = {
    "llama": {},
    "llama_tied": {"tied": True},
    "qwen2": {"architecture": "qwen2", "bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_llama_gives_the_tokens_of_transformers(tmp_path, variant):
    path = write(tmp_path / "model.gguf", **VARIANTS[variant])
    model, _ = load_model(path, object.__new__(NoTokenizer), "float32")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected.append(found[0, len(prompt) :].tolist())
    assert tokens(path, dtype="float32") == expected


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 16}, {"max_plans_in_flight": 2}, {"num_blocks": 12}])
def test_gguf_llama_gives_the_same_tokens_however_they_are_batched(tmp_path, options):
    path = write(tmp_path / "model.gguf")
    assert tokens(path, dtype="float32", **options) == tokens(path, dtype="float32")


def test_gguf_llama_knows_its_sizes(tmp_path):
    model = GGUFLlama(write(tmp_path / "model.gguf"))
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (VOCABULARY, 256, {2})
    assert [group.layers for group in model.cache_groups()] == [[0, 1, 2]]


def test_gguf_llama_keeps_a_window(tmp_path):
    model = GGUFLlama(write(tmp_path / "model.gguf", **{"attention.sliding_window": 32}))
    assert model.cache_groups()[0].sliding_window == 32


def test_gguf_llama_turns_by_the_factors_of_the_file(tmp_path):
    plain = GGUFLlama(write(tmp_path / "plain.gguf"))
    scaled = GGUFLlama(write(tmp_path / "scaled.gguf", factors=[2.0] * 8))
    linear = GGUFLlama(write(tmp_path / "linear.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}))
    assert torch.allclose(scaled._frequencies * 2, plain._frequencies)
    assert torch.allclose(linear._frequencies, scaled._frequencies)


def test_gguf_llama_runs_in_half_precision(tmp_path):
    assert [len(found) for found in tokens(write(tmp_path / "model.gguf"), dtype="bfloat16")] == [16] * 3


@pytest.mark.parametrize("options", [{}, {"max_plans_in_flight": 1, "max_num_batched_tokens": 50}], ids=str)
def test_gguf_llama_gives_the_same_tokens_when_its_steps_are_filled_up(tmp_path, monkeypatch, options):
    write(tmp_path / "model.gguf")
    plain = tokens(tmp_path / "model.gguf", dtype="float32", **options)
    monkeypatch.setattr(gguf_llama, "compiles_products", lambda *_: True)
    seen, normed = set(), GGUFLlama._normed
    monkeypatch.setattr(GGUFLlama, "_normed", lambda self, x: seen.add(len(x)) or normed(self, x))
    assert tokens(tmp_path / "model.gguf", dtype="float32", **options) == plain
    assert seen == {padded_rows(count) for count in seen}
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"architecture": "gemma"}, "expected one of llama, qwen2, found 'gemma'"),
        ({"expert_count": 8}, "expected no experts, found 8"),
        ({"rope.scaling.type": "yarn"}, "found 'yarn'"),
        ({"rope.dimension_count": 8}, "expected all 16 elements of a head to turn, found 8"),
        ({"more_tensors": ["blk.0.attn_q_norm.weight"]}, "expected no tensor blk.0.attn_q_norm.weight"),
        ({"attention.value_length": 8}, "expected values of 16 elements"),
    ],
)
def test_gguf_llama_refuses_another_model_by_name(tmp_path, options, match):
    with pytest.raises(UnsupportedError, match=match):
        GGUFLlama(write(tmp_path / "model.gguf", **options))


def test_gguf_llama_gives_the_tokens_of_smollm2(smollm_file, smollm_case):
    with LLM(smollm_file, dtype="float32", num_blocks=512, max_model_len=1024) as llm:
        outputs = llm.generate(smollm_case.prompts, smollm_case.params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == smollm_case.expected


def test_gguf_model_that_takes_adapters_is_run_by_transformers(tmp_path, letters):
    write(tmp_path / "tiny.gguf")
    model, _ = open_model(tmp_path / "tiny.gguf", letters, "float32", for_adapters=True)
    assert isinstance(model, TransformersModel)
