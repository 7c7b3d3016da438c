"""Models for the engine's tests, what `transformers.generate` says of them, and a loop that rolls back."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagedkv import LLM, CacheConfig, KVCache, SamplingParams, Scheduler, SchedulerConfig  # noqa: E402
from pagedkv.attention import instruction_sets  # noqa: E402
from pagedkv.models import TransformersModel, load_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LEAST_MARGIN = 1e-3
# Where the prompts start in the license, and how long they are.
SMOLLM_PROMPTS = [(0, 1), (40, 7), (100, 16), (200, 33), (300, 90), (500, 150), (800, 300), (1200, 600)]
# Architecture, a seed that leaves the margin that `reference` asks for, and options beside those of `build`.
RANDOM_MODELS = {
    "mha": ("llama", 0, {"num_key_value_heads": 4, "head_dim": 16}),
    "mqa": ("llama", 1, {"num_key_value_heads": 1, "head_dim": 16}),
    "gqa_7_to_1": (
        "llama",
        1,
        {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 112},
    ),
    "head_dim_80": ("llama", 2, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80}),
    "head_dim_96": ("llama", 1, {"num_key_value_heads": 2, "head_dim": 96}),
    "sliding_window": ("mistral", 8, {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24}),
}


@dataclass(frozen=True)
class Case:
    """A model, prompts, and the greedy tokens that transformers gives for each."""

    model: object
    prompts: list
    max_tokens: int
    expected: list

    @property
    def params(self):
        """Return what makes `LLM` do the same."""
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)


@pytest.fixture(params=instruction_sets())
def isa(request, monkeypatch):
    """Force each instruction set that this processor has; return its name."""
    monkeypatch.setenv("PAGEDKV_CPU_ISA", request.param)
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm(smollm_file):
    """Return SmolLM2 in float32 and its tokenizer."""
    return load_model(smollm_file, dtype="float32")


@pytest.fixture(scope="session")
def smollm_tokenizer(smollm_file):
    """Return the tokenizer of SmolLM2 alone."""
    return transformers.AutoTokenizer.from_pretrained(smollm_file.parent, gguf_file=smollm_file.name)


@pytest.fixture(scope="session")
def smollm_case(smollm):
    """Return eight prompts of 1 to 600 tokens, cut from a text that does not change."""
    model, tokenizer = smollm
    text = tokenizer((ROOT / "LICENSE").read_text()).input_ids
    prompts = [text[start : start + length] for start, length in SMOLLM_PROMPTS]
    return Case(model, prompts, 64, [reference(model, prompt, 64) for prompt in prompts])


@pytest.fixture(scope="session")
def make_case():
    """Return a function that makes a small model with random weights, and prompts from the same seed."""

    def make(model_type, seed, lengths=(1, 17, 45, 70), **options):
        torch.manual_seed(seed)
        model = build(model_type, **options)
        prompts = [torch.randint(0, 256, (length,)).tolist() for length in lengths]
        return Case(model, prompts, 32, [reference(model, prompt, 32) for prompt in prompts])

    return make


@pytest.fixture(scope="session", params=RANDOM_MODELS)
def random_case(request, make_case):
    """Return one small model after the other."""
    model_type, seed, options = RANDOM_MODELS[request.param]
    return make_case(model_type, seed, (1, 5, 17, 32, 45, 70), **options)


@pytest.fixture(scope="session")
def make_model():
    """Return a function that makes a small model with random weights."""
    return build


@pytest.fixture(scope="session")
def greedy_tokens():
    """Return a function that gives transformers' greedy tokens."""
    return reference


@pytest.fixture
def tiny_model():
    """Return a model with random weights that a test may change."""
    torch.manual_seed(0)
    return build("llama", num_key_value_heads=2, head_dim=16)


class Letters:
    """A tokenizer of one token per character."""

    eos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return type("Encoding", (), {"input_ids": [ord(letter) % 256 for letter in text]})

    def decode(self, token_ids, skip_special_tokens):
        assert isinstance(skip_special_tokens, bool)
        return "".join(chr(0x100 + token) for token in token_ids)


@pytest.fixture
def letters():
    """Return a tokenizer of one token per character."""
    return Letters()


def build(model_type, **options):
    """Return a model of 3 layers, with weights so large that its output varies."""
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = transformers.AutoConfig.for_model(model_type, **(sizes | options))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def reference(model, prompt, max_tokens):
    """Return transformers' greedy tokens; their margin over the second best must leave room for rounding."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() >= LEAST_MARGIN, "choose another seed or prompt"
    return result.sequences[0, len(prompt) :].tolist()


def poison(cache):
    """Make every element of a cache NaN; packed keys can be reached by writing to them only."""
    if not cache.packed:
        cache.pool.fill_(math.nan)
        return
    for group in cache.groups:
        slots = torch.arange(cache.num_blocks * group.block_size)
        nothing = torch.full((len(slots), group.num_kv_heads, group.head_dim), math.nan)
        for layer in group.layers:
            cache.append_kv(layer, nothing, nothing, slots)


@pytest.fixture(scope="session")
def open_llm():
    """Return a function that makes an LLM whose memory holds NaN wherever nothing was written."""

    def open_llm(model, tokenizer=None, **options):
        llm = LLM(model, tokenizer, **options)
        poison(llm.kv_cache)
        return llm

    return open_llm


@pytest.fixture(scope="session")
def generate_with_rollbacks():
    """Return a loop over the public parts that undoes every third plan, in turn at each of the points that are named.

    They are "before_apply", "after_apply", "after_forward", and "with_plan_behind": then a second plan, made and run
    on the tokens of the first, falls with it.
    """

    def generate(case, *points, block_size=16, num_blocks=256, packed=False):
        model = TransformersModel(case.model)
        config = CacheConfig(num_blocks, block_size, groups=model.cache_groups())
        max_model_len = min(1024, model.max_model_len)
        limits = SchedulerConfig(max_num_batched_tokens=128, max_model_len=max_model_len, max_plans_in_flight=2)
        scheduler, cache = Scheduler(config, limits), KVCache.from_config(config, limits, packed=packed)
        poison(cache)
        handles = [
            scheduler.add_request(str(number), prompt, max_tokens=case.max_tokens)
            for number, prompt in enumerate(case.prompts)
        ]
        outputs = {handle: [] for handle in handles}
        num_plans = 0
        while scheduler.has_unfinished_requests():
            plan = scheduler.schedule()
            num_plans += 1
            if num_plans % 3 == 0:
                _undo(scheduler, cache, model, plan, points[num_plans // 3 % len(points)])
                continue
            cache.apply(plan)
            tokens = model.forward(plan, cache).argmax(-1).int()
            result = scheduler.commit(plan, tokens)
            for handle, token in zip(result.handles.tolist(), tokens.tolist(), strict=True):
                outputs[handle].append(token)
        scheduler.check_integrity()
        return [outputs[handle] for handle in handles]

    return generate


def _undo(scheduler, cache, model, plan, when):
    if when != "before_apply":
        cache.apply(plan)
    if when in ("after_forward", "with_plan_behind"):
        tokens = model.forward(plan, cache).argmax(-1).int()
    if when == "with_plan_behind":
        behind = scheduler.schedule()
        cache.apply(behind)
        if behind.num_tokens:
            model.forward(behind, cache, tokens)
    scheduler.rollback(plan)
