//! A batch as the kernels of a GPU take it: lists of work in 32-bit words, cut by [`split_kv`](crate::split_kv).
//!
//! A sequence with few query rows (queries times query heads per KV head) goes to the kernel for few rows, every other one
//! to the kernel for many. One item serves all KV heads, for which there is a thread block each. What a kernel needs of a
//! sequence is in the item, so that it reads nothing else before the first key. The words are those of `WorkItem` and
//! `MergeItem` in `cuda/include/attention.cuh`.

use std::ops::Range;

use crate::error::{Result, invalid, invalid_element};
use crate::split_kv::{KeySplit, SequenceShape, SplitKvOptions, SplitKvPlan, Tile};

/// Words before the items of a list: how many there are, and three that say nothing.
const HEADER_WORDS: usize = 4;

/// The sequences of a step, as index arrays say it.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBatch<'a> {
    /// Tokens of each sequence, those of this step included.
    pub seq_lens: &'a [i32],
    /// Where each sequence's queries start, one more entry than sequences.
    pub query_start_loc: &'a [i32],
    /// The block table's row of each sequence; row `s` for sequence `s` by default.
    pub rows: Option<&'a [i32]>,
    /// What queries of draft trees see of their step: packed bits, and where those of each sequence start, in bytes.
    pub tree_mask: Option<(&'a [u8], &'a [i32])>,
    /// Query tokens of the arrays, those behind the last sequence included.
    pub num_tokens: usize,
    /// Rows of the block table, and the most tokens that one has room for.
    pub table: (usize, usize),
}

/// What decides where a batch is cut.
#[derive(Clone, Copy, Debug)]
pub struct DeviceWorkOptions {
    /// KV heads of the layer.
    pub num_kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Keys that a query sees, itself included.
    pub sliding_window: Option<usize>,
    /// Query rows of an item of the kernel for few rows.
    pub few_rows: usize,
    /// Query rows of an item of the kernel for many rows.
    pub many_rows: usize,
    /// How the keys of sequences with one item's rows are cut.
    pub split: KeySplit,
    /// Thread blocks that run side by side.
    pub num_workers: usize,
}

/// The lists of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceWork {
    /// Items for the kernel for few rows, the costliest first.
    pub few: Vec<i32>,
    /// Items for the kernel for many rows.
    pub many: Vec<i32>,
    /// What is joined when both have run.
    pub merges: Vec<i32>,
    /// The rows of draft trees, as 32-bit words.
    pub tree_mask: Vec<i32>,
    /// Of each query of a draft tree, how many tokens of the tree it sees, less one.
    pub tree_depths: Vec<i32>,
    /// Rows of the workspace that partial results take.
    pub num_partial_rows: usize,
}

/// One sequence, checked.
struct Sequence {
    shape: SequenceShape,
    first_token: usize,
    table_row: usize,
    /// First word in the mask, words per row, first entry in the depths.
    tree: Option<(usize, usize, usize)>,
}

impl DeviceWork {
    /// Cuts a batch.
    ///
    /// # Errors
    ///
    /// Arrays whose lengths disagree, more query rows than 31 bits count, lengths that the block table has no room for,
    /// queries out of order, rows that it does not have, and trees whose bits are not there.
    ///
    /// # Panics
    ///
    /// If an option that counts something is 0.
    ///
    /// # Complexity
    ///
    /// O(i log i) for i items, and the bits of the trees.
    pub fn new(batch: &DeviceBatch<'_>, options: &DeviceWorkOptions) -> Result<Self> {
        check_num_rows(batch.num_tokens, options.group)?;
        let mut work = Self { merges: vec![0; HEADER_WORDS], ..Self::default() };
        let sequences = work.read(batch)?;
        let is_few = |sequence: &Sequence| sequence.shape.num_queries * options.group <= options.few_rows;
        work.few = work.cut(&sequences, options, options.few_rows, is_few);
        work.many = work.cut(&sequences, options, options.many_rows, |sequence| !is_few(sequence));
        let end = sequences.last().map_or(0, |last| last.first_token + last.shape.num_queries);
        work.pad(end..batch.num_tokens, options);
        Ok(work)
    }

