"""The replay of a trace through Python."""

import numpy as np
import pytest

import pagedkv
from pagedkv.simulate import read_lengths, replay_saturated


def test_replay_saturated_wastes_under_four_percent_on_sharegpt(traces):
    prompts, outputs = read_lengths(traces / "sharegpt_lengths.csv")
    chosen = np.flatnonzero(prompts + outputs <= 2048)[:500]
    limits = pagedkv.SchedulerConfig(max_model_len=2048)
    replay = replay_saturated(prompts[chosen], outputs[chosen], pagedkv.CacheConfig(984), limits)
    assert 0 < replay.mean_waste() < 0.04
    assert replay.num_held_blocks.max() <= 983


def test_read_lengths_names_line_and_field_when_a_length_is_negative(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n3,4\n5,-1\n")
    with pytest.raises(ValueError, match="line 3: output_tokens"):
        read_lengths(path)


def test_replay_saturated_refuses_columns_of_different_lengths():
    with pytest.raises(ValueError, match="output_tokens: expected 2 lengths"):
        replay_saturated([1, 2], [1], pagedkv.CacheConfig(8), pagedkv.SchedulerConfig())


def test_replay_saturated_refuses_a_request_that_can_never_fit():
    with pytest.raises(pagedkv.exceptions.NeverFitsError):
        replay_saturated([100], [1], pagedkv.CacheConfig(4), pagedkv.SchedulerConfig())
