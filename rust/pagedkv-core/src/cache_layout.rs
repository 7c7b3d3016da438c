//! Which layer's keys and values lie where: groups of layers with equal bytes per block in one pool.
//!
//! A block belongs to one group at a time and holds its tokens' keys and values for all layers of that group, each in a
//! *layer slot*. So that any block can serve any group, all groups have the same number of layer slots and the same
//! bytes per slot. The rule is vLLM's (`vllm/v1/core/kv_cache_utils.py`): the smallest layer count is the number of
//! slots, larger groups are split, and what the last part of a split leaves empty is padding. Where head dimensions, KV
//! heads or element types differ, so do the tokens per block: the group with the widest tokens has the smallest blocks,
//! of `CacheConfig::block_size` tokens, and the others have integer multiples of it.

use crate::config::{CacheConfig, GroupSpec, in_range};
use crate::error::{Error, Result, invalid};

/// Most groups that a pool may have after splitting: a block's record names its group in one byte.
const MAX_GROUPS: usize = 255;
/// Largest share of layer slots that may be padding, in percent.
const MAX_PADDING_PERCENT: u64 = 10;

/// What the bookkeeping needs to know of a group: one block table per sequence follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Tokens per block.
    pub block_size: u32,
    /// Tokens that a query sees, itself included; `None` for all.
    pub sliding_window: Option<u32>,
}

/// The groups of a pool as they come out of [`CacheConfig::layout`].
#[derive(Clone, Debug, PartialEq)]
pub struct CacheLayout {
    groups: Vec<GroupSpec>,
    tables: Vec<TableSpec>,
    num_layer_slots: u32,
    block_bytes: u64,
    places: Vec<(u32, u32)>,
}

impl CacheLayout {
    /// The groups, split and with their block sizes, in the order of the plan's group axis; none for bookkeeping alone.
    pub fn groups(&self) -> &[GroupSpec] {
        &self.groups
    }

    /// One entry per group of the plan's group axis; at least one.
    pub fn tables(&self) -> &[TableSpec] {
        &self.tables
    }

    /// Layers that each block has room for; 0 for bookkeeping alone.
    pub const fn num_layer_slots(&self) -> u32 {
        self.num_layer_slots
    }

    /// Layers of all groups.
    pub fn num_layers(&self) -> u32 {
        self.places.len() as u32
    }

    /// Bytes of keys and values of one block, padding included; the same in all groups, 0 for bookkeeping alone.
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Share of the layer slots that hold no layer, from 0 to 0.1.
    pub fn padding(&self) -> f64 {
        let slots = self.groups.len() as f64 * f64::from(self.num_layer_slots);
        if self.groups.is_empty() { 0.0 } else { 1.0 - self.places.len() as f64 / slots }
    }

    /// The group of a layer and its slot in the group's blocks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layer that no group has.
    pub fn layer(&self, layer: u32) -> Result<(u32, u32)> {
        let place = self.places.get(layer as usize).copied();
        let expected = || match self.places.len() {
            0 => "a cache with groups of layers".to_owned(),
            len => format!("0 to {}", len - 1),
        };
        place.map_or_else(|| invalid("layer", expected(), layer), Ok)
    }

    pub(crate) fn new(config: &CacheConfig) -> Result<Self> {
        let num_layers = check_layers(&config.groups)?;
        let num_layer_slots = choose_slots(config)?;
        let widest = config.groups.iter().map(GroupSpec::token_bytes).collect::<Result<Vec<_>>>()?.into_iter().max();
        let widest = widest.unwrap_or(0);
        let mut groups = Vec::new();
        for (number, group) in config.groups.iter().enumerate() {
            let block_size = scale_block_size(config, number, widest)?;
            for layers in group.layers.chunks(num_layer_slots.max(1) as usize) {
                groups.push(GroupSpec { layers: layers.to_vec(), block_size: Some(block_size), ..group.clone() });
            }
        }
        if groups.len() > MAX_GROUPS {
            return invalid("groups", format!("at most {MAX_GROUPS} after splitting"), groups.len());
        }
        let block_bytes = u128::from(widest) * u128::from(config.block_size) * u128::from(num_layer_slots);
        if block_bytes * u128::from(config.num_blocks) > i64::MAX as u128 {
            return invalid("num_blocks", "a pool of less than 2^63 bytes", config.num_blocks);
        }
        let mut places = vec![(0, 0); num_layers];
        for (number, group) in groups.iter().enumerate() {
            group.layers.iter().zip(0..).for_each(|(&layer, slot)| places[layer as usize] = (number as u32, slot));
        }
        let tables = if groups.is_empty() {
            vec![TableSpec { block_size: config.block_size, sliding_window: None }]
        } else {
            let table = |group: &GroupSpec| TableSpec {
                block_size: group.block_size.unwrap_or(config.block_size),
                sliding_window: group.sliding_window,
            };
            groups.iter().map(table).collect()
        };
        Ok(Self { groups, tables, num_layer_slots, block_bytes: block_bytes as u64, places })
    }
}

/// Every layer from 0 on is in exactly one group, in ascending order; answers how many there are.
fn check_layers(groups: &[GroupSpec]) -> Result<usize> {
    let mut owners: Vec<(u32, usize)> = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        check_group(number, group)?;
        owners.extend(group.layers.iter().map(|&layer| (layer, number)));
    }
    owners.sort_unstable();
    if let Some(at) = (1..owners.len()).find(|&at| owners[at].0 == owners[at - 1].0) {
        let found = format!("layer {} in groups {} and {}", owners[at].0, owners[at - 1].1, owners[at].1);
        return invalid("layers", "each layer in one group", found);
    }
    if let Some((missing, _)) = (0..).zip(&owners).find(|&(expected, &(layer, _))| expected != layer) {
        let last = owners.last().map_or(0, |&(layer, _)| layer);
        return invalid("layers", format!("every layer from 0 to {last}"), format!("no group with layer {missing}"));
    }
    Ok(owners.len())
}

