"""Whatever the groups: what one layer writes into its blocks is what it reads, and nobody else sees it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import CacheConfig, GroupSpec, KVCache, SchedulerConfig

NUM_BLOCKS = 6
DTYPES = st.sampled_from(["float32", "float16"])


@st.composite
def configs(draw):
    """Draw groups of one to three layers, whose tokens differ in bytes by a power of two."""
    num_groups, base = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3]))
    slots = draw(st.integers(1, 3))
    layers = draw(st.permutations(range(num_groups * slots)))
    groups = [
        GroupSpec(
            sorted(layers[number * slots : (number + 1) * slots]),
            draw(st.sampled_from([base, 2 * base])),
            draw(st.sampled_from([8, 16])),
            draw(DTYPES),
            sliding_window=draw(st.none() | st.integers(1, 9)),
        )
        for number in range(num_groups)
    ]
    return CacheConfig(NUM_BLOCKS, draw(st.sampled_from([1, 3, 4])), groups=groups)


@settings(max_examples=150, deadline=None)
@given(
    config=configs(),
    backend=st.sampled_from(["torch", "numpy"]),
    layout=st.sampled_from(["block", "layer"]),
    writes=st.lists(st.tuples(st.integers(0, 99), st.integers(0, NUM_BLOCKS - 1)), max_size=12),
    copies=st.permutations(range(NUM_BLOCKS)),
)
def test_layers_keep_what_they_wrote_into_blocks_of_their_group(config, backend, layout, writes, copies):
    cache = KVCache.from_config(
        config, SchedulerConfig(max_num_seqs=1, max_model_len=8), backend=backend, layout=layout
    )
    cache.pool[...] = 0
    # What memory should hold: the number of the last write, by block, layer and slot. A block has the group that wrote
    # it last, and the layers of the others hold nothing of meaning there.
    owner, held = {}, {}
    for number, (choice, block) in enumerate(writes, 1):
        layer = choice % cache.num_layers
        group = cache.groups[cache.group_of(layer)]
        if owner.setdefault(block, cache.group_of(layer)) != cache.group_of(layer):
            owner[block] = cache.group_of(layer)
            held = {key: value for key, value in held.items() if key[0] != block}
        offset = choice % group.block_size
        k = np.full((1, group.num_kv_heads, group.head_dim), number, np.float32)
        cache.append_kv(layer, k, -k, np.array([block * group.block_size + offset]))
        held[block, layer, offset] = number
    source, destination = copies[:2]
    cache.copy_blocks(np.array([(source, destination)], np.int32))
    held = {key: value for key, value in held.items() if key[0] != destination}
    held |= {(destination, *key[1:]): value for key, value in held.items() if key[0] == source}
    for (block, layer, offset), number in held.items():
        k_cache, v_cache = cache.layer(layer)
        assert (np.asarray(k_cache[block, :, offset]) == number).all()
        assert (np.asarray(v_cache[block, :, offset]) == -number).all()
