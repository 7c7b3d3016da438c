//! Cuts a batch of attention into work items: which queries, which keys, which KV heads one worker takes at a time.
//!
//! Pure functions of lengths, shared by all backends. Laws, for every option:
//!
//! - the items of a sequence cover each pair of a query and a key that it may see, under each KV head, exactly once;
//! - a tile whose keys are cut leaves partial results, which one merge item joins in the order of their keys;
//! - where keys and queries are cut never depends on the number of workers under [`KeySplit::Fixed`], nor on the rest of
//!   the batch: results are then the same bit by bit whatever runs beside a sequence. Which KV heads share an item may
//!   depend on both, since heads know nothing of one another.

use std::ops::Range;

/// How the keys of a sequence with few queries are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySplit {
    /// At multiples of so many keys, whatever else is in the batch.
    Fixed(usize),
    /// Into as many pieces as give every worker something to do, none shorter than `min_keys` and all borders at
    /// multiples of it.
    Balanced {
        /// The shortest piece worth a merge.
        min_keys: usize,
    },
}

/// The sizes that decide where a batch is cut.
#[derive(Clone, Copy, Debug)]
pub struct SplitKvOptions {
    /// KV heads of the layer.
    pub num_kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Keys that a query sees, itself included.
    pub sliding_window: Option<usize>,
    /// Query rows (queries times group) that one item takes; a single query is never cut.
    pub max_rows: usize,
    /// Sequences with at most this many query rows have their keys cut, and their items take several KV heads.
    pub max_split_rows: usize,
    /// How keys are cut.
    pub split: KeySplit,
    /// Workers that should have something to do.
    pub num_workers: usize,
}

/// One sequence of a batch.
#[derive(Clone, Copy, Debug)]
pub struct SequenceShape {
    /// Tokens of the sequence, those of this step included.
    pub len: usize,
    /// Its queries in this step: the last ones of the sequence, where it has as many tokens.
    pub num_queries: usize,
    /// Whether a tree says what queries see of their own step: then each may see any key of the step.
    pub is_tree: bool,
}

/// Some queries of one sequence under some KV heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The sequence in the batch.
    pub sequence: usize,
    /// Queries, counted from the first one of the sequence.
    pub queries: Range<usize>,
    /// KV heads.
    pub kv_heads: Range<usize>,
}

/// A tile and the keys to fold into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkItem {
    /// What is computed.
    pub tile: Tile,
    /// The keys that this item reads.
    pub keys: Range<usize>,
    /// Where the unfinished rows of the tile wait to be merged: the first one in the workspace. Without it the item
    /// finishes its tile.
    pub partial_row: Option<usize>,
}

/// A tile whose partial results are joined: those of piece `i` start at `partial_row + i * rows of the tile`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeItem {
    /// What is finished.
    pub tile: Tile,
    /// First row of the first piece in the workspace.
    pub partial_row: usize,
    /// Pieces, in the order of their keys.
    pub num_pieces: usize,
}

/// The work of one attention call, the costliest items first.
#[derive(Clone, Debug, Default)]
pub struct SplitKvPlan {
    /// Independent of one another.
    pub items: Vec<WorkItem>,
    /// To run after all items.
    pub merges: Vec<MergeItem>,
    /// Rows of the workspace that partial results take.
    pub num_partial_rows: usize,
    /// Pairs of a query row and a key over all items.
    pub num_scores: usize,
}

impl SequenceShape {
    /// The keys that some of `queries` may see.
    pub fn visible(&self, queries: &Range<usize>, sliding_window: Option<usize>) -> Range<usize> {
        let end_of = |query: usize| (self.len + query + 1).saturating_sub(self.num_queries).min(self.len);
        // A guess deep in the order of a tree may be shallow in the tree, so its window may start as early as that of
        // the first guess.
        let first = if self.is_tree { 0 } else { queries.start };
        let start = sliding_window.map_or(0, |window| end_of(first).saturating_sub(window));
        let end = if self.is_tree { self.len } else { end_of(queries.end.saturating_sub(1)) };
        start.min(end)..end
    }
}

