"""Drawing tokens: the limits hold, the frequencies are right, the batch does not matter."""

import numpy as np
import pytest
import torch

from pagedkv.engine import sampler
from pagedkv.engine.sampler import PARAMETERS, sample_tokens, uniforms

VOCABULARY = 50


def parameters(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample=0):
    return np.array([(temperature, top_k, top_p, min_p, seed, sample)] * count, PARAMETERS)


def positions(count):
    return np.arange(count, dtype=np.int32)


@pytest.fixture
def logits():
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


def draw(logits, count, **options):
    rows = logits.expand(count, -1)
    return sample_tokens(rows, parameters(count, **options), positions(count)).numpy()


def test_sampler_draws_the_best_token_when_greedy(logits):
    assert set(draw(logits, 3, temperature=0)) == {int(logits.argmax())}


@pytest.mark.parametrize("vocabulary", [1, 50, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_draws_the_first_of_equally_good_tokens_when_greedy(vocabulary, dtype):
    logits = torch.randint(-3, 3, (40, vocabulary), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0], logits[1, : vocabulary // 2] = -torch.inf, -torch.inf
    found = sample_tokens(logits, parameters(40, temperature=0), positions(40))
    assert found.tolist() == logits.argmax(-1).tolist()


def test_sampler_draws_the_best_token_when_top_k_is_one(logits):
    assert set(draw(logits, 100, top_k=1)) == {int(logits.argmax())}


def test_sampler_draws_exactly_the_top_k_tokens(logits):
    assert set(draw(logits, 5000, top_k=5, temperature=3.0)) == set(logits.topk(5).indices.tolist())


def test_sampler_draws_exactly_the_fewest_tokens_that_reach_top_p(logits):
    probabilities, order = logits.softmax(-1).sort(descending=True)
    num_kept = int((probabilities.cumsum(-1) < 0.6).sum()) + 1
    assert set(draw(logits, 5000, top_p=0.6)) == set(order[:num_kept].tolist())


def test_sampler_draws_from_all_tokens_that_reach_top_p_when_the_vocabulary_is_large_and_flat():
    logits = torch.linspace(0, 0.1, 5000)
    tokens = draw(logits, 3000, top_p=0.5)
    num_kept = int((logits.flip(0).softmax(-1).cumsum(-1) < 0.5).sum()) + 1
    assert tokens.min() >= 5000 - num_kept
    assert len(set(tokens.tolist())) > 1024


def test_sampler_applies_top_p_to_what_top_k_left(logits):
    best = logits.topk(4)
    probabilities = best.values.softmax(-1)
    num_kept = int((probabilities.cumsum(-1) < 0.5).sum()) + 1
    assert set(draw(logits, 5000, top_k=4, top_p=0.5)) == set(best.indices[:num_kept].tolist())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampler_draws_tokens_as_often_as_their_probabilities_say(logits, temperature):
    count = 40_000
    found = np.bincount(draw(logits, count, temperature=temperature), minlength=VOCABULARY)
    expected = (logits / temperature).softmax(-1).numpy() * count
    # Pearson's statistic over 49 degrees of freedom exceeds 94 once in 10,000; the draws are fixed.
    frequent = expected > 1
    assert (((found - expected) ** 2) / expected)[frequent].sum() < 94


def test_sampler_never_draws_a_token_without_probability():
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[[3, 7]] = 0.0
    assert set(draw(logits, 1000)) == {3, 7}


def test_sampler_draws_the_same_whatever_else_is_in_the_batch(logits):
    alone = sample_tokens(logits[None], parameters(1, seed=5, sample=2), np.array([9], np.int32))
    others = np.concatenate([parameters(3, seed=1, top_k=3), parameters(1, seed=5, sample=2), parameters(2, top_p=0.5)])
    batch = sample_tokens(logits.expand(6, -1), others, np.array([9, 9, 1, 9, 2, 3], np.int32))
    assert batch[3] == alone[0]


def test_sampler_mixes_greedy_and_random_rows(logits):
    both = np.concatenate([parameters(1, temperature=0), parameters(1, seed=3), parameters(1, temperature=0)])
    tokens = sample_tokens(logits.expand(3, -1), both, positions(3))
    assert tokens[0] == tokens[2] == logits.argmax()


def test_sampler_draws_exactly_the_tokens_that_min_p_leaves(logits):
    probabilities = logits.softmax(-1)
    kept = torch.nonzero(probabilities >= 0.1 * probabilities.max())[:, 0].tolist()
    assert set(draw(logits, 5000, min_p=0.1)) == set(kept)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_sampler_inverts_the_cumulative_distribution_when_the_vocabulary_has_chunks(size):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(1)).masked_fill_(
        torch.arange(size) % 3 == 1, -100
    )
    up_to = logits.double().softmax(-1).cumsum(-1)
    numbers = uniforms(*(parameters(500)[name] for name in ("seed", "sample")), positions(500))
    assert (draw(logits, 500) == torch.searchsorted(up_to, torch.from_numpy(numbers), right=True).numpy()).mean() > 0.99


def test_sampler_never_draws_a_token_of_no_probability():
    logits = torch.full((600,), -torch.inf)
    logits[[3, 300, 513]] = torch.tensor([0.0, 1.0, 0.5])
    assert set(draw(logits, 2000)) == {3, 300, 513}


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_draws_on_a_gpu_as_on_the_cpu(size, dtype):
    logits = torch.randn(500, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[:, ::3] = -torch.inf
    logits[:, -1] = 0
    numbers = uniforms(*(parameters(500)[name] for name in ("seed", "sample")), positions(500))
    found = sampler._pick(logits, torch.from_numpy(numbers))
    expected = sample_tokens(logits, parameters(500), positions(500))
    assert (found == expected).double().mean() > 0.99
    assert found.dtype == expected.dtype


def test_sampler_draws_the_same_beside_a_row_of_another_temperature_and_limit(logits):
    both = np.concatenate([parameters(400, temperature=0.7), parameters(1, top_k=3), parameters(1, temperature=1.3)])
    rows = logits.bfloat16().expand(402, -1)
    alone = sample_tokens(rows[:400], both[:400], positions(400))
    assert torch.equal(sample_tokens(rows, both, positions(402))[:400], alone)


def test_sampler_takes_half_precision(logits):
    rows = logits.bfloat16().expand(4, -1)
    assert sample_tokens(rows, parameters(4), positions(4)).dtype == torch.int32


def test_sampler_takes_an_empty_step():
    assert sample_tokens(torch.empty(0, VOCABULARY), parameters(0), positions(0)).shape == (0,)


def test_random_numbers_are_uniform_and_in_range():
    numbers = uniforms(np.zeros(100_000, np.uint64), np.zeros(100_000, np.uint64), np.arange(100_000, dtype=np.int32))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    buckets = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((buckets - 1000.0) ** 2 / 1000.0).sum() < 160  # 99 degrees of freedom: 1 in 10,000


def test_random_numbers_differ_between_seeds_samples_and_positions():
    grid = np.meshgrid(*[np.arange(20, dtype=np.uint64)] * 3)
    seed, sample, position = (axis.ravel() for axis in grid)
    assert len(set(uniforms(seed, sample, position.astype(np.int32)).tolist())) == 20**3
