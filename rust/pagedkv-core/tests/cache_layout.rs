//! Groups of layers: split to equal layer slots, block sizes for equal bytes, and what is refused.

use pagedkv_core::{CacheConfig, CacheLayout, Error, GroupSpec, Result, TableSpec, choose_layer_slots};

fn group(layers: impl IntoIterator<Item = u32>, head_dim: u32) -> GroupSpec {
    GroupSpec { layers: layers.into_iter().collect(), ..GroupSpec::new(0, 1, head_dim, "float16") }
}

fn layout(groups: &[GroupSpec]) -> Result<CacheLayout> {
    CacheConfig { groups: groups.to_vec(), ..CacheConfig::new(8) }.layout()
}

#[test]
fn larger_groups_are_split_and_layers_keep_their_order() {
    let layout = layout(&[group(0..2, 8), group(2..8, 8)]).unwrap();
    let layers: Vec<_> = layout.groups().iter().map(|group| group.layers.clone()).collect();
    assert_eq!(layers, [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!((layout.layer(0), layout.layer(5)), (Ok((0, 0)), Ok((2, 1))));
    assert_eq!((layout.num_layer_slots(), layout.num_layers(), layout.padding()), (2, 8, 0.0));
}

#[test]
fn narrow_tokens_have_larger_blocks() {
    let layout = layout(&[group([0], 24), group([1], 8), group([2], 12)]).unwrap();
    let sizes: Vec<_> = layout.tables().iter().map(|table| table.block_size).collect();
    assert_eq!(sizes, [16, 48, 32]);
    assert_eq!(layout.block_bytes(), 2 * 24 * 2 * 16);
}

#[test]
fn bookkeeping_alone_has_one_table() {
    let layout = CacheConfig::new(8).layout().unwrap();
    assert_eq!(layout.tables(), [TableSpec { block_size: 16, sliding_window: None }]);
    assert!(layout.groups().is_empty());
}

#[test]
fn groups_without_equal_bytes_are_not_supported() {
    let refused = layout(&[group([0], 8), group([1], 12)]).unwrap_err();
    assert!(matches!(refused, Error::Unsupported(what) if what.contains("groups")));
}

#[test]
fn padding_above_a_tenth_is_refused_with_a_number_that_would_do() {
    let refused = layout(&[group(0..3, 8), group(3..7, 8)]).unwrap_err();
    let Error::InvalidArgument { argument, found, .. } = refused else { panic!("{refused:?}") };
    assert_eq!((argument, found.as_str()), ("groups", "22.2 % with 3 slots; num_layer_slots=1 leaves 0.0 %"));
}

#[test]
fn layer_slots_are_those_of_the_smallest_group_or_make_the_fewest_groups() {
    let slots =
        |counts: &[u32]| choose_layer_slots(&counts.iter().map(|&count| group(0..count, 8)).collect::<Vec<_>>());
    assert_eq!([slots(&[2, 10]), slots(&[5, 6]), slots(&[5, 7]), slots(&[5]), slots(&[])], [2, 6, 1, 5, 0]);
}

#[test]
fn a_layer_out_of_place_is_refused() {
    for groups in [vec![group([0, 0], 8)], vec![group([0], 8), group([0], 8)], vec![group([1], 8)], vec![group([], 8)]]
    {
        let refused = layout(&groups).unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument { argument: "layers", .. }), "{groups:?}: {refused:?}");
    }
}
