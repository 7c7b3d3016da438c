"""`pagedkv plan`: what a model's configuration says, and what fits."""

import json

import pytest

from pagedkv import cli
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.planning import Request, effects, plan_capacity, read_model_config

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2560,
    "dtype": "bfloat16",
    "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 32768,
}


# --- the configuration


def test_weights_count_the_gate_where_a_configuration_leaves_the_activation_to_its_default():
    without = {name: value for name, value in LLAMA_70B.items() if name != "hidden_act"}
    named, found = (read_model_config(config).weight_bytes for config in (LLAMA_70B, without))
    assert found == named
    assert read_model_config(without | {"hidden_act": "gelu"}).weight_bytes < named


@pytest.mark.parametrize(
    ("config", "layers", "heads", "head_dim"),
    [
        (LLAMA_70B, 80, 8, 128),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, 12, 12, 64),
        ({"num_layers": 4, "num_attention_heads": 8, "multi_query_group_num": 2, "kv_channels": 128}, 4, 2, 128),
        ({"n_layers": 3, "n_heads": 6, "d_model": 384, "attn_config": {"kv_n_heads": 2}}, 3, 2, 64),
        ({"num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}, 2, 1, 64),
        ({"model_type": "vl", "text_config": GEMMA}, 6, 4, 256),
        ({"num_hidden_layers": 3, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 3, 1, 288),
        (
            {**LLAMA_70B, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            1,
            8,
            128,
        ),
        ({**LLAMA_70B, "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4}, 1, 8, 128),
    ],
    ids=["llama", "gpt2", "chatglm", "mpt", "falcon", "nested", "latent", "hybrid", "jamba"],
)
def test_config_is_read_under_the_names_that_models_use(config, layers, heads, head_dim):
    model = read_model_config(config)
    [shape] = {(layer.num_kv_heads, layer.head_dim) for layer in model.layers.values()}
    assert (len(model.layers), *shape) == (layers, heads, head_dim)


def test_windows_are_those_of_the_layers():
    windows = [shape.sliding_window for shape in read_model_config(GEMMA).layers.values()]
    assert windows == [1024] * 5 + [None]


def test_config_without_a_field_is_refused_by_its_name():
    with pytest.raises(InvalidArgumentError, match="model: expected num_hidden_layers"):
        read_model_config({"hidden_size": 8})


def test_config_with_a_field_that_is_no_number_is_refused_by_its_name():
    with pytest.raises(
        InvalidArgumentError, match="model: num_attention_heads: expected a whole number .* found 'many'"
    ):
        read_model_config({**LLAMA_70B, "num_attention_heads": "many"})


def test_encoder_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="has an encoder"):
        read_model_config({**LLAMA_70B, "is_encoder_decoder": True})


def test_weights_that_lie_beside_the_config_are_counted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    index = {"metadata": {"total_size": 141_107_412_992}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = read_model_config(tmp_path)
    assert (model.weight_bytes, model.weights_are_estimated) == (141_107_412_992, False)


def test_weights_are_estimated_within_a_percent_where_none_lie_beside():
    model = read_model_config(LLAMA_70B)
    assert model.weights_are_estimated
    assert model.weight_bytes == pytest.approx(2 * 70.55e9, rel=0.01)


@pytest.mark.parametrize(
    ("field", "most", "found"),
    [("num_hidden_layers", "100,000", 100_001), ("num_key_value_heads", "2,147,483,647", 2**31)],
)
def test_config_beyond_any_models_is_refused_by_its_field(field, most, found):
    with pytest.raises(InvalidArgumentError, match=f"model: {field}: expected at most {most}, found {found}"):
        read_model_config({**LLAMA_70B, field: found})


# --- the plan


def test_token_bytes_count_keys_and_values_of_all_layers():
    plan = plan_capacity(read_model_config(LLAMA_70B), 80 * 10**9, num_gpus=4)
    assert plan.token_bytes == 2 * 80 * 8 * 128 * 2
    assert plan.block_bytes == 16 * plan.token_bytes / 4


def test_what_fits_is_what_memory_has_beside_the_weights():
    settings = {"num_gpus": 4, "weight_bytes": 140 * 10**9, "reserve": 0, "max_num_seqs": 100_000}
    plan = plan_capacity(read_model_config(LLAMA_70B), 80 * 10**9, **settings)
    free = 80 * 10**9 * 0.9 - 35 * 10**9
    assert plan.num_blocks == int(free // plan.block_bytes) - 1
    assert plan.num_tokens == 16 * plan.num_blocks
    assert plan.limited_by == "memory"


def test_requests_share_the_blocks_of_their_prefix():
    model = read_model_config(LLAMA_70B)
    alone, shared = (
        plan_capacity(model, 80 * 10**9, num_gpus=4, request=Request(4096, 512, prefix), max_num_seqs=4096)
        for prefix in (0, 4000)
    )
    assert shared.num_mean_requests > 5 * alone.num_mean_requests


def test_windows_let_more_requests_fit():
    whole = {**GEMMA, "layer_types": ["full_attention"] * 6}
    request = Request(16_000, 1000)
    fits = [
        plan_capacity(read_model_config(config), 8 * 10**9, request=request, weight_bytes=0, reserve=0).num_requests
        for config in (whole, GEMMA)
    ]
    assert fits[1] > 2 * fits[0]


def test_effects_say_what_grouped_queries_and_fp8_bring():
    model = read_model_config(LLAMA_70B)
    found = effects(model, 80 * 10**9, num_gpus=4, max_num_seqs=100_000)
    gains = {effect.name: effect.gain for effect in found}
    assert gains["a KV head for each query head (no GQA)"] == pytest.approx(1 / 8, rel=0.05)
    assert gains["FP8"] == pytest.approx(2, rel=0.02)
    assert gains["half of the prompt shared"] > 1.3


def test_larger_blocks_waste_more():
    model = read_model_config(LLAMA_70B)
    waste = [plan_capacity(model, 80 * 10**9, num_gpus=4, block_size=size).waste for size in (16, 64, 256)]
    assert waste == sorted(waste)
    assert waste[0] == pytest.approx(7.5 / (1024 + 256 + 7.5))


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"gpu_memory": 10 * 10**9}, "the weights, the reserve and one block do not fit"),
        ({"max_num_seqs": 4}, "seats limit: "),
        ({"num_gpus": 3}, "8 KV heads do not divide by 3 devices"),
        ({"gpu_memory": 43 * 10**9}, "no sequence of 131072 tokens fits"),
    ],
)
def test_plan_warns_of_what_limits(change, warning):
    arguments = {"gpu_memory": 80 * 10**9, "num_gpus": 4, **change}
    plan = plan_capacity(read_model_config(LLAMA_70B), **arguments)
    assert any(warning in found for found in plan.warnings), plan.warnings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_memory": 0}, "gpu_memory: expected at least 1, found 0"),
        ({"utilization": 1.5}, "utilization: expected a share above 0, at most 1, found 1.5"),
        ({"kv_cache_dtype": "int4"}, "^kv_cache_dtype: expected one of float32"),
        ({"max_model_len": 0}, "max_model_len: expected at least 1, found 0"),
        ({"reserve": -1}, "^reserve: expected at least 0, found -1"),
        ({"request": Request(200_000, 1)}, r"prompt_tokens \+ output_tokens: expected at most 131072"),
    ],
)
def test_plan_names_the_argument_that_it_refuses(change, message):
    with pytest.raises(InvalidArgumentError, match=message):
        plan_capacity(read_model_config(LLAMA_70B), **{"gpu_memory": 80 * 10**9, **change})


