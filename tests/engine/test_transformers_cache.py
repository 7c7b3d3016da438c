"""`model.generate` over paged blocks: the same tokens, fewer blocks."""

import pytest
import torch

from pagedkv.engine import PagedCache
from pagedkv.exceptions import InvalidArgumentError

BLOCK_SIZE = 4


def generate(model, ids, cache=None, **options):
    given = {} if cache is None else {"cache": cache}
    return model.generate(
        ids,
        attention_mask=(ids != 0).long(),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **given,
        **options,
    ).tolist()


@pytest.fixture
def ids():
    return torch.randint(1, 256, (1, 18), generator=torch.Generator().manual_seed(3))


def make(model, num_blocks=128):
    return PagedCache(model.config, num_blocks, BLOCK_SIZE)


@pytest.mark.parametrize("options", [{}, {"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 2}])
def test_generate_gives_the_tokens_that_it_gives_without(tiny_model, ids, options):
    assert generate(tiny_model, ids, make(tiny_model), **options) == generate(tiny_model, ids, **options)


def test_generate_takes_a_batch_with_padding(tiny_model):
    ids = torch.randint(1, 256, (3, 18), generator=torch.Generator().manual_seed(3))
    ids[0, :5] = ids[2, :11] = 0
    for options in ({}, {"num_beams": 3}):
        assert generate(tiny_model, ids, make(tiny_model), **options) == generate(tiny_model, ids, **options)


def test_beams_share_blocks_and_copy_those_that_two_write(tiny_model, ids):
    cache = make(tiny_model)
    generate(tiny_model, ids, cache, num_beams=4)
    alone = -(-(18 + 11) // BLOCK_SIZE)
    assert alone <= cache.num_held_blocks < 4 * alone
    assert cache.num_copies > 0


def test_blocks_come_back(tiny_model, ids):
    cache = make(tiny_model)
    generate(tiny_model, ids, cache, num_beams=4)
    cache.reset()
    assert (cache.num_held_blocks, cache.get_seq_length()) == (0, 0)
    assert generate(tiny_model, ids, cache) == generate(tiny_model, ids)


def test_generate_goes_on_from_a_cache(tiny_model, ids):
    cache = make(tiny_model)
    first = torch.tensor(generate(tiny_model, ids, cache))
    longer = torch.cat([first, torch.tensor([[7, 8]])], dim=1)
    assert generate(tiny_model, longer, cache) == generate(tiny_model, longer)


def test_cropped_tokens_are_computed_again(tiny_model, ids):
    cache = make(tiny_model)
    with torch.inference_mode():
        tiny_model(ids, cache=cache)
        cache.crop(-7)
        assert cache.get_seq_length() == 11
        logits = tiny_model(ids[:, 11:], cache=cache).logits
        expected = tiny_model(ids).logits[:, 11:]
    assert torch.allclose(logits, expected, atol=1e-4)


def test_prompt_lookup_of_transformers_works_over_it(tiny_model):
    ids = torch.tensor([[5, 6, 7, 8] * 6])
    options = {"prompt_lookup_num_tokens": 3}
    assert generate(tiny_model, ids, make(tiny_model), **options) == generate(tiny_model, ids)


def test_cache_that_is_too_small_says_so(tiny_model, ids):
    with pytest.raises(InvalidArgumentError, match="^num_blocks: expected room for 18 more tokens of 1 sequences"):
        generate(tiny_model, ids, make(tiny_model, num_blocks=4))


def test_cache_in_half_precision_keeps_its_type(tiny_model, ids):
    cache = make(tiny_model)
    tiny_model.to(torch.bfloat16)
    assert generate(tiny_model, ids, cache, num_beams=2) == generate(tiny_model, ids, num_beams=2)
    assert cache.kv_cache.dtype == "bfloat16"
