//! The work lists of GPU kernels, against the pairs of query rows and keys that there are.

use std::collections::HashMap;

use pagedkv_core::device_work::{DeviceBatch, DeviceWork, DeviceWorkOptions};
use pagedkv_core::split_kv::{KeySplit, SequenceShape};
use proptest::prelude::*;

const OPTIONS: DeviceWorkOptions = DeviceWorkOptions {
    num_kv_heads: 2,
    group: 4,
    sliding_window: None,
    few_rows: 16,
    many_rows: 64,
    split: KeySplit::Fixed(64),
    num_workers: 8,
};

const BATCH: DeviceBatch<'static> = DeviceBatch {
    seq_lens: &[200, 0, 70],
    query_start_loc: &[0, 1, 1, 21],
    rows: None,
    tree_mask: None,
    num_tokens: 24,
    table: (3, 256),
};

/// The items of a list, by the words of `WorkItem`.
fn items(list: &[i32]) -> Vec<[i32; 12]> {
    assert_eq!(list[0] as usize * 12 + 4, list.len());
    list[4..].chunks_exact(12).map(|words| words.try_into().unwrap()).collect()
}

fn merges(work: &DeviceWork) -> Vec<[i32; 8]> {
    work.merges[4..].chunks_exact(8).map(|words| words.try_into().unwrap()).collect()
}

fn all_items(work: &DeviceWork) -> Vec<[i32; 12]> {
    [items(&work.few), items(&work.many)].concat()
}

prop_compose! {
    fn batches()(
        sequences in prop::collection::vec((0..150_usize, 0..40_usize), 0..6),
        group in 1..40_usize,
        window in prop::option::of(1..60_usize),
        keys in 1..70_usize,
        is_fixed: bool,
        padding in 0..5_usize,
    ) -> (Vec<(usize, usize)>, DeviceWorkOptions, usize) {
        let split = if is_fixed { KeySplit::Fixed(keys) } else { KeySplit::Balanced { min_keys: keys } };
        (sequences, DeviceWorkOptions { group, sliding_window: window, split, ..OPTIONS }, padding)
    }
}

proptest! {
    #[test]
    fn every_row_meets_every_key_that_it_may_see_once((sequences, options, padding) in batches()) {
        let lens: Vec<i32> = sequences.iter().map(|(len, _)| *len as i32).collect();
        let starts: Vec<i32> = std::iter::once(0)
            .chain(sequences.iter().scan(0, |sum, (_, queries)| { *sum += *queries as i32; Some(*sum) }))
            .collect();
        let num_tokens = *starts.last().unwrap() as usize + padding;
        let batch = DeviceBatch {
            seq_lens: &lens, query_start_loc: &starts, num_tokens, table: (lens.len(), 150), ..BATCH
        };
        let work = DeviceWork::new(&batch, &options).unwrap();
        let mut seen: HashMap<(i32, i32), Vec<(i32, i32)>> = HashMap::new();
        for (list, max_rows) in [(&work.few, options.few_rows), (&work.many, options.many_rows)] {
            for item in items(list) {
                prop_assert!(item[3] as usize <= max_rows);
                for row in item[2]..item[2] + item[3] {
                    let token = item[1] + row / options.group as i32;
                    seen.entry((token, row % options.group as i32)).or_default().push((item[4], item[5]));
                }
            }
        }
        let mut token = 0;
        for (len, num_queries) in sequences {
            let shape = SequenceShape { len, num_queries, is_tree: false };
            for query in 0..num_queries {
                let keys = shape.visible(&(query..query + 1), options.sliding_window);
                for head in 0..options.group as i32 {
                    let mut pieces = seen.remove(&(token, head)).unwrap();
                    pieces.sort_unstable();
                    prop_assert!(pieces.windows(2).all(|pair| pair[0].1 == pair[1].0));
                    let (first, end) = (pieces[0].0 as usize, pieces.last().unwrap().1 as usize);
                    prop_assert!(keys.is_empty() || (first <= keys.start && keys.end <= end));
                }
                token += 1;
            }
        }
        for _ in 0..padding {
            for head in 0..options.group as i32 {
                prop_assert_eq!(seen.remove(&(token, head)), Some(vec![(0, 0)]));
            }
            token += 1;
        }
        prop_assert!(seen.is_empty());
    }

    #[test]
    fn merges_find_the_rows_of_the_workspace_that_items_fill((sequences, options, _) in batches()) {
        let lens: Vec<i32> = sequences.iter().map(|(len, _)| *len as i32).collect();
        let starts: Vec<i32> = std::iter::once(0)
            .chain(sequences.iter().scan(0, |sum, (_, queries)| { *sum += *queries as i32; Some(*sum) }))
            .collect();
        let num_tokens = *starts.last().unwrap() as usize;
        let batch = DeviceBatch {
            seq_lens: &lens, query_start_loc: &starts, num_tokens, table: (lens.len(), 150), ..BATCH
        };
        let work = DeviceWork::new(&batch, &options).unwrap();
        let mut filled = vec![None; work.num_partial_rows];
        for item in all_items(&work).iter().filter(|item| item[7] >= 0) {
            for row in 0..item[3] {
                let place = &mut filled[(item[7] + row) as usize];
                prop_assert!(place.is_none());
                *place = Some((item[1], item[2] + row, item[4]));
            }
        }
        for [first_token, first_row, num_rows, partial_row, num_pieces, piece_rows, ..] in merges(&work) {
            for row in 0..num_rows {
                let pieces: Vec<_> = (0..num_pieces)
                    .map(|piece| filled[(partial_row + piece * piece_rows + row) as usize].take().unwrap())
                    .collect();
                prop_assert!(pieces.iter().all(|piece| (piece.0, piece.1) == (first_token, first_row + row)));
                prop_assert!(pieces.is_sorted_by_key(|piece| piece.2));
            }
        }
        prop_assert!(filled.iter().all(Option::is_none));
    }
}

