//! Sequences and the blocks that they hold: growth, forks, prefix hits, and the plans in which they change.
//!
//! Sequences grow inside a *plan*: [`KVCacheManager::begin_plan`] opens one, [`KVCacheManager::allocate_slots`] adds
//! tokens of a sequence to the newest, and [`KVCacheManager::commit`] or [`KVCacheManager::rollback`] ends it. A block
//! becomes public in the prefix cache when the plan that fills it commits; until then only sequences of that plan and
//! of plans behind it may take it. What is released while a plan in flight names it is reused after that plan only.

mod batch;
mod coming;
mod group_lookup;
mod matching;
mod moves;
mod pins;
mod plan;
mod sequence;
mod sessions;
mod swap;
mod windows;

use std::sync::Arc;

use smallvec::SmallVec;

use crate::block_pool::BlockPool;
use crate::cache_layout::TableSpec;
use crate::chain_hash::LoraName;
use crate::config::{CacheConfig, EvictionPolicy, Retention};
use crate::error::{Error, Result, invalid, invalid_element};
use crate::events::{KVCacheSnapshot, KVEventBatch};
use crate::identity::{Identity, Tokens};
use crate::ids::{BlockId, NULL_BLOCK, NodeId, PlanId, SequenceId};
pub use batch::{BatchSlots, Growths};
pub(crate) use matching::Match;
pub use pins::PinId;
pub(crate) use pins::Pins;
pub(crate) use plan::PlanRecord;
pub use plan::{AllocatedSlots, BlockCopy};
pub(crate) use sequence::{Sequence, Table, Tail};
pub(crate) use swap::{Arrival, LostGrowth, Return, Returning, SwapRecord};
pub(crate) use windows::DepartedColumn;

/// What a lookup found for a sequence. See [`KVCacheManager::get_computed_blocks`].
#[derive(Clone, Debug, Default)]
pub struct ComputedBlocks {
    sequence: Option<SequenceId>,
    /// By cache group; the null block where a window needs none.
    tables: SmallVec<[Vec<BlockId>; 1]>,
    node: NodeId,
    num_tokens: u32,
    stamp: u64,
}

impl ComputedBlocks {
    /// The blocks of the first cache group, in the order of the tokens that they hold.
    pub fn blocks(&self) -> &[BlockId] {
        self.group_blocks(0)
    }

    /// The blocks of a cache group, in the order of the tokens that they hold; the null block where the group's window
    /// needs none.
    pub fn group_blocks(&self, group: usize) -> &[BlockId] {
        self.tables.get(group).map_or(&[], Vec::as_slice)
    }

    /// The blocks of all groups.
    pub(crate) fn held(&self) -> impl Iterator<Item = BlockId> {
        self.tables.iter().flatten().copied().filter(|&block| block != NULL_BLOCK)
    }

    pub(crate) fn clear(&mut self) {
        self.tables.iter_mut().for_each(Vec::clear);
        self.num_tokens = 0;
    }

    /// Tokens that need not be computed.
    pub const fn num_tokens(&self) -> u32 {
        self.num_tokens
    }
}

/// The bookkeeping of a paged KV cache. See the module's page.
#[derive(Debug)]
pub struct KVCacheManager {
    pub(crate) pool: BlockPool,
    pub(crate) sequences: Vec<Sequence>,
    vacant: Vec<u32>,
    /// Tokens per node of the prefix tree: the smallest block size of a group.
    pub(crate) block_size: u32,
    /// What each cache group's tables are like.
    pub(crate) groups: SmallVec<[TableSpec; 1]>,
    /// Prefixes are hit in multiples of this: whole blocks in every group.
    pub(crate) hit_multiple: u32,
    /// Growths of sequences that lost their blocks, which were undone since; `None` where nobody asks.
    pub(crate) lost_growths: Option<Vec<LostGrowth>>,
    pub(crate) has_windows: bool,
    /// Whether a sequence's blocks may leave nodes of its path without one, so that the path is held.
    pub(crate) holds_paths: bool,
    /// Columns that left a window since somebody took the list, where anybody does.
    pub(crate) departed: Option<Vec<DepartedColumn>>,
    caching: bool,
    pub(crate) plans: std::collections::VecDeque<PlanRecord>,
    spare_records: Vec<PlanRecord>,
    /// Sequences that may await moves.
    awaiting: Vec<u32>,
    pub(crate) pins: Pins,
    scratch: Vec<i32>,
}