impl GroupSpec {
    /// Checks the group by itself; how groups go together is for [`CacheConfig::validate`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for layers that are none or out of order, and for sizes out of range.
    pub fn validate(&self) -> Result<()> {
        check_group(0, self)
    }
}

fn check_group(number: usize, group: &GroupSpec) -> Result<()> {
    if group.layers.is_empty() {
        return invalid("layers", "at least one layer per group", format!("none in group {number}"));
    }
    if let Some(at) = (1..group.layers.len()).find(|&at| group.layers[at] <= group.layers[at - 1]) {
        let found = format!("{} behind {} in group {number}", group.layers[at], group.layers[at - 1]);
        return invalid("layers", "ascending layer indices", found);
    }
    in_range("num_kv_heads", group.num_kv_heads, 1)?;
    in_range("head_dim", group.head_dim, 1)?;
    if let Some(window) = group.sliding_window {
        in_range("sliding_window", window, 1)?;
    }
    if let Some(block_size) = group.block_size {
        in_range("block_size", block_size, 1)?;
    }
    let bytes = group.token_bytes()?;
    if bytes > i64::MAX as u64 {
        return invalid("head_dim", "less than 2^63 bytes per token", format!("{} in group {number}", group.head_dim));
    }
    Ok(())
}

/// Layers that each block should have room for: those of the smallest group if that leaves few slots without a layer, else
/// the number that makes the fewest groups, and among those the least padding. 0 for no groups.
pub fn choose_layer_slots(groups: &[GroupSpec]) -> u32 {
    let counts = layer_counts(groups);
    let Some(smallest) = counts.iter().map(|&count| count.max(1)).min() else { return 0 };
    if is_full_enough(&counts, smallest) { smallest as u32 } else { fewest_groups(&counts) }
}

/// Layer slots of every block: the caller's number, else the smallest layer count.
fn choose_slots(config: &CacheConfig) -> Result<u32> {
    let counts = layer_counts(&config.groups);
    let Some(&smallest) = counts.iter().min() else {
        return match config.num_layer_slots {
            Some(slots) => invalid("num_layer_slots", "none without groups", slots),
            None => Ok(0),
        };
    };
    if let Some(slots) = config.num_layer_slots {
        in_range("num_layer_slots", slots, 1)?;
    }
    let slots = config.num_layer_slots.map_or(smallest, u64::from);
    if is_full_enough(&counts, slots) {
        return Ok(slots as u32);
    }
    let percent = |slots| {
        let (padded, total) = padding(&counts, slots);
        format!("{:.1} %", 100.0 * padded as f64 / total as f64)
    };
    let better = fewest_groups(&counts);
    let found =
        format!("{} with {slots} slots; num_layer_slots={better} leaves {}", percent(slots), percent(better.into()));
    let argument = if config.num_layer_slots.is_some() { "num_layer_slots" } else { "groups" };
    invalid(argument, format!("at most {MAX_PADDING_PERCENT} % of the layer slots without a layer"), found)
}

fn layer_counts(groups: &[GroupSpec]) -> Vec<u64> {
    groups.iter().map(|group| group.layers.len() as u64).collect()
}

/// The number of slots that makes the fewest groups, and among those the least padding. One slot always fits.
fn fewest_groups(counts: &[u64]) -> u32 {
    let longest = counts.iter().copied().max().unwrap_or(1);
    let better = (1..=longest).filter(|&slots| is_full_enough(counts, slots)).min_by_key(|&slots| {
        let (padded, total) = padding(counts, slots);
        (total / slots, padded)
    });
    better.unwrap_or(1) as u32
}

fn is_full_enough(counts: &[u64], slots: u64) -> bool {
    let (padded, total) = padding(counts, slots);
    padded * 100 <= total * MAX_PADDING_PERCENT
}

/// Slots without a layer, and all slots.
fn padding(counts: &[u64], slots: u64) -> (u64, u64) {
    let total: u64 = counts.iter().map(|count| count.next_multiple_of(slots)).sum();
    (total - counts.iter().sum::<u64>(), total)
}

/// Tokens per block of a group, so that its blocks have as many bytes as those of the widest.
fn scale_block_size(config: &CacheConfig, number: usize, widest: u64) -> Result<u32> {
    let group = &config.groups[number];
    let bytes = group.token_bytes()?;
    if !widest.is_multiple_of(bytes) {
        return Err(Error::Unsupported(format!(
            "groups: a token takes {bytes} bytes per layer in group {number} and {widest} in another, which is no \
             multiple: blocks of whole tokens can't have equal bytes"
        )));
    }
    let block_size = u64::from(config.block_size) * (widest / bytes);
    let Some(block_size) = u32::try_from(block_size).ok().filter(|&size| in_range("block_size", size, 1).is_ok())
    else {
        return invalid("block_size", "less than 2^30 tokens per block in every group", block_size);
    };
    if group.block_size.is_some_and(|asked| asked != block_size) {
        let expected = format!("{block_size} tokens per block in group {number}, or none, for equal bytes per block");
        return invalid("block_size", expected, group.block_size.unwrap_or_default());
    }
    if u64::from(config.num_blocks) * u64::from(block_size) > i64::MAX as u64 {
        return invalid("num_blocks", "num_blocks x block_size to fit in 63 bits", config.num_blocks);
    }
    Ok(block_size)
}
