"""Requests with low-rank adapters: the tokens of a model that has each adapter merged, in one mixed batch."""

import asyncio
import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from pagedkv import LLM, AsyncLLMEngine, BeamSearchParams, LLMEngine, LoRARequest, SamplingParams
from pagedkv.exceptions import InvalidArgumentError, StateError, UnsupportedError

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
# Architecture, its options, and the layers of two adapters.
MODELS = {
    "llama": (
        "llama",
        {"num_key_value_heads": 2, "head_dim": 16},
        (("q_proj", "v_proj"), ("k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
        (("c_attn",), ("c_attn", "c_proj", "c_fc")),
    ),
}


def layers_of(model, targets):
    return [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in targets]


def sizes(module):
    """Return how many outputs and inputs a layer has, whichever way round its weight lies."""
    weight = tuple(module.weight.shape)
    return weight if isinstance(module, torch.nn.Linear) else weight[::-1]


def save_adapter(folder, model, targets, rank=4, seed=0, tensors=None, **config):
    """Write a folder as PEFT does, and return it."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(plain | {"target_modules": list(targets)} | config))
    if tensors is None:
        tensors = {}
        for name in layers_of(model, targets):
            num_outputs, num_inputs = sizes(model.get_submodule(name))
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, num_inputs, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model, folder, scale=2.0):
    """Return a copy of a model with an adapter added to its weights."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    model = copy.deepcopy(model)
    for name in {name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in tensors}:
        weight = model.get_submodule(name).weight.data
        down, up = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        delta = scale * up @ down
        weight += delta if isinstance(model.get_submodule(name), torch.nn.Linear) else delta.T
    return model


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(params=MODELS)
def case(request, tmp_path, make_model):
    """Return a model, the folders of two adapters, and prompts."""
    model_type, options, targets = MODELS[request.param]
    torch.manual_seed(1)
    model = make_model(model_type, **options)
    folders = [save_adapter(tmp_path / "a", model, targets[0], rank=4, seed=1)]
    folders.append(save_adapter(tmp_path / "b", model, targets[1], rank=3, seed=2, lora_alpha=6))
    return model, folders, [torch.randint(1, 256, (length,)).tolist() for length in (3, 17, 40)]


@pytest.fixture
def adapter(tiny_model, tmp_path):
    """Return an adapter for the tiny model."""
    return LoRARequest("one", 1, save_adapter(tmp_path / "one", tiny_model, ("q_proj", "down_proj")))


def test_lora_gives_the_tokens_of_merged_models_when_adapters_share_a_batch_with_the_base_model(
    case, open_llm, greedy_tokens
):
    model, folders, prompts = case
    adapters = [None, *(LoRARequest(folder.name, at + 1, folder) for at, folder in enumerate(folders))]
    models = [model, *(merged(model, folder) for folder in folders)]
    expected = [greedy_tokens(own, prompt, MAX_TOKENS) for prompt in prompts for own in models]
    assert len({tuple(found) for found in expected}) == len(expected), "adapters that change nothing show nothing"
    with open_llm(model, enable_lora=True, block_size=8, max_num_batched_tokens=32) as llm:
        mixed = []
        llm.step_hooks.append(lambda event: mixed.append(len(event.plan.handles)))
        several = [prompt for prompt in prompts for _ in models]
        outputs = llm.generate(several, GREEDY, use_tqdm=False, lora_request=adapters * len(prompts))
        assert llm.llm_engine.list_loras() == {1, 2}
    assert tokens(outputs) == expected
    assert max(mixed) == len(expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 6},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 1, "q_proj": 3}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_lora_gives_the_tokens_of_peft(tiny_model, open_llm, tmp_path, greedy_tokens, options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    torch.manual_seed(1)
    theirs = peft.get_peft_model(copy.deepcopy(tiny_model), config).eval()
    theirs.save_pretrained(tmp_path / "peft")
    prompts = [list(range(3, 20)), [7, 9]]
    expected = [greedy_tokens(theirs, prompt, MAX_TOKENS) for prompt in prompts]
    assert expected != [greedy_tokens(tiny_model, prompt, MAX_TOKENS) for prompt in prompts]
    with open_llm(tiny_model, enable_lora=True) as llm:
        request = LoRARequest("theirs", 5, str(tmp_path / "peft"))
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=request)) == expected


