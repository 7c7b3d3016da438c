"""Section 3 of the paper: what the keys and values of a long request take."""

from pagedkv.planning import Request, plan_capacity, read_model_config
from pagedkv.simulate.paper.lines import Line

LENGTH = 2048
# LLaMA 13B has the geometry of OPT-13B: 40 layers of 40 heads of 128.
LLAMA_13B = {
    "model_type": "llama",
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "vocab_size": 32_000,
    "hidden_act": "silu",
    "torch_dtype": "float16",
    "max_position_embeddings": LENGTH,
}
# The launch blog of vLLM: "up to 1.7 GB"; the paper: "up to 1.6 GB", which are GiB.
PUBLISHED_GB = 1.7


def capacities() -> list[Line]:
    """Return the bytes of a whole sequence of LLaMA 13B, and what FP8 makes of them."""
    model = read_model_config(LLAMA_13B)
    request = Request(LENGTH // 2, LENGTH // 2)
    half = plan_capacity(model, 40 << 30, request=request)
    fp8 = plan_capacity(model, 40 << 30, request=request, kv_cache_dtype="float8_e4m3fn")
    whole = LENGTH * half.token_bytes
    note = "rounded up by who published it; 1.5625 GiB"
    gigabytes = Line(
        "capacity_llama13b", "GB", whole / 1e9, PUBLISHED_GB, 0.05, None, "lower", "1.678 GB for 2,048 tokens", note
    )
    share = (LENGTH * fp8.token_bytes + fp8.scale_bytes) / whole
    note = f"scales of keys and values for each layer and KV head: {fp8.scale_bytes:,} bytes in all"
    details = {"scale_bytes": fp8.scale_bytes, "token_bytes": fp8.token_bytes}
    return [
        gigabytes,
        Line("capacity_fp8", "of the bytes", share, 0.5, 1e-3, None, "lower", "0.50 and scales", note, details),
    ]