    /// Checks the sequences and takes over their trees.
    fn read(&mut self, batch: &DeviceBatch<'_>) -> Result<Vec<Sequence>> {
        check_lengths(batch)?;
        let mut sequences = Vec::with_capacity(batch.seq_lens.len());
        for (index, len) in batch.seq_lens.iter().enumerate() {
            let (num_rows, max_len) = batch.table;
            let Some(len) = usize::try_from(*len).ok().filter(|len| *len <= max_len) else {
                return invalid_element("seq_lens", index, format!("0 to {max_len}"), len);
            };
            let tokens = queries(batch, index)?;
            let row = batch.rows.map_or(index as i64, |rows| i64::from(rows[index]));
            let Some(table_row) = usize::try_from(row).ok().filter(|row| *row < num_rows) else {
                return invalid_element("rows", index, format!("a row below {num_rows}"), row);
            };
            let tree = self.read_tree(batch, index, tokens.len())?;
            let shape = SequenceShape { len, num_queries: tokens.len(), is_tree: tree.is_some() };
            sequences.push(Sequence { shape, first_token: tokens.start, table_row, tree });
        }
        Ok(sequences)
    }

    fn read_tree(
        &mut self,
        batch: &DeviceBatch<'_>,
        index: usize,
        num_queries: usize,
    ) -> Result<Option<(usize, usize, usize)>> {
        let Some((bits, starts)) = batch.tree_mask else { return Ok(None) };
        let row_bytes = num_queries.div_ceil(64) * 8;
        let range = usize::try_from(starts[index]).ok().zip(usize::try_from(starts[index + 1]).ok());
        let rows = range.and_then(|(start, end)| bits.get(start..end));
        let Some(rows) = rows.filter(|rows| rows.is_empty() || rows.len() == num_queries * row_bytes) else {
            let expected = format!("{0} or {1} more, within tree_mask", starts[index], num_queries * row_bytes);
            return invalid_element("tree_mask_start_loc", index + 1, expected, starts[index + 1]);
        };
        if rows.is_empty() {
            return Ok(None);
        }
        let tree = (self.tree_mask.len(), row_bytes / 4, self.tree_depths.len());
        self.tree_mask
            .extend(rows.chunks_exact(4).map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]])));
        for row in rows.chunks_exact(row_bytes) {
            let is_set = |query: &usize| row[query / 8] >> (query % 8) & 1 == 1;
            self.tree_depths.push(int((0..num_queries).filter(is_set).count()) - 1);
        }
        Ok(Some(tree))
    }

    /// The items of the sequences that `is_taken`; adds their merges.
    fn cut(
        &mut self,
        sequences: &[Sequence],
        options: &DeviceWorkOptions,
        max_rows: usize,
        is_taken: impl Fn(&Sequence) -> bool,
    ) -> Vec<i32> {
        let nothing = SequenceShape { len: 0, num_queries: 0, is_tree: false };
        let shape = |sequence: &Sequence| if is_taken(sequence) { sequence.shape } else { nothing };
        let shapes: Vec<SequenceShape> = sequences.iter().map(shape).collect();
        let split = SplitKvOptions {
            num_kv_heads: 1,
            group: options.group,
            sliding_window: options.sliding_window,
            max_rows,
            max_split_rows: max_rows,
            split: options.split,
            num_workers: options.num_workers.div_ceil(options.num_kv_heads),
        };
        let plan = SplitKvPlan::new(&shapes, &split);
        let mut items = vec![0; HEADER_WORDS];
        for item in &plan.items {
            let partial_row = item.partial_row.map(|row| self.num_partial_rows + row);
            let sequence = &sequences[item.tile.sequence];
            push_items(&mut items, sequence, &item.tile, &item.keys, partial_row, (options.group, max_rows));
        }
        for merge in &plan.merges {
            let tile_rows = merge.tile.num_rows(options.group);
            for part in parts(tile_rows, max_rows) {
                let first_row = merge.tile.queries.start * options.group + part.start;
                let partial_row = self.num_partial_rows + merge.partial_row + part.start;
                let rows = [sequences[merge.tile.sequence].first_token, first_row, part.len(), partial_row];
                self.merges.extend(rows.map(int));
                self.merges.extend([int(merge.num_pieces), int(tile_rows), 0, 0]);
                self.merges[0] += 1;
            }
        }
        self.num_partial_rows += plan.num_partial_rows;
        items
    }

    /// Adds items without keys for tokens that belong to no sequence: these give 0.
    fn pad(&mut self, tokens: Range<usize>, options: &DeviceWorkOptions) {
        let shape = SequenceShape { len: 0, num_queries: tokens.len(), is_tree: false };
        let nobody = Sequence { shape, first_token: tokens.start, table_row: 0, tree: None };
        let tile = Tile { sequence: 0, queries: 0..tokens.len(), kv_heads: 0..1 };
        push_items(&mut self.few, &nobody, &tile, &(0..0), None, (options.group, options.few_rows));
    }
}