def test_lora_prefixes_are_shared_within_an_adapter_and_by_no_other(case, open_llm):
    model, folders, _ = case
    adapters = [None, *(LoRARequest(folder.name, at + 1, folder) for at, folder in enumerate(folders))]
    prompt = list(range(40))
    with open_llm(model, enable_lora=True, block_size=8) as llm:
        cold = [llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=own)[0] for own in adapters]
        warm = [llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=own)[0] for own in adapters]
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0]
    assert [output.num_cached_tokens for output in warm] == [32, 32, 32]
    assert tokens(cold) == tokens(warm)


def test_lora_beams_and_preempted_requests_keep_their_adapters(tiny_model, open_llm, adapter):
    prompts = [[5] * 9, list(range(40)), list(range(90, 120))]
    theirs = merged(tiny_model, adapter.lora_path)
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with open_llm(theirs, block_size=8) as llm:
        expected = llm.generate(prompts, GREEDY, use_tqdm=False), llm.beam_search(prompts, beams)
    with open_llm(tiny_model, enable_lora=True, block_size=8, num_blocks=13, max_model_len=80) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapter)
        found = llm.beam_search(prompts, beams, lora_request=adapter)
        assert llm.scheduler.num_preemptions > 0
    assert tokens(outputs) == tokens(expected[0])
    assert [[each.tokens for each in output.sequences] for output in found] == [
        [each.tokens for each in output.sequences] for output in expected[1]
    ]


def test_lora_requests_of_an_async_engine_run_with_their_adapters(tiny_model, adapter, greedy_tokens):
    async def last(engine, lora_request):
        async for output in engine.generate([7, 9], GREEDY, lora_request=lora_request):
            found = output
        return found

    async def main():
        async with AsyncLLMEngine(tiny_model, enable_lora=True) as engine:
            return await asyncio.gather(last(engine, adapter), last(engine, None))

    models = merged(tiny_model, adapter.lora_path), tiny_model
    assert tokens(asyncio.run(main())) == [greedy_tokens(model, [7, 9], MAX_TOKENS) for model in models]


def test_lora_requests_share_nothing_with_others_in_a_trace(tiny_model, tmp_path, adapter):
    with LLMEngine(tiny_model, enable_lora=True, block_size=8, record_trace=tmp_path / "trace.jsonl") as engine:
        for number, lora_request in enumerate([None, adapter, adapter]):
            engine.add_request(str(number), list(range(16)), GREEDY, lora_request=lora_request)
        while engine.has_unfinished_requests():
            engine.step()
    base, first, second = (json.loads(line)["hash_ids"] for line in (tmp_path / "trace.jsonl").read_text().splitlines())
    assert first == second
    assert not set(first) & set(base)


def test_lora_leaves_the_model_as_it_was_given(tiny_model, adapter):
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = tiny_model(ids).logits
        with LLM(tiny_model, enable_lora=True) as llm:
            llm.generate([5, 6, 7], GREEDY, use_tqdm=False, lora_request=adapter)
            assert torch.equal(tiny_model(ids).logits, before)
    assert not any(module._forward_hooks for module in tiny_model.modules())


