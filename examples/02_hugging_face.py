"""A loop of your own around a Hugging Face model: plan, apply, run, commit.

The model is a small Llama with random weights, so nothing is downloaded. Two of the prompts share a prefix, whose keys
and values are computed once. `pagedkv.LLM` is this loop with sampling and text.
Run: python examples/02_hugging_face.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pagedkv
from pagedkv.models import TransformersModel

MAX_TOKENS = 12

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=256, num_key_value_heads=2, initializer_range=0.25, eos_token_id=None, **sizes)
llama = LlamaForCausalLM(config).eval()
model = TransformersModel(llama)

cache_config = pagedkv.CacheConfig(64, block_size=16, groups=model.cache_groups())
scheduler_config = pagedkv.SchedulerConfig(max_num_seqs=8, max_model_len=256)
scheduler = pagedkv.Scheduler(cache_config, scheduler_config)
kv_cache = pagedkv.KVCache.from_config(cache_config, scheduler_config)

prefix = list(range(100, 140))
prompts = [[*prefix, 1, 2, 3], [*prefix, 7], [5]]
handles = [scheduler.add_request(str(i), prompt, max_tokens=MAX_TOKENS) for i, prompt in enumerate(prompts)]
outputs = {handle: [] for handle in handles}

while scheduler.has_unfinished_requests():
    plan = scheduler.schedule()
    kv_cache.apply(plan)
    logits = model.forward(plan, kv_cache)
    tokens = logits.argmax(-1).int()
    result = scheduler.commit(plan, tokens)
    for handle, token in zip(result.handles.tolist(), tokens.tolist(), strict=True):
        outputs[handle].append(token)
    for request in result.finished:
        print(f"request {request.request_id}: {request.num_cached_tokens} prompt tokens taken from the cache")

for handle, prompt in zip(handles, prompts, strict=True):
    ids = torch.tensor([prompt])
    expected = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    assert outputs[handle] == expected[0, len(prompt) :].tolist()
print("greedy tokens equal those of transformers.generate")
