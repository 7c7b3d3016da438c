"""Chained block hashes, against values that vLLM computed: `tests/data/make_chain_hashes.py` says how."""

import json
from pathlib import Path

import numpy as np
import pytest

import pagedkv

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "chain_hashes.json").read_text())["cases"]


def arguments(case):
    spans = [(start, length, digest.encode()) for start, length, digest in case["image_spans"]]
    names = ("algorithm", "seed", "lora_name", "lora_path", "cache_salt")
    return {name: case[name] for name in names} | {"image_spans": spans}


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"{case['name']} {case['algorithm']}")
def test_chain_hashes_are_those_of_vllm(case):
    hashes = pagedkv.chain_hashes(case["token_ids"], case["block_size"], **arguments(case))
    assert [found.hex() for found in hashes] == case["block_hashes"]


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"{case['name']} {case['algorithm']}")
def test_chain_hashes_have_the_form_that_vllm_publishes_when_external(case):
    hashes = pagedkv.chain_hashes(case["token_ids"], case["block_size"], **arguments(case), external=True)
    assert hashes == case["external"]


def test_chain_hashes_take_arrays():
    tokens = np.arange(20, dtype=np.int32)
    assert pagedkv.chain_hashes(tokens, 4) == pagedkv.chain_hashes(list(range(20)), 4)


def test_chain_hashes_start_from_the_seed_of_vllm_when_none_is_given():
    plain = next(case for case in VECTORS if case["seed"] == "vllm-none-hash")
    hashes = pagedkv.chain_hashes(plain["token_ids"], plain["block_size"])
    assert [found.hex() for found in hashes] == plain["block_hashes"]


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2, "algorithm": "md5"}, "algorithm"),
        ({"block_size": 2, "lora_path": "/a"}, "lora_path"),
        ({"block_size": 2, "image_spans": [(0, 2, b"a"), (1, 1, b"b")]}, "image_spans"),
    ],
)
def test_chain_hashes_refuse_by_name_when_an_argument_is_out_of_range(given, argument):
    with pytest.raises(ValueError, match=argument):
        pagedkv.chain_hashes([1, 2, 3], **given)