impl KVCacheManager {
    /// A manager over a pool of its own.
    ///
    /// # Errors
    /// Those of [`CacheConfig::validate`].
    pub fn new(config: &CacheConfig) -> Result<Self> {
        let layout = config.layout()?;
        let groups: SmallVec<[TableSpec; 1]> = layout.tables().iter().copied().collect();
        let anchors = |table: &TableSpec| table.sliding_window.is_none() && table.block_size == config.block_size;
        Ok(Self {
            pool: BlockPool::new(config)?,
            sequences: Vec::new(),
            vacant: Vec::new(),
            block_size: config.block_size,
            hit_multiple: hit_multiple(&groups)?,
            lost_growths: None,
            has_windows: groups.iter().any(|table| table.sliding_window.is_some()),
            holds_paths: !groups.iter().any(anchors),
            groups,
            departed: None,
            caching: config.enable_prefix_caching,
            plans: std::collections::VecDeque::new(),
            spare_records: Vec::new(),
            awaiting: Vec::new(),
            pins: Pins::new(config.pin_quota_blocks),
            scratch: Vec::new(),
        })
    }

    /// A sequence of these tokens, none of them computed. It holds no block yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no tokens, or images that overlap or are out of order; [`Error::InvalidElement`]
    /// for a negative token.
    ///
    /// # Complexity
    /// O(images).
    #[expect(clippy::needless_pass_by_value, reason = "the sequence keeps the tokens")]
    pub fn create(&mut self, tokens: Arc<[i32]>, identity: Arc<Identity>, uses_cache: bool) -> Result<SequenceId> {
        check_identity(&identity)?;
        if tokens.is_empty() || tokens.len() > i32::MAX as usize {
            return invalid("prompt_token_ids", "1 to 2^31 - 1 token ids", tokens.len());
        }
        check_tokens("prompt_token_ids", &tokens)?;
        Ok(self.create_checked(Arc::new(tokens.to_vec()), identity, uses_cache))
    }

    /// [`Self::create`] for tokens and an identity that were checked before.
    pub(crate) fn create_checked(
        &mut self,
        tokens: Arc<Vec<i32>>,
        identity: Arc<Identity>,
        uses_cache: bool,
    ) -> SequenceId {
        let root = self.pool.hold_root(&identity.root);
        self.insert(Tokens::new(tokens), identity, uses_cache && self.caching, root)
    }

    /// Asks that the blocks which a sequence fills or hits from now on are kept in the cache in a certain way.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidArgument`] as [`Retention::validate`]; [`Error::Unsupported`] where the
    /// eviction policy knows no priorities.
    pub fn retain(&mut self, sequence: SequenceId, retention: Retention) -> Result<()> {
        let index = self.find(sequence)?;
        retention.validate()?;
        if self.pool.cached.policy() != EvictionPolicy::Priority {
            return Err(Error::Unsupported("cache_priority: the eviction policy is not \"priority\"".into()));
        }
        self.sequences[index].retention = Some(retention);
        Ok(())
    }

    /// The time of the calls that follow, in the caller's seconds: priorities of cached blocks that were to hold until then
    /// fall. Time that goes back is ignored.
    ///
    /// # Complexity
    /// O(log blocks) per priority that falls.
    pub fn advance(&mut self, now: f64) {
        self.pool.advance(now);
    }