#[test]
fn few_rows_and_many_rows_go_to_kernels_of_their_own() {
    let work = DeviceWork::new(&BATCH, &OPTIONS).unwrap();
    let few: Vec<i32> = items(&work.few).iter().map(|item| item[1]).collect();
    assert_eq!(few, [0, 0, 0, 0, 21], "four pieces of the first sequence, and the tokens of none");
    assert_eq!(items(&work.many).len(), 2);
}

#[test]
fn an_item_names_the_row_of_the_table_and_the_keys_before_the_queries() {
    let work = DeviceWork::new(&DeviceBatch { rows: Some(&[2, 0, 1]), ..BATCH }, &OPTIONS).unwrap();
    assert_eq!(items(&work.few)[0][0], 2);
    assert!(items(&work.many).iter().all(|item| item[0] == 1 && item[6] == 50 && item[11] == 20));
}

#[test]
fn trees_come_as_words_and_depths() {
    let bits = [1_u8, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0];
    let batch = DeviceBatch {
        seq_lens: &[9, 9],
        query_start_loc: &[0, 1, 3],
        tree_mask: Some((&bits, &[0, 0, 16])),
        num_tokens: 3,
        ..BATCH
    };
    let work = DeviceWork::new(&batch, &OPTIONS).unwrap();
    assert_eq!((work.tree_mask, work.tree_depths), (vec![1, 0, 3, 0], vec![0, 1]));
    let masks: Vec<_> = items(&work.few).iter().map(|item| (item[8], item[9], item[10])).collect();
    assert!(masks.contains(&(-1, 0, 0)) && masks.contains(&(0, 2, 0)));
}

#[test]
fn what_is_wrong_with_a_batch_is_named() {
    let cases = [
        (DeviceBatch { query_start_loc: &[0, 1, 1], ..BATCH }, "query_start_loc: expected shape (num_seqs + 1=4,)"),
        (DeviceBatch { query_start_loc: &[1, 1, 1, 21], ..BATCH }, "query_start_loc[0]: expected 0, found 1"),
        (DeviceBatch { query_start_loc: &[0, 2, 1, 21], ..BATCH }, "query_start_loc[2]: expected at least 2"),
        (DeviceBatch { num_tokens: 1 << 29, ..BATCH }, "num_tokens: expected at most 536870911 under 4 query heads"),
        (DeviceBatch { num_tokens: 20, ..BATCH }, "query_start_loc[3]: expected at most num_tokens=20, found 21"),
        (DeviceBatch { seq_lens: &[257, 0, 1], ..BATCH }, "seq_lens[0]: expected 0 to 256, found 257"),
        (DeviceBatch { seq_lens: &[1, -1, 1], ..BATCH }, "seq_lens[1]: expected 0 to 256, found -1"),
        (DeviceBatch { rows: Some(&[0, 3, 1]), ..BATCH }, "rows[1]: expected a row below 3, found 3"),
        (DeviceBatch { rows: Some(&[0, 1]), ..BATCH }, "rows: expected shape (num_seqs=3,), found (2,)"),
        (
            DeviceBatch { tree_mask: Some((&[0; 8], &[0, 8, 8, 16])), ..BATCH },
            "tree_mask_start_loc[3]: expected 8 or 160 more, within tree_mask, found 16",
        ),
    ];
    for (batch, message) in cases {
        let error = DeviceWork::new(&batch, &OPTIONS).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
