//! How sequences come and go: made of tokens, forked, given the blocks of another, and freed.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{KVCacheManager, Sequence, Table, Tail};
use crate::error::{Error, Result, invalid, invalid_element};
use crate::identity::{Identity, Tokens};
use crate::ids::{NodeId, PlanId, SequenceId};

impl KVCacheManager {
    /// A sequence of these tokens, none of them computed. It holds no block yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no tokens, or images that overlap or are out of order; [`Error::InvalidElement`]
    /// for a negative token.
    ///
    /// # Complexity
    /// O(tokens + images).
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
    fn adopt(&mut self, index: usize, from: usize) {
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

    /// Lets a sequence go on behind the prompt that another one computed for it. It may know more tokens than that one: then
    /// more is committed of it, and leaves its windows.
    pub(crate) fn part(&mut self, index: usize, from: usize) {
        self.adopt(index, from);
        if self.has_windows {
            self.leave_windows(index);
        }
    }

    /// Exchanges the tokens of two sequences; the caller knows that all that is scheduled of either is the same in both.
    pub(crate) fn swap_tokens(&mut self, index: usize, other: usize) {
        let [one, other] = self.sequences.get_disjoint_mut([index, other]).expect("two live sequences");
        std::mem::swap(&mut one.tokens, &mut other.tokens);
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

    pub(super) fn find(&self, id: SequenceId) -> Result<usize> {
        let index = id.index as usize;
        let found =
            self.sequences.get(index).filter(|sequence| sequence.is_live && sequence.generation == id.generation);
        found.map(|_| index).ok_or(Error::UnknownSequence(id.to_bits()))
    }

    pub(super) fn find_idle(&self, id: SequenceId) -> Result<usize> {
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
