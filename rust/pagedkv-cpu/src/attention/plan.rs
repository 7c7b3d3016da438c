//! Cuts a batch into work items whose borders depend on the lengths of each sequence alone.

use std::ops::Range;

use super::batch::{Batch, BlockTable, TreeMask, check_seq_lens};
use crate::error::Result;

/// Query rows (tokens times query heads per KV head) that share one widened tile of keys.
const ROWS_PER_TILE: usize = 32;

/// Keys per item of a sequence that is cut along its keys.
const KEYS_PER_CHUNK: usize = 512;

/// Sequences with more queries than this have items enough; cutting their keys would only cost partial results.
const MAX_QUERIES_TO_CUT_KEYS: usize = 16;

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
}

/// One sequence of the batch, its blocks checked.
#[derive(Debug)]
pub(super) struct Sequence {
    len: usize,
    /// Its query tokens in the batch.
    tokens: Range<usize>,
    /// Blocks from the one that holds the first visible key on.
    blocks: Vec<u32>,
    /// How many blocks of the sequence come before those.
    skipped_blocks: usize,
    window: Option<usize>,
    /// Rows of bits that say what queries of a draft tree see of their step; empty for a causal sequence.
    mask: Vec<u8>,
}

impl Sequence {
    /// The keys among which those lie that query `i` sees.
    fn visible(&self, i: usize) -> Range<usize> {
        if !self.mask.is_empty() {
            let end = self.len.saturating_sub(self.tokens.len()) + self.seen_in_step(i).count();
            return self.window.map_or(0, |window| end.saturating_sub(window))..self.len;
        }
        let end = (self.len + i + 1).saturating_sub(self.tokens.len());
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        start..end
    }

    /// Calls `with` on each run of the keys that query `i` sees among `keys`.
    pub(super) fn for_each_run(&self, i: usize, keys: &Range<usize>, mut with: impl FnMut(Range<usize>)) {
        let seen = self.visible(i);
        let cut = |run: Range<usize>| run.start.max(keys.start)..run.end.min(keys.end);
        if self.mask.is_empty() {
            let run = cut(seen);
            if !run.is_empty() {
                with(run);
            }
            return;
        }
        let context = self.len.saturating_sub(self.tokens.len());
        let mut run = seen.start.min(context)..context;
        // The position at which a seen key of the step stands decides whether it is in the window.
        for (position, key) in (context..).zip(self.seen_in_step(i)) {
            let key = context + key;
            if position < seen.start {
                continue;
            }
            if key != run.end {
                let whole = cut(std::mem::replace(&mut run, key..key));
                if !whole.is_empty() {
                    with(whole);
                }
            }
            run.end = key + 1;
        }
        let last = cut(run);
        if !last.is_empty() {
            with(last);
        }
    }

    /// The tokens of the step that query `i` of a draft tree sees.
    fn seen_in_step(&self, i: usize) -> impl Iterator<Item = usize> + '_ {
        let row_len = TreeMask::row_bytes(self.tokens.len());
        let row = &self.mask[i * row_len..(i + 1) * row_len];
        (0..self.tokens.len()).filter(|key| row[key / 8] >> (key % 8) & 1 == 1)
    }

    /// The keys that some of the queries see.
    fn visible_to_any(&self, queries: &Range<usize>) -> Range<usize> {
        let start = if self.mask.is_empty() {
            self.visible(queries.start).start
        } else {
            queries.clone().map(|i| self.visible(i).start).min().unwrap_or(0)
        };
        start..self.visible(queries.end - 1).end
    }

    /// The token of query `i` in the batch.
    pub(super) fn token(&self, i: usize) -> usize {
        self.tokens.start + i
    }

    /// The block that holds a visible key's run of `block_size` keys.
    pub(super) fn block(&self, index: usize) -> usize {
        self.blocks[index - self.skipped_blocks] as usize
    }
}

/// Some queries of one sequence under one KV head.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) queries: Range<usize>,
}

/// A tile and the keys to fold into it.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) tile: Tile,
    pub(super) keys: Range<usize>,
    /// Where the result waits to be merged; without it the item finishes its tile.
    pub(super) partial: Option<usize>,
}

/// A tile whose partial results are to be merged.
#[derive(Debug)]
pub(super) struct Merge {
    pub(super) tile: Tile,
    pub(super) partials: Range<usize>,
}

/// Everything that is known before the first key is read.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) cut: Cut,
    pub(super) sequences: Vec<Sequence>,
    pub(super) items: Vec<Item>,
    pub(super) merges: Vec<Merge>,
    pub(super) num_partials: usize,
    /// Tokens that belong to a sequence.
    pub(super) num_tokens: usize,
    /// Multiply-adds of all items.
    pub(super) work: usize,
    /// Elements of all partial results.
    pub(super) merge_work: usize,
}