    /// A second sequence with the same tokens and blocks, computed as far as its tokens are known. It takes no block: the
    /// shared last one is copied when one of the two first writes into it.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::SequenceInFlight`].
    ///
    /// # Complexity
    /// O(blocks of the sequence).
    pub fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        let index = self.find_idle(sequence)?;
        Ok(self.fork_at(index))
    }

    /// Cuts a sequence to its first `num_tokens` tokens and releases the blocks behind them.
    ///
    /// Where a block that a window needs before the cut has left it, nothing of the sequence counts as computed any more,
    /// and all its blocks are released; what the prefix cache still holds is found by the next lookup.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::SequenceInFlight`], [`Error::InvalidArgument`] for more tokens than there are.
    ///
    /// # Complexity
    /// O(blocks released).
    pub fn truncate(&mut self, sequence: SequenceId, num_tokens: u32) -> Result<()> {
        let index = self.find_idle(sequence)?;
        let sequence = &mut self.sequences[index];
        let len = sequence.tokens.len();
        if !(1..=len).contains(&num_tokens) {
            return invalid("num_tokens", format!("1 to {len}"), num_tokens);
        }
        sequence.tokens.truncate(num_tokens);
        if num_tokens < sequence.num_scheduled {
            sequence.tail = Tail::Cut;
        }
        let kept = sequence.num_computed.min(num_tokens);
        let kept = if self.has_all_that_is_needed_at(index, kept) { kept } else { 0 };
        self.sequences[index].num_computed = kept;
        self.shrink(index, kept);
        Ok(())
    }

    /// Ends a sequence and releases its blocks, last one first.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// # Complexity
    /// O(blocks released).
    pub fn free(&mut self, sequence: SequenceId) -> Result<()> {
        let index = self.find(sequence)?;
        self.remove(index);
        Ok(())
    }

    /// Forgets every cached prefix. What running sequences computed before stays theirs and is never hit again.
    /// Pins go with it.
    ///
    /// # Complexity
    /// O(evictable blocks).
    pub fn reset_prefix_cache(&mut self) {
        self.pool.reset_prefixes();
        self.drop_stale_pins();
    }

    /// Forgets every cached prefix of an adapter, whose weights are no longer those that computed it; its pins go with it.
    /// What running sequences of the adapter computed stays theirs and is never hit again.
    ///
    /// # Complexity
    /// O(evictable blocks).
    pub fn invalidate_lora(&mut self, lora_id: i64) {
        self.pool.invalidate_lora(lora_id);
        self.drop_stale_pins();
    }

    /// Share of the usable blocks that are not available, from 0 to 1.
    pub fn usage(&self) -> f64 {
        1.0 - f64::from(self.pool.num_available()) / f64::from(self.pool.num_blocks() - 1)
    }

    /// The pool behind the sequences.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The block table of a sequence in the first cache group.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn block_table(&self, sequence: SequenceId) -> Result<&[BlockId]> {
        self.group_table(sequence, 0)
    }

    /// The block table of a sequence in a cache group; the null block stands where a window needs none.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::InvalidArgument`] for a group that the pool has not.
    pub fn group_table(&self, sequence: SequenceId, group: usize) -> Result<&[BlockId]> {
        let index = self.find(sequence)?;
        self.check_group(group)?;
        Ok(&self.sequences[index].tables[group].blocks)
    }

    /// Whether there is one cache group, with full attention.
    pub(crate) fn is_plain(&self) -> bool {
        self.groups.len() == 1 && !self.has_windows
    }

    pub(crate) fn check_group(&self, group: usize) -> Result<()> {
        let last = self.groups.len() - 1;
        if group <= last { Ok(()) } else { invalid("group", format!("0 to {last}"), group) }
    }

    /// Known tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn num_tokens(&self, sequence: SequenceId) -> Result<u32> {
        self.find(sequence).map(|index| self.sequences[index].tokens.len())
    }

    /// Tokens of a sequence whose keys and values are in its blocks, by plans that committed.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn num_computed_tokens(&self, sequence: SequenceId) -> Result<u32> {
        self.find(sequence).map(|index| self.sequences[index].num_computed)
    }

    /// Takes the events of the prefix cache since the last call. See [`crate::events`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where [`CacheConfig::events`] is off.
    pub fn take_events(&mut self) -> Result<KVEventBatch> {
        self.pool.take_events()
    }

    /// Everything that can be hit, as events, for who joins late.
    ///
    /// # Errors
    /// As [`Self::take_events`].
    ///
    /// # Complexity
    /// O(blocks).
    pub fn event_snapshot(&mut self) -> Result<KVCacheSnapshot> {
        self.pool.event_snapshot()
    }

    /// Says what an adapter is called in events and in their hashes.
    ///
    /// # Errors
    /// As [`Self::take_events`]; [`Error::InvalidArgument`] for an adapter of which something is cached or in use.
    pub fn name_lora(&mut self, lora_id: i64, name: LoraName) -> Result<()> {
        self.pool.name_lora(lora_id, name)
    }

    /// Makes the bookkeeping wrong, for tests of what follows from that.
    #[doc(hidden)]
    pub fn break_a_law(&mut self) {
        self.pool.break_a_law();
    }

    /// Sequences that live; pins are not among them.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len() - self.vacant.len() - self.pins.len()
    }

    /// The longest prefix of the sequence's tokens, from where it stands, that cached blocks hold. Nothing is changed.
    ///
    /// A sequence stands on a block border or finds nothing; at least one of its tokens is left to compute.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// # Complexity
    /// O(tokens found): each is compared once; a block is hashed only where prefixes branch.
    pub fn get_computed_blocks(&self, sequence: SequenceId) -> Result<ComputedBlocks> {
        let index = self.find(sequence)?;
        let mut found = ComputedBlocks::default();
        self.lookup(index, self.sequences[index].tokens.len(), &mut found);
        Ok(found)
    }

    /// The lookup behind [`Self::get_computed_blocks`], among the first `limit` tokens, into a buffer of the caller's.
    pub(crate) fn lookup(&self, index: usize, limit: u32, found: &mut ComputedBlocks) {
        let sequence = &self.sequences[index];
        found.clear();
        found.tables.resize_with(self.groups.len(), Vec::new);
        found.sequence = Some(SequenceId { index: index as u32, generation: sequence.generation });
        found.stamp = self.pool.stamp;
        let Some(node) = self.path_in_the_cache(sequence) else {
            return;
        };
        found.node = node;
        if !sequence.uses_cache || sequence.path_len * self.block_size != sequence.num_scheduled {
            return;
        }
        if !self.is_plain() {
            return self.lookup_groups(index, limit, found);
        }
        // What is computed must not be reachable through a block alone that may never be: a rollback takes that one.
        let is_computed = |block: BlockId| self.pool.blocks[block.index()].committed;
        let is_pending =
            sequence.path_len > 0 && !is_computed(sequence.tables[0].blocks[sequence.path_len as usize - 1]);
        let (mut scratch, mut key) = (Vec::new(), Vec::new());
        let mut start = sequence.num_scheduled;
        while start + self.block_size < limit {
            let end = start + self.block_size;
            key.clear();
            sequence.identity.encode_block(start, end, &mut key);
            let prefixes = &self.pool.prefixes;
            let child = prefixes.find_extra(&key).and_then(|extra| {
                sequence.tokens.with_range(start, end, &mut scratch, |tokens| prefixes.child(found.node, tokens, extra))
            });
            let Some(child) = child else { break };
            let Some(block) = prefixes.usable_block(&self.pool.blocks, child) else {
                break;
            };
            if is_pending && is_computed(block) {
                break;
            }
            found.tables[0].push(block);
            found.node = child;
            start = end;
        }
        found.num_tokens = start - sequence.num_scheduled;
    }

    /// The node where a lookup for the sequence starts; `None` if the cache was reset after the sequence's first block.
    fn path_in_the_cache(&self, sequence: &Sequence) -> Option<NodeId> {
        let prefixes = &self.pool.prefixes;
        if prefixes.is_current(sequence.path) {
            Some(sequence.path)
        } else if sequence.num_scheduled == 0 {
            prefixes.find_root(&sequence.identity.root)
        } else {
            None
        }
    }

    pub(crate) fn append_token(&mut self, index: usize, token: i32) {
        self.sequences[index].tokens.push(token);
        self.register_filled(index);
        if self.has_windows {
            // The one before it was the last that was known.
            self.leave_windows(index);
        }
    }

    pub(crate) fn fork_at(&mut self, index: usize) -> SequenceId {
        let Sequence { root, uses_cache, ref tokens, ref identity, .. } = self.sequences[index];
        let (tokens, identity) = (tokens.clone(), identity.clone());
        self.pool.prefixes.hold(root);
        let child = self.insert(tokens, identity, uses_cache, root);
        self.sequences[child.index as usize].retention = self.sequences[index].retention;
        self.adopt(child.index as usize, index);
        if let Some(moves) = &self.sequences[index].moves {
            // What moves will fill is the parent's alone, and so is the block in which they begin.
            let mut end = moves.from;
            while let Some(group) = self.groups.iter().find(|group| !end.is_multiple_of(group.block_size)) {
                end -= end % group.block_size;
            }
            self.cut_computed(child.index as usize, end);
        }
        // A token that was computed before it was told is the parent's alone.
        let known = self.sequences[child.index as usize].tokens.len();
        self.cut_computed(child.index as usize, known);
        child
    }

    /// Gives a sequence without blocks all that `from` holds; the caller knows that their tokens so far are the same.
    pub(crate) fn adopt(&mut self, index: usize, from: usize) {
        let [source, target] = self.sequences.get_disjoint_mut([from, index]).expect("two live sequences");
        for (own, other) in target.tables.iter_mut().zip(&source.tables) {
            other.held().for_each(|block| self.pool.hold(block));
            own.blocks.clone_from(&other.blocks);
            (own.num_null, own.num_left) = (other.num_null, other.num_left);
        }
        target.num_computed = source.num_computed;
        target.num_scheduled = source.num_scheduled;
        source.tail = source.tail.max(Tail::Shared);
        target.tail = source.tail;
        let (root, path) = (source.root, source.path);
        target.path_len = source.path_len;
        self.pool.prefixes.hold(root);
        self.pool.prefixes.release_root(std::mem::replace(&mut target.root, root));
        self.set_path(index, path);
    }

    /// Exchanges the tokens of two sequences; the caller knows that all that is scheduled of either is the same in both.
    pub(crate) fn swap_tokens(&mut self, index: usize, other: usize) {
        let [one, other] = self.sequences.get_disjoint_mut([index, other]).expect("two live sequences");
        std::mem::swap(&mut one.tokens, &mut other.tokens);
    }

    /// Takes all blocks from a sequence and starts it over. Returns how many of them nobody holds any more.
    pub(crate) fn release_all(&mut self, index: usize) -> u32 {
        let before = self.pool.num_held();
        self.shrink(index, 0);
        let sequence = &mut self.sequences[index];
        sequence.num_computed = 0;
        sequence.in_flight.clear();
        sequence.num_drafts = 0;
        sequence.epoch += 1;
        sequence.tail = Tail::Own;
        before - self.pool.num_held()
    }

    /// Lets a sequence without blocks start from the root of the present cache.
    pub(super) fn renew_root(&mut self, index: usize) {
        let sequence = &mut self.sequences[index];
        if self.pool.prefixes.is_current(sequence.root) {
            return;
        }
        let root = self.pool.hold_root(&sequence.identity.root);
        self.pool.prefixes.release_root(std::mem::replace(&mut sequence.root, root));
        self.set_path(index, root);
    }

    /// Moves the end of a sequence's path, and the hold on it where blocks alone may not keep it.
    fn set_path(&mut self, index: usize, node: NodeId) {
        let before = std::mem::replace(&mut self.sequences[index].path, node);
        if self.holds_paths {
            self.pool.prefixes.hold_path(node);
            self.pool.prefixes.release_path(before);
        }
    }

    /// Takes a sequence's path back to its first `len` nodes, if it goes further.
    fn rewind(&mut self, index: usize, len: u32) {
        let Sequence { mut path, path_len, .. } = self.sequences[index];
        if path_len <= len {
            return;
        }
        for _ in len..path_len {
            path = self.pool.prefixes.node(path).parent;
        }
        self.sequences[index].path_len = len;
        self.set_path(index, path);
    }

    pub(crate) fn remove(&mut self, index: usize) {
        self.release_all(index);
        let sequence = &mut self.sequences[index];
        if self.holds_paths {
            self.pool.prefixes.release_path(sequence.path);
        }
        self.pool.prefixes.release_root(sequence.root);
        sequence.is_live = false;
        sequence.generation = sequence.generation.wrapping_add(1);
        sequence.tokens = Tokens::new(Arc::default());
        self.vacant.push(index as u32);
    }

    /// The sequence at `index`, if the record with this epoch still speaks of the blocks that it holds.
    pub(crate) fn resident(&self, index: usize, epoch: u32) -> Option<&Sequence> {
        Some(&self.sequences[index]).filter(|sequence| sequence.epoch == epoch)
    }

    /// Cuts a sequence's blocks to those of its first `num_tokens` tokens, releasing the last one first.
    fn shrink(&mut self, index: usize, num_tokens: u32) {
        self.pool.stamp += 1;
        self.rewind(index, num_tokens / self.block_size);
        let sequence = &mut self.sequences[index];
        sequence.moves = None;
        let named_by = sequence.in_flight.last().map(|&(plan, _)| plan);
        if let [table] = sequence.tables.as_mut_slice() {
            let keep = num_tokens.div_ceil(self.groups[0].block_size);
            while table.len() > keep {
                if let Some(block) = table.pop() {
                    self.pool.release(block, named_by);
                }
            }
        } else {
            // What ends last goes first, whatever its group: a hit needs all groups.
            loop {
                let goes_on =
                    |(table, spec): &(&mut Table, &TableSpec)| table.len() > num_tokens.div_ceil(spec.block_size);
                let tables = sequence.tables.iter_mut().zip(&self.groups).filter(goes_on);
                let Some((table, _)) = tables.max_by_key(|(table, spec)| table.len() * spec.block_size) else { break };
                if let Some(block) = table.pop() {
                    self.pool.release(block, named_by);
                }
            }
        }
        sequence.num_scheduled = num_tokens;
    }

    fn insert(&mut self, tokens: Tokens, identity: Arc<Identity>, uses_cache: bool, root: NodeId) -> SequenceId {
        let index = self.vacant.pop().unwrap_or(self.sequences.len() as u32);
        let recycled = self.sequences.get_mut(index as usize);
        let (mut tables, epoch, generation) =
            recycled.map(|old| (std::mem::take(&mut old.tables), old.epoch, old.generation)).unwrap_or_default();
        tables.resize_with(self.groups.len(), Table::default);
        if self.holds_paths {
            self.pool.prefixes.hold_path(root);
        }
        let sequence = Sequence {
            tables,
            tokens,
            num_computed: 0,
            num_scheduled: 0,
            in_flight: SmallVec::new(),
            num_drafts: 0,
            drafts_at: (PlanId::default(), 0),
            root,
            path: root,
            path_len: 0,
            tail: Tail::Own,
            moves: None,
            uses_cache,
            identity,
            retention: None,
            epoch,
            generation,
            is_live: true,
            is_kept: false,
        };
        if index as usize == self.sequences.len() {
            self.sequences.push(sequence);
        } else {
            self.sequences[index as usize] = sequence;
        }
        SequenceId { index, generation }
    }

    fn find(&self, id: SequenceId) -> Result<usize> {
        let index = id.index as usize;
        let found =
            self.sequences.get(index).filter(|sequence| sequence.is_live && sequence.generation == id.generation);
        found.map(|_| index).ok_or(Error::UnknownSequence(id.to_bits()))
    }

    fn find_idle(&self, id: SequenceId) -> Result<usize> {
        let index = self.find(id)?;
        if self.sequences[index].in_flight.is_empty() { Ok(index) } else { Err(Error::SequenceInFlight(id.to_bits())) }
    }
}

