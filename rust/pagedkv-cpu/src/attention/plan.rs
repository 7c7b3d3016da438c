//! What is known of a batch before the first key is read: its sequences, checked, and its work items.

use std::ops::Range;

use pagedkv_core::split_kv::{KeySplit, SequenceShape, SplitKvOptions, SplitKvPlan};

use super::batch::{Batch, BlockTable, TreeMask, check_seq_lens};
use crate::error::Result;

/// Query rows of an item that multiplies matrices: they share each tile of keys and values that is laid out.
const MAX_ROWS: usize = 384;

/// With at most this many query rows, keys are read where they lie and not laid out first.
const MAX_SPLIT_ROWS: usize = 32;

/// Keys per item of a sequence that is cut along its keys: small beside a long context, and so long that the merge of
/// its pieces costs next to nothing.
const KEYS_PER_PIECE: usize = 1024;

/// The sizes that decide where a batch is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) num_tokens: usize,
    pub(super) num_blocks: usize,
    pub(super) block_size: usize,
    pub(super) num_kv_heads: usize,
    /// Query heads per KV head.
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) sliding_window: Option<usize>,
    pub(super) num_threads: usize,
}

impl Cut {
    fn split_options(&self) -> SplitKvOptions {
        SplitKvOptions {
            num_kv_heads: self.num_kv_heads,
            group: self.group,
            sliding_window: self.sliding_window,
            max_rows: MAX_ROWS,
            max_split_rows: MAX_SPLIT_ROWS,
            split: KeySplit::Fixed(KEYS_PER_PIECE),
            num_workers: self.num_threads,
        }
    }
}

/// One sequence of the batch, its blocks checked.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) shape: SequenceShape,
    /// Its first query token in the batch.
    first_token: usize,
    /// Blocks from the one that holds the first visible key on.
    pub(super) blocks: Vec<u32>,
    /// How many blocks of the sequence come before those.
    skipped_blocks: usize,
    window: Option<usize>,
    /// Rows of bits that say what queries of a draft tree see of their step; empty for a causal sequence.
    pub(super) mask: Vec<u8>,
    /// How far each token of such a tree stands behind the context.
    depths: Vec<i64>,
    /// Whether its rows are few, so that keys are read where they lie.
    pub(super) is_split: bool,
}

impl Sequence {
    /// A sequence whose queries start at `first_token`; `blocks` finds those that hold some of its tokens.
    pub(super) fn new(
        cut: &Cut,
        shape: SequenceShape,
        first_token: usize,
        mask: Vec<u8>,
        blocks: impl FnOnce(Range<usize>) -> Result<Vec<u32>>,
    ) -> Result<Self> {
        let keys = shape.visible(&(0..shape.num_queries), cut.sliding_window);
        Ok(Self {
            first_token,
            skipped_blocks: keys.start / cut.block_size,
            blocks: if shape.num_queries == 0 { Vec::new() } else { blocks(keys)? },
            window: cut.sliding_window,
            is_split: cut.split_options().is_split(&shape),
            depths: depths(&mask, shape.num_queries),
            shape,
            mask,
        })
    }

    /// Says what queries of a draft tree see of their step, where that was not known before.
    pub(super) fn set_mask(&mut self, mask: Vec<u8>) {
        self.depths = depths(&mask, self.shape.num_queries);
        self.mask = mask;
    }

    /// Tokens before the first query.
    fn context(&self) -> usize {
        self.shape.len.saturating_sub(self.shape.num_queries)
    }

    /// The position of query `i`, which may lie before the sequence.
    pub(super) fn position(&self, i: usize) -> i64 {
        let context = self.shape.len as i64 - self.shape.num_queries as i64;
        context + self.depths.get(i).copied().unwrap_or(i as i64)
    }

    /// Whether some of `keys` stand elsewhere than where they lie, as those of a tree do.
    pub(super) fn has_tree_keys(&self, keys: &Range<usize>) -> bool {
        !self.mask.is_empty() && keys.end > self.context()
    }

    /// The position of a key; anything behind the last one.
    pub(super) fn key_position(&self, key: usize) -> i64 {
        match key.checked_sub(self.context()) {
            Some(of_step) if !self.mask.is_empty() => self.position(of_step),
            _ => key as i64,
        }
    }

    /// Calls `with` on each run of the keys that query `i` sees among `keys`.
    fn for_each_run(&self, i: usize, keys: &Range<usize>, mut with: impl FnMut(Range<usize>)) {
        let mut cut = |run: Range<usize>| {
            let run = run.start.max(keys.start)..run.end.min(keys.end);
            if !run.is_empty() {
                with(run);
            }
        };
        if self.mask.is_empty() {
            cut(self.shape.visible(&(i..i + 1), self.window));
            return;
        }
        let context = self.context();
        let end = context + (self.depths[i] + 1) as usize;
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        let mut run = start.min(context)..context;
        // The position at which a seen key of the step stands decides whether it is in the window.
        for (position, key) in (context..).zip(self.seen_in_step(i)) {
            let key = context + key;
            if position < start {
                continue;
            }
            if key != run.end {
                cut(std::mem::replace(&mut run, key..key));
            }
            run.end = key + 1;
        }
        cut(run);
    }

