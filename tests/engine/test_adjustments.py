"""Penalties, biases, bad words, allowed tokens and least lengths, beside a plain loop over one sample."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from pagedkv import SamplingParams
from pagedkv.engine.adjustments import Adjustments, Rules, bad_word_tokens

VOCABULARY = 40
PROMPT = [3, 5, 3, 7]
DRAWN = [5, 9, 9, 9, 11]


def adjust(logits, params, *, drawn=DRAWN, bad_words=(), ends=(), others=None):
    """Return what one sample's logits become, alone or beside another sample without wishes."""
    lines = np.array([1, 0])
    table = Adjustments(2, VOCABULARY)
    table.add(lines[:1], params, Rules.of(params, bad_words, ends, len(PROMPT)))
    for token in drawn:
        table.count(lines, np.array([token, 2], np.int32))
    tokens = np.zeros((2, 64), np.int32)
    tokens[1, : len(PROMPT) + len(drawn)] = PROMPT + drawn
    position = len(PROMPT) + len(drawn) - 1
    rows = torch.stack([logits, logits])
    adjusted = table.apply(rows, lines, np.array([position, position], np.int32), tokens)
    assert torch.equal(adjusted[1], logits)
    assert torch.equal(rows[0], logits)
    return adjusted[0]


@pytest.fixture
def logits():
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3


def test_penalties_are_those_of_a_plain_loop(logits):
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3)
    expected = logits.clone()
    for token in set(PROMPT + DRAWN):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(DRAWN):
        expected[token] -= 0.25 * DRAWN.count(token) + 0.5
    assert torch.allclose(adjust(logits, params), expected, atol=1e-6)


def test_frequency_penalty_leaves_tokens_of_the_prompt_alone(logits):
    adjusted = adjust(logits, SamplingParams(frequency_penalty=1.0))
    assert adjusted[7] == logits[7]
    assert adjusted[9] == logits[9] - 3


def test_bias_is_added(logits):
    adjusted = adjust(logits, SamplingParams(logit_bias={4: 10.0, 6: -100.0}))
    assert (adjusted - logits)[[4, 6]].tolist() == pytest.approx([10, -100], abs=1e-4)
    assert torch.equal(adjusted[7:], logits[7:])


def test_only_allowed_tokens_remain(logits):
    adjusted = adjust(logits, SamplingParams(allowed_token_ids=[4, 6]))
    assert torch.isfinite(adjusted).nonzero()[:, 0].tolist() == [4, 6]


@pytest.mark.parametrize(("min_tokens", "is_open"), [(5, True), (6, False)])
def test_end_tokens_are_not_drawn_before_there_are_enough(logits, min_tokens, is_open):
    adjusted = adjust(logits, SamplingParams(min_tokens=min_tokens), ends=[2, 8])
    assert bool(torch.isfinite(adjusted[[2, 8]]).all()) == is_open
    assert torch.isfinite(adjusted[9])


@pytest.mark.parametrize(
    ("word", "is_open"), [([20], False), ([11, 20], False), ([9, 11, 20], False), ([9, 20], True), ([7, 5, 9], True)]
)
def test_last_token_of_a_bad_word_is_not_drawn_behind_the_others(logits, word, is_open):
    adjusted = adjust(logits, SamplingParams(bad_words=["x"]), bad_words=[word])
    assert bool(torch.isfinite(adjusted[word[-1]])) == is_open


def test_bad_word_does_not_begin_in_the_prompt(logits):
    adjusted = adjust(logits, SamplingParams(bad_words=["x"]), drawn=[], bad_words=[[7, 20]])
    assert torch.isfinite(adjusted[20])


def test_nothing_is_copied_when_nobody_asks(logits):
    table = Adjustments(2, VOCABULARY)
    rows = torch.stack([logits, logits])
    assert table.apply(rows, np.arange(2), np.zeros(2, np.int32), np.zeros((2, 8), np.int32)) is rows


def test_line_asks_for_nothing_when_its_sample_has_left(logits):
    table, lines = Adjustments(1, VOCABULARY), np.arange(1)
    params = SamplingParams(presence_penalty=2.0, logit_bias={1: 5})
    for _ in range(3):
        table.add(lines, params, Rules.of(params, (), (), 1))
        table.count(lines, np.array([1], np.int32))
        table.remove(lines)
    assert table.apply(logits[None], lines, np.zeros(1, np.int32), np.zeros((1, 8), np.int32)) is not None
    table.add(lines, params, None)
    tokens = np.array([[1, 0]], np.int32)
    assert table.apply(logits[None], lines, np.zeros(1, np.int32), tokens)[0, 1] == logits[1]


class Words:
    """A tokenizer with one token per word, which knows some words only behind a space."""

    ids: ClassVar = {"cat": [1], " cat": [2], "dog": [3, 4], " dog": [5], "a b": [6, 7], " a b": [8, 7]}

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return type("Encoding", (), {"input_ids": self.ids[text]})


@pytest.mark.parametrize(
    ("word", "expected"), [("cat", [[1], [2]]), (" cat", [[1], [2]]), ("dog", [[3, 4]]), ("a b", [[6, 7], [8, 7]])]
)
def test_bad_word_is_also_that_behind_a_space_when_it_begins_otherwise(word, expected):
    assert bad_word_tokens([word], Words()) == expected
