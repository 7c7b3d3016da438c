"""`CacheConfig` with groups: what comes out, and what is refused by which name."""

import pytest

import pagedkv
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError


def gemma_like(num_blocks=64):
    """Return 4 windowed layers and 2 full ones with heads twice as large."""
    window = pagedkv.GroupSpec([0, 1, 3, 4], 2, 8, "bfloat16", sliding_window=32)
    full = pagedkv.GroupSpec([2, 5], 2, 16, "bfloat16")
    return pagedkv.CacheConfig(num_blocks, 16, groups=[window, full])


def test_groups_come_split_and_with_block_sizes_of_equal_bytes():
    config = gemma_like()
    assert [group.layers for group in config.groups] == [[0, 1], [3, 4], [2, 5]]
    assert [group.block_size for group in config.groups] == [32, 32, 16]
    assert [group.sliding_window for group in config.groups] == [32, 32, None]
    assert (config.num_groups, config.num_layers, config.num_layer_slots, config.padding) == (3, 6, 2, 0.0)
    assert config.block_bytes == 2 * 16 * 2 * 2 * 16 * 2
    assert {group.token_bytes * group.block_size * 2 for group in config.groups} == {config.block_bytes}


def test_layer_names_group_and_slot():
    config = gemma_like()
    assert [config.layer(layer) for layer in range(6)] == [(0, 0), (0, 1), (2, 0), (1, 0), (1, 1), (2, 1)]
    with pytest.raises(InvalidArgumentError, match="layer: expected 0 to 5, found 6"):
        config.layer(6)


def test_config_of_a_configs_groups_is_the_same():
    config = gemma_like()
    again = pagedkv.CacheConfig(64, 16, groups=config.groups, num_layer_slots=config.num_layer_slots)
    assert (again.groups, again.padding) == (config.groups, config.padding)


def test_bookkeeping_alone_has_one_table_and_no_layers():
    config = pagedkv.CacheConfig(8)
    assert (config.groups, config.num_groups, config.num_layers, config.block_bytes, config.padding) == ([], 1, 0, 0, 0)
    with pytest.raises(InvalidArgumentError, match="layer"):
        config.layer(0)


def test_number_of_layers_stands_for_the_first_ones():
    assert pagedkv.GroupSpec(3, 1, 8) == pagedkv.GroupSpec(range(3), 1, 8)


def test_padding_is_reported_and_refused_above_a_tenth():
    def config(num_layer_slots=None):
        # Gemma 3 27B: 52 layers of 62 have a window.
        full = pagedkv.GroupSpec(range(5, 62, 6), 16, 128, "bfloat16")
        window = [layer for layer in range(62) if layer not in full.layers]
        groups = [pagedkv.GroupSpec(window, 16, 128, "bfloat16", sliding_window=1024), full]
        return pagedkv.CacheConfig(8, groups=groups, num_layer_slots=num_layer_slots)

    with pytest.raises(InvalidArgumentError, match=r"groups: .* 11.4 % with 10 slots; num_layer_slots=13 leaves 4.6 %"):
        config()
    with pytest.raises(InvalidArgumentError, match="num_layer_slots: .* with 20 slots"):
        config(20)
    chosen = config(13)
    assert ([group.num_layers for group in chosen.groups], round(chosen.padding, 3)) == ([13, 13, 13, 13, 10], 0.046)


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (lambda: [pagedkv.GroupSpec([], 1, 8)], InvalidArgumentError, "layers: .* none in group 0"),
        (lambda: [pagedkv.GroupSpec([1, 0], 1, 8)], InvalidArgumentError, "layers: .* 0 behind 1 in group 0"),
        (lambda: [pagedkv.GroupSpec([0, 0], 1, 8)], InvalidArgumentError, "layers: .* 0 behind 0 in group 0"),
        (
            lambda: [pagedkv.GroupSpec(2, 1, 8), pagedkv.GroupSpec([1], 1, 8)],
            InvalidArgumentError,
            "layers: .* layer 1 in groups",
        ),
        (lambda: [pagedkv.GroupSpec([0, 2], 1, 8)], InvalidArgumentError, "layers: .* no group with layer 1"),
        (lambda: [pagedkv.GroupSpec(1, 0, 8)], InvalidArgumentError, "num_kv_heads"),
        (lambda: [pagedkv.GroupSpec(1, 1, 0)], InvalidArgumentError, "head_dim"),
        (
            lambda: [pagedkv.GroupSpec(1, 1, 8, "int4")],
            InvalidArgumentError,
            'dtype: expected one of float32, .* "int4"',
        ),
        (lambda: [pagedkv.GroupSpec(1, 1, 8, sliding_window=0)], InvalidArgumentError, "sliding_window"),
        (
            lambda: [pagedkv.GroupSpec(1, 1, 8, block_size=8)],
            InvalidArgumentError,
            "block_size: expected 16 tokens .* found 8",
        ),
        (
            lambda: [pagedkv.GroupSpec([0], 1, 8), pagedkv.GroupSpec([1], 1, 12)],
            UnsupportedError,
            "groups: a token takes 64 bytes per layer in group 0 and 96",
        ),
    ],
)
def test_groups_are_refused_by_name_when_they_do_not_come_out(groups, error, message):
    with pytest.raises(error, match=message):
        pagedkv.CacheConfig(8, groups=groups())


def test_layer_slots_are_refused_when_there_are_no_groups():
    with pytest.raises(InvalidArgumentError, match="num_layer_slots"):
        pagedkv.CacheConfig(8, num_layer_slots=2)