    /// The tokens of the step that query `i` of a draft tree sees.
    fn seen_in_step(&self, i: usize) -> impl Iterator<Item = usize> + '_ {
        seen_in_step(&self.mask, self.shape.num_queries, i)
    }

    /// Writes which of `keys` query `i` sees, bit by bit; answers whether it sees all of them.
    pub(super) fn visible_bits(&self, i: usize, keys: &Range<usize>, words: &mut [u64]) -> bool {
        if self.mask.is_empty() {
            let seen = self.shape.visible(&(i..i + 1), self.window);
            if seen.start <= keys.start && keys.end <= seen.end {
                fill_ones(keys.len(), words);
                return true;
            }
        }
        words.fill(0);
        let mut count = 0;
        self.for_each_run(i, keys, |run| {
            count += run.len();
            let (start, end) = (run.start - keys.start, run.end - keys.start);
            for (word, first) in words.iter_mut().zip((0..).step_by(64)) {
                let (from, to) = (start.clamp(first, first + 64) - first, end.clamp(first, first + 64) - first);
                let below = |bit: usize| if bit == 64 { u64::MAX } else { (1 << bit) - 1 };
                *word |= below(to) & !below(from);
            }
        });
        count == keys.len()
    }

    /// The token of query `i` in the batch.
    pub(super) fn token(&self, i: usize) -> usize {
        self.first_token + i
    }

    /// The block that holds a visible key's run of `block_size` keys.
    pub(super) fn block(&self, index: usize) -> usize {
        self.blocks[index - self.skipped_blocks] as usize
    }
}

/// Sets the first `len` bits, and no other.
fn fill_ones(len: usize, words: &mut [u64]) {
    for (word, first) in words.iter_mut().zip((0..).step_by(64)) {
        *word = match len.saturating_sub(first) {
            0 => 0,
            64.. => u64::MAX,
            bits => (1 << bits) - 1,
        };
    }
}

/// The bits that are set in a row of a mask.
fn seen_in_step(mask: &[u8], num_queries: usize, i: usize) -> impl Iterator<Item = usize> + '_ {
    let row_len = TreeMask::row_bytes(num_queries);
    let row = &mask[i * row_len..(i + 1) * row_len];
    (0..num_queries).filter(|key| row[key / 8] >> (key % 8) & 1 == 1)
}

/// How many other tokens of its tree each one sees; nothing for a causal sequence.
fn depths(mask: &[u8], num_queries: usize) -> Vec<i64> {
    let num_rows = if mask.is_empty() { 0 } else { num_queries };
    (0..num_rows).map(|i| seen_in_step(mask, num_queries, i).count() as i64 - 1).collect()
}

/// Everything that is known before the first key is read.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) cut: Cut,
    pub(super) sequences: Vec<Sequence>,
    pub(super) split: SplitKvPlan,
    /// Tokens that belong to a sequence.
    pub(super) num_tokens: usize,
}

impl Plan {
    pub(super) fn new(batch: &Batch<'_>, cut: &Cut) -> Result<Self> {
        let lens = check_seq_lens(batch.seq_lens)?;
        let queries = batch.queries(cut.num_tokens)?;
        let table = BlockTable::new(&batch.block_table, batch.rows, lens.len(), cut.num_blocks, cut.block_size)?;
        if let Some(mask) = &batch.tree_mask {
            mask.check(lens.len())?;
        }
        let num_tokens = queries.last().map_or(0, |tokens| tokens.end);
        let mut sequences = Vec::with_capacity(lens.len());
        for (index, (len, tokens)) in lens.into_iter().zip(queries).enumerate() {
            let rows = batch.tree_mask.map(|mask| mask.rows(index, tokens.len())).transpose()?.unwrap_or_default();
            let shape = SequenceShape { len, num_queries: tokens.len(), is_tree: !rows.is_empty() };
            let find = |keys| table.blocks(index, keys);
            sequences.push(Sequence::new(cut, shape, tokens.start, rows.to_vec(), find)?);
        }
        Ok(Self::of(cut, sequences, num_tokens))
    }

    /// The plan of sequences that were checked.
    pub(super) fn of(cut: &Cut, sequences: Vec<Sequence>, num_tokens: usize) -> Self {
        let shapes: Vec<SequenceShape> = sequences.iter().map(|sequence| sequence.shape).collect();
        Self { cut: *cut, sequences, split: SplitKvPlan::new(&shapes, &cut.split_options()), num_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(len: usize, num_queries: usize, mask: Vec<u8>) -> Sequence {
        let shape = SequenceShape { len, num_queries, is_tree: !mask.is_empty() };
        let (blocks, window, depths) = (Vec::new(), None, depths(&mask, num_queries));
        Sequence { shape, first_token: 10, blocks, skipped_blocks: 0, window, mask, depths, is_split: true }
    }

    fn bits(sequence: &Sequence, i: usize, keys: Range<usize>) -> Vec<u64> {
        let mut words = vec![7; keys.len().div_ceil(64)];
        sequence.visible_bits(i, &keys, &mut words);
        words
    }

    #[test]
    fn a_query_sees_no_key_when_its_position_is_before_the_sequence() {
        let sequence = sequence(2, 4, vec![]);
        assert_eq!((0..4).map(|i| bits(&sequence, i, 0..2)[0]).collect::<Vec<_>>(), [0, 0, 1, 3]);
    }

    #[test]
    fn visible_bits_cross_words() {
        let sequence = sequence(200, 1, vec![]);
        assert_eq!(bits(&sequence, 0, 100..200), [u64::MAX, (1 << 36) - 1]);
    }

    #[test]
    fn visible_bits_skip_other_branches_of_a_tree() {
        let mask = [[0b001, 0, 0, 0, 0, 0, 0, 0], [0b011, 0, 0, 0, 0, 0, 0, 0], [0b101, 0, 0, 0, 0, 0, 0, 0]];
        let sequence = sequence(10, 3, mask.concat());
        assert_eq!(bits(&sequence, 2, 0..10), [0b10_1111_1111]);
        assert_eq!(sequence.position(2), 8);
    }
}