def test_lora_adapter_is_removed_only_when_no_request_runs_with_it(tiny_model, tmp_path, adapter, greedy_tokens):
    other = LoRARequest("other", 1, save_adapter(tmp_path / "other", tiny_model, ("v_proj",), seed=8))
    prompt = list(range(40))
    with LLMEngine(tiny_model, enable_lora=True, block_size=8) as engine:

        def run(lora_request):
            engine.add_request("a", prompt, GREEDY, lora_request=lora_request)
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            return outputs[-1]

        assert engine.add_lora(adapter)
        assert not engine.add_lora(adapter)
        run(adapter)
        with pytest.raises(InvalidArgumentError, match="lora_request: expected .*'one'.*, found .*'other'"):
            engine.add_request("b", prompt, GREEDY, lora_request=other)
        engine.add_request("b", prompt, GREEDY, lora_request=adapter)
        with pytest.raises(StateError, match="lora_id: expected an adapter that no request runs with, found 1"):
            engine.remove_lora(1)
        engine.abort_request("b")
        assert engine.remove_lora(1)
        assert not engine.remove_lora(1)
        assert engine.list_loras() == set()
        output = run(other)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == greedy_tokens(merged(tiny_model, other.lora_path), prompt, MAX_TOKENS)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type .*: expected 'LORA', found 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type .*: expected 'CAUSAL_LM'"),
        ({"bias": "all"}, "bias .*: expected 'none', found 'all'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save .*\['lm_head'\]"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights .*'pissa'"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [4]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
    ],
    ids=lambda found: next(iter(found)) if isinstance(found, dict) else "",
)
def test_lora_refuses_configurations_by_name(tiny_model, tmp_path, config, named):
    folder = save_adapter(tmp_path / "a", tiny_model, ("q_proj",), **config)
    check_refusal(tiny_model, LoRARequest("a", 1, folder), UnsupportedError, named)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"lora_alpha": float("inf")}, "lora_alpha .* a finite number above 0, found inf"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern .* a finite number above 0, found 'x'"),
        ({"alpha_pattern": {"[": 1}}, r"alpha_pattern .* regular expressions .*'\['"),
        ({"rank_pattern": [4]}, r"rank_pattern .* numbers by pattern, found \[4\]"),
    ],
    ids=["alpha", "number", "pattern", "list"],
)
def test_lora_refuses_numbers_that_are_none_by_name(tiny_model, tmp_path, config, named):
    folder = save_adapter(tmp_path / "a", tiny_model, ("q_proj",), **config)
    check_refusal(tiny_model, LoRARequest("a", 1, folder), InvalidArgumentError, named)


def test_lora_refuses_weights_that_are_not_finite(tiny_model, tmp_path):
    made = {f"{QUERY}.lora_A.weight": torch.full((4, 64), torch.nan), f"{QUERY}.lora_B.weight": torch.ones(64, 4)}
    folder = save_adapter(tmp_path / "a", tiny_model, ("q_proj",), tensors=made)
    check_refusal(tiny_model, LoRARequest("a", 1, folder), InvalidArgumentError, "finite weights for .*q_proj")


def check_refusal(model, request, error, named):
    """Check that an adapter is refused, that nothing is loaded then, and that the engine goes on."""
    with LLM(model, enable_lora=True) as llm:
        with pytest.raises(error, match=f"lora_request: .*{named}"):
            llm.generate([5, 6], GREEDY, use_tqdm=False, lora_request=request)
        assert llm.llm_engine.list_loras() == set()
        assert not any(module._forward_hooks for module in model.modules())
        llm.generate([5, 6], GREEDY, use_tqdm=False)


NORM = "base_model.model.model.norm"
HEAD = "base_model.model.lm_head"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "error", "named"),
    [
        ({f"{QUERY}.lora_magnitude_vector": (64,)}, UnsupportedError, "found .*lora_magnitude_vector"),
        ({f"{QUERY}.lora_A.weight": (4, 64)}, InvalidArgumentError, "lora_A .* and lora_B .* for .*q_proj"),
        ({f"{QUERY}.lora_A.weight": (4, 64), f"{QUERY}.lora_B.weight": (64, 3)}, InvalidArgumentError, "q_proj"),
        ({f"{QUERY}.lora_A.weight": (2, 64), f"{QUERY}.lora_B.weight": (64, 2)}, InvalidArgumentError, "rank 4 .* 2"),
        (
            {f"{QUERY}.lora_A.weight": (4, 32), f"{QUERY}.lora_B.weight": (64, 4)},
            InvalidArgumentError,
            "64 outputs and 64 inputs for .*q_proj, found 64 and 32",
        ),
        ({f"{QUERY}x.lora_A.weight": (4, 64), f"{QUERY}x.lora_B.weight": (64, 4)}, InvalidArgumentError, "q_projx"),
        ({f"{NORM}.lora_A.weight": (4, 64), f"{NORM}.lora_B.weight": (64, 4)}, UnsupportedError, "LlamaRMSNorm"),
        ({f"{HEAD}.lora_A.weight": (4, 64), f"{HEAD}.lora_B.weight": (256, 4)}, UnsupportedError, "output layer"),
    ],
    ids=["dora", "half", "ranks", "rank", "shape", "no_layer", "norm", "head"],
)
def test_lora_refuses_tensors_by_name(tiny_model, tmp_path, tensors, error, named):
    made = {name: torch.ones(shape) for name, shape in tensors.items()}
    folder = save_adapter(tmp_path / "a", tiny_model, ("q_proj",), tensors=made)
    check_refusal(tiny_model, LoRARequest("a", 1, folder), error, named)