def test_request_refuses_a_prefix_longer_than_its_prompt():
    with pytest.raises(InvalidArgumentError, match="shared_prefix_tokens: expected 0 to 10"):
        Request(10, 5, 11)


# --- the command


@pytest.fixture
def plan(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "version", lambda name: "0")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return lambda *arguments: cli.main(["plan", "--model", str(tmp_path), *arguments])


def test_plan_shows_what_fits_and_writes_it(plan, tmp_path, capsys):
    assert plan("--gpu-memory", "80GB", "--num-gpus", "4", "--json", str(tmp_path / "plan.json")) == 0
    shown = capsys.readouterr().out
    assert "327,680 bytes" in shown
    assert "FP8" in shown
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["plan"]["token_bytes"] == 327_680
    assert len(content["effects"]) >= 6


@pytest.mark.parametrize(("given", "shown"), [("100GB", "100.0 GB"), ("0GB", "0.0 GB")])
def test_plan_shows_the_weights_that_were_given_as_no_estimate(plan, tmp_path, capsys, given, shown):
    assert plan("--gpu-memory", "80GB", "--num-gpus", "4", "--weights", given, "--json", str(tmp_path / "p.json")) == 0
    out = capsys.readouterr().out
    [row] = [line for line in out.splitlines() if "weights" in line]
    assert row.split("│")[2].strip() == shown
    assert "estimated" not in (tmp_path / "p.json").read_text()


def test_plan_has_no_gain_where_nothing_fits(plan, tmp_path, capsys):
    assert plan("--gpu-memory", "1GB", "--json", str(tmp_path / "plan.json")) == 0
    assert " nan " not in capsys.readouterr().out
    content = json.loads((tmp_path / "plan.json").read_text())
    assert {effect["gain"] for effect in content["effects"]} == {None}


def test_plan_refuses_memory_that_is_no_size(plan, capsys):
    with pytest.raises(SystemExit):
        plan("--gpu-memory", "much")
    assert "expected bytes such as 80GB or 40GiB, found 'much'" in capsys.readouterr().err


def test_plan_says_where_no_config_lies(plan, tmp_path, capsys):
    (tmp_path / "config.json").unlink()
    assert plan("--gpu-memory", "80GB") == 2
    assert "model: expected a config.json" in capsys.readouterr().err