pub(crate) fn check_tokens(argument: &'static str, tokens: &[i32]) -> Result<()> {
    match tokens.iter().position(|&token| token < 0) {
        Some(index) => invalid_element(argument, index, "a token id of at least 0", tokens[index]),
        None => Ok(()),
    }
}

pub(crate) fn check_identity(identity: &Identity) -> Result<()> {
    let mut end = 0;
    for image in &identity.images {
        if image.start < end || image.len == 0 || image.start.checked_add(image.len).is_none() {
            let expected = "spans of at least one position, ascending, not overlapping";
            return invalid("image_spans", expected, format!("start {}, length {}", image.start, image.len));
        }
        end = image.start + image.len;
    }
    Ok(())
}

/// The least common multiple of the groups' block sizes.
fn hit_multiple(groups: &[TableSpec]) -> Result<u32> {
    let gcd = |mut one: u64, mut other: u64| {
        while other > 0 {
            (one, other) = (other, one % other);
        }
        one
    };
    let multiple = groups.iter().fold(1_u64, |multiple, table| {
        let size = u64::from(table.block_size);
        (multiple / gcd(multiple, size)).saturating_mul(size)
    });
    match u32::try_from(multiple) {
        Ok(multiple) if multiple < 1 << 30 => Ok(multiple),
        _ => invalid("groups", "block sizes with a common multiple below 2^30", multiple),
    }
}