impl Plan {
    pub(super) fn new(batch: &Batch<'_>, cut: &Cut) -> Result<Self> {
        let lens = check_seq_lens(batch.seq_lens)?;
        let queries = batch.queries(cut.num_tokens)?;
        let (rows, num_blocks) = (batch.rows, cut.num_blocks);
        let table = BlockTable::new(&batch.block_table, rows, lens.len(), num_blocks, cut.block_size)?;
        let mut plan = Self {
            cut: *cut,
            num_tokens: queries.last().map_or(0, |tokens| tokens.end),
            sequences: Vec::with_capacity(lens.len()),
            items: Vec::new(),
            merges: Vec::new(),
            num_partials: 0,
            work: 0,
            merge_work: 0,
        };
        if let Some(mask) = &batch.tree_mask {
            mask.check(lens.len())?;
        }
        for (len, tokens) in lens.into_iter().zip(queries) {
            let rows = batch.tree_mask.map(|mask| mask.rows(plan.sequences.len(), tokens.len())).transpose()?;
            let sequence = plan.check_sequence(&table, len, tokens, rows.unwrap_or_default())?;
            plan.sequences.push(sequence);
            plan.cut_sequence(plan.sequences.len() - 1);
        }
        Ok(plan)
    }

    fn check_sequence(
        &self,
        table: &BlockTable<'_>,
        len: usize,
        tokens: Range<usize>,
        mask: &[u8],
    ) -> Result<Sequence> {
        let (window, mask) = (self.cut.sliding_window, mask.to_vec());
        let mut sequence = Sequence { len, tokens, blocks: Vec::new(), skipped_blocks: 0, window, mask };
        if sequence.tokens.is_empty() {
            return Ok(sequence);
        }
        let keys = sequence.visible_to_any(&(0..sequence.tokens.len()));
        sequence.skipped_blocks = keys.start / self.cut.block_size;
        sequence.blocks = table.blocks(self.sequences.len(), keys)?;
        Ok(sequence)
    }

    fn cut_sequence(&mut self, index: usize) {
        let num_queries = self.sequences[index].tokens.len();
        let step = (ROWS_PER_TILE / self.cut.group).max(1);
        for start in (0..num_queries).step_by(step) {
            let queries = start..(start + step).min(num_queries);
            let keys = self.sequences[index].visible_to_any(&queries);
            let chunks = chunks(&keys, num_queries <= MAX_QUERIES_TO_CUT_KEYS);
            for kv_head in 0..self.cut.num_kv_heads {
                let queries = queries.clone();
                self.push_tile(&Tile { sequence: index, kv_head, queries }, &chunks);
            }
        }
    }

    fn push_tile(&mut self, tile: &Tile, chunks: &[Range<usize>]) {
        let elements = tile.queries.len() * self.cut.group * self.cut.head_dim;
        let is_cut = chunks.len() > 1;
        let first = self.num_partials;
        for keys in chunks {
            self.work += elements * keys.len();
            self.items.push(Item {
                tile: tile.clone(),
                keys: keys.clone(),
                partial: is_cut.then_some(self.num_partials),
            });
            self.num_partials += usize::from(is_cut);
        }
        if is_cut {
            self.merge_work += elements * chunks.len();
            self.merges.push(Merge { tile: tile.clone(), partials: first..self.num_partials });
        }
    }
}

/// The pieces of `keys`, borders at multiples of the chunk; one empty piece where there are no keys.
fn chunks(keys: &Range<usize>, cut: bool) -> Vec<Range<usize>> {
    if !cut || keys.is_empty() {
        return vec![keys.clone()];
    }
    (keys.start / KEYS_PER_CHUNK..keys.end.div_ceil(KEYS_PER_CHUNK))
        .map(|i| keys.start.max(i * KEYS_PER_CHUNK)..keys.end.min((i + 1) * KEYS_PER_CHUNK))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_keys_in_order_when_they_start_in_the_middle() {
        assert_eq!(chunks(&(500..1100), true), [500..512, 512..1024, 1024..1100]);
        assert_eq!(chunks(&(500..1100), false), vec![500..1100]);
        assert_eq!(chunks(&(7..7), true), vec![7..7]);
    }

    #[test]
    fn a_query_sees_no_key_when_its_position_is_before_the_sequence() {
        let sequence =
            Sequence { len: 2, tokens: 10..14, blocks: Vec::new(), skipped_blocks: 0, window: None, mask: vec![] };
        assert_eq!((0..4).map(|i| sequence.visible(i)).collect::<Vec<_>>(), [0..0, 0..0, 0..1, 0..2]);
    }
}
