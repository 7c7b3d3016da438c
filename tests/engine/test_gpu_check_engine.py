"""The engine's stage of `make gpu-check`, on the CPU: what it compares, and that it finds what is wrong."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
stage = importlib.import_module("gpu_check.stages.engine")
sys.path.remove(str(BENCHMARKS))

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
PROMPTS = (13, 30, 31, 47)  # each fills a block within twelve tokens


@pytest.fixture
def result(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_CHECK_RESULT", str(tmp_path / "result.json"))
    return tmp_path / "result.json"


def test_engine_stage_passes_when_tokens_are_those_of_transformers(result):
    assert stage.check("cpu", PROMPTS, 12, **SIZES) == 0
    found = json.loads(result.read_text())
    assert found["wrong"] == {"cold": [], "warm": [], "swapped": []}
    assert found["compared"] > 0.5
    assert found["cached_tokens"] > 0
    assert found["swapped_blocks"] > 0


def test_engine_stage_fails_when_the_cache_holds_something_else(result, monkeypatch):
    from pagedkv.models import metadata

    append = metadata.KVCache.append_kv

    def append_negated(cache, layer, k, v, *more, **options):
        append(cache, layer, k, -v, *more, **options)

    monkeypatch.setattr(metadata.KVCache, "append_kv", append_negated)
    assert stage.check("cpu", PROMPTS, 12, **SIZES) == 1
    assert json.loads(result.read_text())["wrong"]["cold"]
