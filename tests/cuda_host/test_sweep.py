"""Attention of both kernels against the oracle: types, sizes, layouts and features, every two of them together."""

import pytest
import torch
from backends import CudaOnHost
from batches import assert_matches_oracle, make_batch
from pairwise import pairwise

FLOAT16, BFLOAT16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
PARAMETERS = {
    "kernel": ["paged_decode", "paged_prefill"],
    "dtypes": [(FLOAT16, FLOAT16), (BFLOAT16, BFLOAT16), (BFLOAT16, E4M3), (BFLOAT16, E5M2), (FLOAT16, E4M3)],
    "head_dim": [64, 80, 96, 112, 128, 192, 256],
    "block_size": [1, 8, 16, 32, 64],
    "group": [1, 2, 3, 4, 5, 7, 8, 16],
    "layout": ["block", "layer", "token-major", "interleaved"],
    "feature": ["none", "window", "cap", "alibi", "sinks", "all"],
    "piece": [None, 48],
    "converts_fp8": [1, 0],
}
CASES = pairwise(PARAMETERS)


def name(case):
    parts = [getattr(part, "__name__", str(part)).removeprefix("torch.") for part in case.values()]
    return "-".join(parts).replace("torch.", "")


def options_of(feature, num_q_heads, dtypes):
    """Return the options of a feature, scales beside FP8 included."""
    heads = torch.arange(num_q_heads)
    options = {
        "window": {"sliding_window": 20},
        "cap": {"soft_cap": 3.0},
        "alibi": {"alibi_slopes": 2.0 ** -(heads % 7 + 1.0)},
        "sinks": {"sinks": (heads % 5 - 2.0).to(dtypes[0])},
    }
    every = {key: value for of_one in options.values() for key, value in of_one.items()}
    chosen = every if feature == "all" else options.get(feature, {})
    if dtypes[1].itemsize == 1:
        chosen = chosen | {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([3.0])}
    return chosen


def lay_out(batch, layout):
    """Give the caches another order in memory."""
    if layout == "token-major":
        batch.k_cache, batch.v_cache = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in batch.arrays()[1:3])
    if layout == "interleaved":
        both = torch.stack([batch.k_cache, batch.v_cache], dim=3)
        batch.k_cache, batch.v_cache = both[:, :, :, 0], both[:, :, :, 1]
    return batch


@pytest.mark.parametrize("case", CASES, ids=name)
def test_attention_matches_oracle(case):
    block_size, num_kv_heads = case["block_size"], 2
    edges = sorted({0, 1, 2, 3, 5, max(block_size - 1, 1), block_size + 1})
    sequences = [*((length, 1) for length in edges), (150, 1), (3, 4), (40, 7)]
    if case["kernel"] == "paged_prefill":
        sequences += [(33, 33), (70, 20)]
    batch = make_batch(
        sequences,
        num_q_heads=num_kv_heads * case["group"],
        num_kv_heads=num_kv_heads,
        head_dim=case["head_dim"],
        block_size=block_size,
        q_dtype=case["dtypes"][0],
        dtype=case["dtypes"][1],
        layout="layer" if case["layout"] == "layer" else "block",
    )
    cuda = CudaOnHost(case["kernel"], piece=case["piece"], macros={"PKV_CONVERTS_FP8": case["converts_fp8"]})
    options = options_of(case["feature"], batch.q.shape[1], case["dtypes"])
    assert_matches_oracle(cuda.paged_attention, lay_out(batch, case["layout"]), **options)


def test_every_two_values_are_tested_together():
    names = list(PARAMETERS)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            together = {(repr(case[one]), repr(case[other])) for case in CASES}
            assert len(together) == len(PARAMETERS[one]) * len(PARAMETERS[other])