/// Adds a tile's item for some keys; several where it has more than `max_rows` rows, as one query of a large group has.
fn push_items(
    list: &mut Vec<i32>,
    sequence: &Sequence,
    tile: &Tile,
    keys: &Range<usize>,
    partial_row: Option<usize>,
    (group, max_rows): (usize, usize),
) {
    let SequenceShape { len, num_queries, .. } = sequence.shape;
    let context_len = int(len) - int(num_queries);
    let (mask, row_words, depths) = sequence.tree.unwrap_or((0, 0, 0));
    let mask = if sequence.tree.is_some() { int(mask) } else { -1 };
    for part in parts(tile.queries.len() * group, max_rows) {
        let first_row = tile.queries.start * group + part.start;
        list.extend([sequence.table_row, sequence.first_token, first_row, part.len(), keys.start, keys.end].map(int));
        list.extend([context_len, partial_row.map_or(-1, |row| int(row + part.start)), mask]);
        list.extend([row_words, depths, num_queries].map(int));
        list[0] += 1;
    }
}

fn parts(num_rows: usize, max_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..num_rows).step_by(max_rows).map(move |start| start..(start + max_rows).min(num_rows))
}

fn check_num_rows(num_tokens: usize, group: usize) -> Result<()> {
    let most = i32::MAX as usize / group;
    if num_tokens <= most {
        return Ok(());
    }
    invalid("num_tokens", format!("at most {most} under {group} query heads per KV head"), num_tokens)
}

fn check_lengths(batch: &DeviceBatch<'_>) -> Result<()> {
    let num_seqs = batch.seq_lens.len();
    let check = |argument, len: usize, expected: usize, text: &str| {
        if len == expected {
            return Ok(());
        }
        invalid(argument, format!("shape ({text}={expected},)"), format!("({len},)"))
    };
    check("query_start_loc", batch.query_start_loc.len(), num_seqs + 1, "num_seqs + 1")?;
    if let Some(rows) = batch.rows {
        check("rows", rows.len(), num_seqs, "num_seqs")?;
    }
    if let Some((_, starts)) = batch.tree_mask {
        check("tree_mask_start_loc", starts.len(), num_seqs + 1, "num_seqs + 1")?;
    }
    match batch.query_start_loc[0] {
        0 => Ok(()),
        first => invalid_element("query_start_loc", 0, "0", first),
    }
}

/// The query tokens of a sequence.
fn queries(batch: &DeviceBatch<'_>, index: usize) -> Result<Range<usize>> {
    let (start, end) = (batch.query_start_loc[index], batch.query_start_loc[index + 1]);
    if end < start {
        return invalid_element("query_start_loc", index + 1, format!("at least {start}, the entry before it"), end);
    }
    if end as usize > batch.num_tokens {
        return invalid_element("query_start_loc", index + 1, format!("at most num_tokens={}", batch.num_tokens), end);
    }
    Ok(start as usize..end as usize)
}

/// A count as a word; batches that do not fit into 31 bits fit into no device.
fn int(count: usize) -> i32 {
    i32::try_from(count).expect("broken law: counts of a batch fit into 31 bits")
}
