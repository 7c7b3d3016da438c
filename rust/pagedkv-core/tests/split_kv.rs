//! Where a batch of attention is cut, against the pairs of queries and keys that there are.

use pagedkv_core::split_kv::{KeySplit, SequenceShape, SplitKvOptions, SplitKvPlan};
use proptest::prelude::*;

const OPTIONS: SplitKvOptions = SplitKvOptions {
    num_kv_heads: 8,
    group: 4,
    sliding_window: None,
    max_rows: 192,
    max_split_rows: 32,
    split: KeySplit::Fixed(1024),
    num_workers: 2,
};

const fn causal(len: usize, num_queries: usize) -> SequenceShape {
    SequenceShape { len, num_queries, is_tree: false }
}

/// How often each (query, key, KV head) of a sequence is computed.
fn coverage(plan: &SplitKvPlan, sequence: usize, shape: &SequenceShape, num_kv_heads: usize) -> Vec<u32> {
    let mut counts = vec![0; shape.num_queries * shape.len * num_kv_heads];
    for item in plan.items.iter().filter(|item| item.tile.sequence == sequence) {
        for query in item.tile.queries.clone() {
            for key in item.keys.clone() {
                for head in item.tile.kv_heads.clone() {
                    counts[(query * shape.len + key) * num_kv_heads + head] += 1;
                }
            }
        }
    }
    counts
}

fn shapes() -> impl Strategy<Value = Vec<SequenceShape>> {
    let shape = (0..90_usize, 0..20_usize, any::<bool>());
    prop::collection::vec(
        shape.prop_map(|(len, num_queries, is_tree)| SequenceShape { len, num_queries, is_tree }),
        0..5,
    )
}

fn options() -> impl Strategy<Value = SplitKvOptions> {
    let split = prop_oneof![
        (1..40_usize).prop_map(KeySplit::Fixed),
        (1..20_usize).prop_map(|min_keys| KeySplit::Balanced { min_keys })
    ];
    (1..5_usize, 1..5_usize, prop::option::of(1..30_usize), 1..30_usize, 0..30_usize, split, 1..9_usize).prop_map(
        |(num_kv_heads, group, sliding_window, max_rows, max_split_rows, split, num_workers)| SplitKvOptions {
            num_kv_heads,
            group,
            sliding_window,
            max_rows,
            max_split_rows,
            split,
            num_workers,
        },
    )
}

proptest! {
    #[test]
    fn items_cover_every_pair_that_may_be_seen_once(shapes in shapes(), options in options()) {
        let plan = SplitKvPlan::new(&shapes, &options);
        for (index, shape) in shapes.iter().enumerate() {
            let counts = coverage(&plan, index, shape, options.num_kv_heads);
            prop_assert!(counts.iter().all(|count| *count < 2));
            for query in 0..shape.num_queries {
                let seen = shape.visible(&(query..query + 1), options.sliding_window);
                for key in seen {
                    let first = (query * shape.len + key) * options.num_kv_heads;
                    prop_assert!(counts[first..first + options.num_kv_heads].iter().all(|count| *count == 1));
                }
            }
        }
    }

    #[test]
    fn merges_join_the_pieces_of_their_tile_in_the_order_of_keys(shapes in shapes(), options in options()) {
        let plan = SplitKvPlan::new(&shapes, &options);
        let mut rows_seen = vec![false; plan.num_partial_rows];
        for merge in &plan.merges {
            let rows = merge.tile.num_rows(options.group);
            let mut end = None;
            for piece in 0..merge.num_pieces {
                let row = merge.partial_row + piece * rows;
                let item = plan.items.iter().find(|item| item.partial_row == Some(row)).expect("a piece is missing");
                prop_assert_eq!(&item.tile, &merge.tile);
                prop_assert!(end.is_none_or(|end| end == item.keys.start));
                end = Some(item.keys.end);
                rows_seen[row..row + rows].iter_mut().for_each(|seen| *seen = true);
            }
        }
        prop_assert!(rows_seen.iter().all(|seen| *seen));
    }

    #[test]
    fn a_fixed_split_does_not_depend_on_the_rest_of_the_batch_nor_on_workers(
        shapes in shapes(), options in options(), keys in 1..40_usize, num_workers in 1..9_usize,
    ) {
        let options = SplitKvOptions { split: KeySplit::Fixed(keys), ..options };
        let cuts = |plan: &SplitKvPlan, sequence: usize| {
            let mut cuts: Vec<_> = plan
                .items
                .iter()
                .filter(|item| item.tile.sequence == sequence && item.tile.kv_heads.contains(&0))
                .map(|item| (item.tile.queries.start, item.tile.queries.end, item.keys.start, item.keys.end))
                .collect();
            cuts.sort_unstable();
            cuts
        };
        let together = SplitKvPlan::new(&shapes, &options);
        for (index, shape) in shapes.iter().enumerate() {
            let alone = SplitKvPlan::new(&[*shape], &SplitKvOptions { num_workers, ..options });
            prop_assert_eq!(cuts(&together, index), cuts(&alone, 0));
        }
    }
}

#[test]
fn keys_before_the_window_are_in_no_item() {
    let options = SplitKvOptions { sliding_window: Some(100), ..OPTIONS };
    let plan = SplitKvPlan::new(&[causal(5000, 2)], &options);
    assert!(plan.items.iter().all(|item| item.keys.start >= 5000 - 101));
}

#[test]
fn a_long_sequence_is_cut_at_multiples_of_a_fixed_split() {
    let plan = SplitKvPlan::new(&[causal(2500, 1)], &SplitKvOptions { num_workers: 1, ..OPTIONS });
    let mut keys: Vec<_> = plan.items.iter().map(|item| (item.keys.start, item.keys.end)).collect();
    keys.sort_unstable();
    assert_eq!(keys, [(0, 1024), (1024, 2048), (2048, 2500)]);
}

#[test]
fn a_balanced_split_gives_every_worker_a_piece_when_keys_suffice() {
    let split = KeySplit::Balanced { min_keys: 128 };
    for num_workers in [2, 16, 64, 132, 264] {
        let plan = SplitKvPlan::new(&[causal(32_768, 1)], &SplitKvOptions { split, num_workers, ..OPTIONS });
        assert!(plan.items.len() >= num_workers.min(256 * 8), "{} items for {num_workers}", plan.items.len());
    }
}

#[test]
fn a_balanced_split_cuts_nothing_when_the_batch_keeps_workers_busy() {
    let split = KeySplit::Balanced { min_keys: 128 };
    let plan = SplitKvPlan::new(&[causal(4096, 1); 64], &SplitKvOptions { split, num_workers: 132, ..OPTIONS });
    assert!(plan.merges.is_empty());
}

#[test]
fn a_query_without_keys_still_has_an_item() {
    let plan = SplitKvPlan::new(&[causal(0, 1), causal(3, 0)], &OPTIONS);
    assert!(plan.items.iter().all(|item| item.tile.sequence == 0 && item.keys.is_empty()));
    assert_eq!(plan.items.iter().map(|item| item.tile.kv_heads.len()).sum::<usize>(), 8);
}