def test_adapter_of_a_request_that_is_refused_is_not_left_behind(tiny_model, adapter):
    request = LoRARequest("kept", 1, adapter.lora_path)
    with LLM(tiny_model, enable_lora=True, max_model_len=32) as llm:
        with pytest.raises(ValueError, match="prompt"):
            llm.generate([5] * 40, GREEDY, use_tqdm=False, lora_request=request)
        assert llm.llm_engine.list_loras() == set()
        llm.llm_engine.add_lora(request)
        with pytest.raises(ValueError, match="prompt"):
            llm.generate([5] * 40, GREEDY, use_tqdm=False, lora_request=request)
        assert llm.llm_engine.list_loras() == {1}


def test_lora_refuses_folders_that_are_none(tiny_model, tmp_path):
    check_refusal(tiny_model, LoRARequest("a", 1, tmp_path / "none"), InvalidArgumentError, "adapter_config.json")
    folder = save_adapter(tmp_path / "a", tiny_model, ("q_proj",))
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    check_refusal(tiny_model, LoRARequest("a", 1, folder), InvalidArgumentError, "expected tensors in")
    (folder / "adapter_model.safetensors").unlink()
    check_refusal(tiny_model, LoRARequest("a", 1, folder), InvalidArgumentError, "expected a file")
    (folder / "adapter_config.json").write_text("{")
    check_refusal(tiny_model, LoRARequest("a", 1, folder), InvalidArgumentError, "expected JSON")


def test_lora_refuses_adapters_of_experts(tmp_path, make_model):
    torch.manual_seed(0)
    model = make_model("llama", num_key_value_heads=2, head_dim=16)
    layer = model.model.layers[0].mlp
    layer.experts = torch.nn.ModuleList([torch.nn.Linear(64, 64)])
    name = "base_model.model.model.layers.0.mlp.experts.0"
    made = {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(64, 4)}
    folder = save_adapter(tmp_path / "a", model, (), tensors=made)
    check_refusal(model, LoRARequest("a", 1, folder), UnsupportedError, "experts")


def test_lora_refuses_layers_that_do_not_see_every_token(tiny_model, adapter):
    mlp = tiny_model.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, :1],))
    with LLM(tiny_model, enable_lora=True) as llm, pytest.raises(UnsupportedError, match="down_proj to see each of 2"):
        llm.generate([5, 6], GREEDY, use_tqdm=False, lora_request=adapter)


def test_lora_requests_are_refused_where_adapters_are_not_enabled(tiny_model, adapter):
    with LLM(tiny_model) as llm:
        with pytest.raises(InvalidArgumentError, match="lora_request: expected none, because enable_lora is false"):
            llm.generate([5, 6], GREEDY, use_tqdm=False, lora_request=adapter)
        assert not llm.llm_engine.remove_lora(1)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (("", 1, "a"), "lora_name"),
        (("a", 0, "a"), "lora_int_id"),
        (("a", True, "a"), "lora_int_id"),
        (("a", 1, ""), "lora_path"),
    ],
)
def test_lora_request_names_the_field_that_is_wrong(values, field):
    with pytest.raises(InvalidArgumentError, match=f"{field}: expected"):
        LoRARequest(*values)


def test_lora_requests_must_be_one_per_prompt(tiny_model, adapter):
    with LLM(tiny_model, enable_lora=True) as llm:
        for wrong in ([adapter], [None, adapter, None], "one", ["one", None]):
            with pytest.raises(InvalidArgumentError, match="lora_request: expected"):
                llm.generate([[5], [6]], GREEDY, use_tqdm=False, lora_request=wrong)