impl SplitKvPlan {
    /// Cuts a batch.
    ///
    /// # Panics
    ///
    /// If an option that counts something is 0.
    ///
    /// # Complexity
    ///
    /// O(i log i) for i items.
    pub fn new(sequences: &[SequenceShape], options: &SplitKvOptions) -> Self {
        let SplitKvOptions { num_kv_heads, group, max_rows, num_workers, .. } = *options;
        assert!(
            [num_kv_heads, group, max_rows, num_workers].iter().all(|n| *n > 0),
            "broken law: nothing to cut by in {options:?}"
        );
        let keys_per_piece = keys_per_piece(sequences, options);
        let tiles: Vec<(usize, Range<usize>, Vec<Range<usize>>)> = sequences
            .iter()
            .enumerate()
            .flat_map(|(index, sequence)| cut_sequence(index, sequence, options, keys_per_piece))
            .collect();
        let num_pieces = tiles.iter().map(|(.., pieces)| pieces.len()).sum();
        let heads = heads_per_item(num_pieces, options);
        let mut plan = Self::default();
        for (sequence, queries, pieces) in &tiles {
            let is_split = options.is_split(&sequences[*sequence]);
            let heads = if is_split { heads } else { 1 };
            for first in (0..num_kv_heads).step_by(heads) {
                let kv_heads = first..(first + heads).min(num_kv_heads);
                let tile = Tile { sequence: *sequence, queries: queries.clone(), kv_heads };
                plan.push(&tile, group, pieces);
            }
        }
        plan.items.sort_by_key(|item| std::cmp::Reverse(item.num_scores()));
        plan
    }

    fn push(&mut self, tile: &Tile, group: usize, pieces: &[Range<usize>]) {
        let rows = tile.num_rows(group);
        let first = self.num_partial_rows;
        let is_cut = pieces.len() > 1;
        for (i, keys) in pieces.iter().enumerate() {
            self.num_scores += rows * keys.len();
            let partial_row = is_cut.then_some(first + i * rows);
            self.items.push(WorkItem { tile: tile.clone(), keys: keys.clone(), partial_row });
        }
        if is_cut {
            self.num_partial_rows += rows * pieces.len();
            self.merges.push(MergeItem { tile: tile.clone(), partial_row: first, num_pieces: pieces.len() });
        }
    }
}

impl Tile {
    /// Query rows: one per KV head, query and query head of the group.
    pub fn num_rows(&self, group: usize) -> usize {
        self.kv_heads.len() * self.queries.len() * group
    }
}

impl WorkItem {
    fn num_scores(&self) -> usize {
        self.tile.kv_heads.len() * self.tile.queries.len() * self.keys.len()
    }
}

impl SplitKvOptions {
    /// Whether the keys of a sequence are cut.
    pub fn is_split(&self, sequence: &SequenceShape) -> bool {
        sequence.num_queries * self.group <= self.max_split_rows.max(self.group)
    }
}

/// The tiles of one sequence, with the pieces of their keys; one empty piece where a query sees no key.
fn cut_sequence(
    index: usize,
    sequence: &SequenceShape,
    options: &SplitKvOptions,
    keys_per_piece: usize,
) -> Vec<(usize, Range<usize>, Vec<Range<usize>>)> {
    let step = (options.max_rows / options.group).max(1);
    let is_split = options.is_split(sequence);
    (0..sequence.num_queries)
        .step_by(step)
        .map(|start| {
            let queries = start..(start + step).min(sequence.num_queries);
            let keys = sequence.visible(&queries, options.sliding_window);
            let pieces = if is_split { pieces(&keys, keys_per_piece) } else { vec![keys] };
            (index, queries, pieces)
        })
        .collect()
}

/// The pieces of `keys`, borders at multiples of `step`; one empty piece where there are no keys.
fn pieces(keys: &Range<usize>, step: usize) -> Vec<Range<usize>> {
    if keys.is_empty() {
        return vec![keys.clone()];
    }
    let piece = |i: usize| keys.start.max(i * step)..keys.end.min((i + 1) * step);
    (keys.start / step..keys.end.div_ceil(step)).map(piece).collect()
}

fn keys_per_piece(sequences: &[SequenceShape], options: &SplitKvOptions) -> usize {
    let min_keys = match options.split {
        KeySplit::Fixed(keys) => return keys.max(1),
        KeySplit::Balanced { min_keys } => min_keys.max(1),
    };
    let count = |step: usize| -> usize {
        let split = sequences.iter().filter(|s| s.num_queries > 0 && options.is_split(s));
        let pieces = split.map(|s| s.visible(&(0..s.num_queries), options.sliding_window).len().div_ceil(step));
        pieces.sum::<usize>() * options.num_kv_heads
    };
    // The longest piece that still gives every worker one, or the shortest allowed.
    let longest = sequences.iter().map(|s| s.len).max().unwrap_or(0).div_ceil(min_keys).max(1);
    let (mut low, mut high) = (1, longest);
    while low < high {
        let middle = low.midpoint(high + 1);
        if count(middle * min_keys) >= options.num_workers {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low * min_keys
}

/// KV heads that share an item: all of them, unless workers would have too few items to even out what they cost.
fn heads_per_item(num_pieces: usize, options: &SplitKvOptions) -> usize {
    const ITEMS_PER_WORKER: usize = 4;
    let wanted = options.num_workers.saturating_mul(ITEMS_PER_WORKER);
    let parts = wanted.div_ceil(num_pieces.max(1)).clamp(1, options.num_kv_heads);
    if options.num_workers == 1 { options.num_kv_heads } else { options.num_kv_heads.div_ceil(parts) }
}
