//! Batches of the manager: what the same calls one by one do, all of it or nothing.

#[path = "model/random.rs"]
#[allow(dead_code, reason = "every test crate uses its part")]
mod random;
mod scene;

use std::sync::Arc;

use pagedkv_core::{BatchSlots, ComputedBlocks, Error, Growths, Identity, KVCacheManager, SequenceId};
use random::{Random, two_tokens};
use scene::{compute, create, manager, num_hit_tokens, table};

const NOTHING: Growths<'static> = Growths { sequences: &[], num_new_tokens: &[], num_draft_tokens: &[], computed: &[] };

// --- against single calls

/// Two managers that are told the same, one in batches and one call by call.
struct Twins {
    batch: KVCacheManager,
    single: KVCacheManager,
    sequences: Vec<SequenceId>,
    num_refused: usize,
    num_grown: usize,
}

impl Twins {
    fn new(block_size: u32, usable: u32) -> Self {
        let make = || manager(block_size, usable);
        Self { batch: make(), single: make(), sequences: vec![], num_refused: 0, num_grown: 0 }
    }

    fn pick(&self, random: &mut Random) -> Vec<SequenceId> {
        self.sequences.iter().copied().filter(|_| random.below(2) > 0).collect()
    }

    fn check(&self, what: &str) {
        assert_eq!(format!("{:?}", self.batch), format!("{:?}", self.single), "after {what}");
        self.batch.check_integrity().unwrap();
    }

    fn create(&mut self, random: &mut Random) {
        let prompts: Vec<_> =
            (0..random.below(3)).map(|_| two_tokens(1 + random.below(7), random.next() as u8)).collect();
        let identity = Arc::new(Identity::default());
        let bounds = bounds(prompts.iter().map(Vec::len));
        let created = self.batch.create_batch(&prompts.concat(), &bounds, &identity, true).unwrap();
        for (prompt, id) in prompts.iter().zip(&created) {
            assert_eq!(self.single.create(prompt.as_slice().into(), identity.clone(), true), Ok(*id));
        }
        self.sequences.extend(created);
        self.check("create");
    }

    fn fork(&mut self, random: &mut Random) {
        let parents: Vec<_> = self.pick(random).into_iter().take(2).flat_map(|id| [id, id]).collect();
        let forked = self.batch.fork_batch(&parents).unwrap();
        for (&parent, &child) in parents.iter().zip(&forked) {
            assert_eq!(self.single.fork(parent), Ok(child));
        }
        self.sequences.extend(forked);
        self.check("fork");
    }

    fn truncate(&mut self, random: &mut Random) {
        for id in self.pick(random) {
            let num_tokens = 1 + random.below(self.batch.num_tokens(id).unwrap() as usize) as u32;
            self.batch.truncate(id, num_tokens).unwrap();
            self.single.truncate(id, num_tokens).unwrap();
        }
    }

    fn free(&mut self, random: &mut Random) {
        let freed = self.pick(random);
        self.batch.free_batch(&freed).unwrap();
        freed.iter().for_each(|&id| self.single.free(id).unwrap());
        self.sequences.retain(|id| !freed.contains(id));
        self.check("free");
    }

    /// Grows some sequences in a plan, tells their tokens, and ends it.
    fn step(&mut self, random: &mut Random, was_cut: bool) {
        let plan = self.batch.begin_plan();
        assert_eq!(self.single.begin_plan(), plan);
        let mut ids = self.pick(random);
        ids.retain(|&id| self.batch.num_tokens(id).unwrap() > self.batch.num_computed_tokens(id).unwrap());
        let open = |id: &SequenceId| self.batch.num_tokens(*id).unwrap() - self.batch.num_computed_tokens(*id).unwrap();
        let new: Vec<u32> = ids.iter().map(|id| 1 + random.below(open(id) as usize) as u32).collect();
        let drafts: Vec<u32> =
            ids.iter().zip(&new).map(|(id, &new)| if open(id) == new { random.below(3) as u32 } else { 0 }).collect();
        let growths = Growths { sequences: &ids, num_new_tokens: &new, num_draft_tokens: &drafts, ..NOTHING };
        let before = format!("{:?}", self.batch);
        let num_fit = self.batch.num_that_fit(&growths).unwrap();
        let slots = self.batch.allocate_slots_batch(&growths).unwrap();
        assert_eq!(slots.is_some(), num_fit == ids.len());
        if slots.is_none() {
            assert_eq!(format!("{:?}", self.batch), before, "no room, and something changed");
            self.num_refused += 1;
        }
        let some = Growths {
            sequences: &ids[..num_fit],
            num_new_tokens: &new[..num_fit],
            num_draft_tokens: &drafts[..num_fit],
            ..NOTHING
        };
        let slots = slots.unwrap_or_else(|| self.batch.allocate_slots_batch(&some).unwrap().expect("they fit"));
        self.grow_one_by_one(&some, &slots);
        if num_fit < ids.len() && !was_cut {
            let (id, new, drafts) = (ids[num_fit], new[num_fit], drafts[num_fit]);
            let none = self.single.allocate_slots_with_drafts(id, new, drafts, &ComputedBlocks::default());
            assert_eq!(none, Ok(None), "there was room for more");
        }
        self.check("growth");
        self.append(&some, random);
        if random.below(4) > 0 {
            self.batch.commit(plan).unwrap();
            self.single.commit(plan).unwrap();
        } else {
            self.batch.rollback(plan).unwrap();
            self.single.rollback(plan).unwrap();
        }
        self.check("the plan's end");
    }

    fn grow_one_by_one(&mut self, growths: &Growths<'_>, slots: &BatchSlots) {
        for (i, &id) in growths.sequences.iter().enumerate() {
            let before = table(&self.single, id);
            let (new, drafts) = (growths.num_new_tokens[i], growths.num_draft_tokens[i]);
            let answer = self.single.allocate_slots_with_drafts(id, new, drafts, &ComputedBlocks::default());
            let single = answer.unwrap().expect("the batch had room");
            let span = slots.query_start_loc[i] as usize..slots.query_start_loc[i + 1] as usize;
            assert_eq!(slots.slot_mapping[span], *single.slot_mapping);
            for copy in &single.copies {
                assert!(slots.copies.contains(&[copy.source.get() as i32, copy.target.get() as i32]));
            }
            let mut written: Vec<i32> = before.iter().map(|block| block.get() as i32).collect();
            for &[group, _, column, block] in slots.table_updates.iter().filter(|update| update[1] == i as i32) {
                assert_eq!(group, 0);
                written.resize(written.len().max(column as usize + 1), 0);
                written[column as usize] = block;
            }
            let now: Vec<i32> = table(&self.single, id).iter().map(|block| block.get() as i32).collect();
            assert_eq!(written, now, "the table updates of {id:?}");
            self.num_grown += 1;
        }
    }

    fn append(&mut self, growths: &Growths<'_>, random: &mut Random) {
        let accepted: Vec<u32> =
            growths.num_draft_tokens.iter().map(|&drafts| random.below(drafts as usize + 1) as u32).collect();
        let tokens: Vec<Vec<i32>> = accepted.iter().map(|&n| two_tokens(n as usize + 1, random.next() as u8)).collect();
        let bounds = bounds(tokens.iter().map(Vec::len));
        let ids = growths.sequences;
        self.batch.append_tokens_batch(ids, &tokens.concat(), &bounds, &accepted).unwrap();
        for ((&id, tokens), &accepted) in ids.iter().zip(&tokens).zip(&accepted) {
            self.single.append_accepted(id, tokens, accepted).unwrap();
        }
        self.check("append");
    }
}

fn bounds(lengths: impl Iterator<Item = usize>) -> Vec<i32> {
    let sums = lengths.scan(0, |sum, length| {
        *sum += length as i32;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

#[test]
fn batches_do_what_the_same_calls_do_one_by_one() {
    let (mut num_refused, mut num_grown) = (0, 0);
    for seed in 0..400 {
        let mut random = Random::new(0xba7c4 + seed);
        let mut twins = Twins::new(1 + random.below(3) as u32, 4 + random.below(12) as u32);
        let cuts = random.below(2) > 0;
        for _ in 0..25 {
            twins.create(&mut random);
            twins.step(&mut random, cuts);
            if random.below(2) > 0 {
                twins.fork(&mut random);
            }
            if cuts && random.below(3) == 0 {
                twins.truncate(&mut random);
            }
            if twins.sequences.len() > 5 {
                twins.free(&mut random);
            }
        }
        num_refused += twins.num_refused;
        num_grown += twins.num_grown;
    }
    assert!(num_refused > 300 && num_grown > 3000, "{num_refused} batches without room, {num_grown} growths");
}

// --- hits

/// A manager in whose cache are so many prefixes of a block and one token more, with a sequence of each.
fn cached_prefixes(usable: u32, count: i32) -> (KVCacheManager, Vec<SequenceId>) {
    let mut manager = manager(2, usable);
    (0..count).for_each(|i| drop(scene::cache(&mut manager, &[i, i, 7])));
    let sequences = (0..count).map(|i| create(&mut manager, &[i, i, 8])).collect();
    (manager, sequences)
}

#[test]
fn batch_takes_the_hits_of_all_its_sequences_when_the_first_one_needs_a_block() {
    // Four blocks are cached, none is free but one: growth evicts what nobody of the batch was told of.
    let (mut manager, sequences) = cached_prefixes(4, 2);
    scene::cache(&mut manager, &[9, 9]);
    let computed = manager.get_computed_blocks_batch(&sequences).unwrap();
    let hits: Vec<_> = computed.iter().map(|computed| computed.blocks()[0]).collect();
    let plan = manager.begin_plan();
    let growths = Growths { sequences: &sequences, num_new_tokens: &[1, 1], computed: &computed, ..NOTHING };
    manager.allocate_slots_batch(&growths).unwrap().expect("two hits and two new blocks");
    let firsts: Vec<_> = sequences.iter().map(|&sequence| table(&manager, sequence)[0]).collect();
    assert_eq!(firsts, hits);
    manager.commit(plan).unwrap();
    manager.check_integrity().unwrap();
}

#[test]
fn block_that_several_of_a_batch_hit_is_counted_once() {
    let mut manager = manager(2, 3);
    scene::cache(&mut manager, &[1, 1, 7]);
    let sequences = [create(&mut manager, &[1, 1, 8]), create(&mut manager, &[1, 1, 9])];
    let computed = manager.get_computed_blocks_batch(&sequences).unwrap();
    manager.begin_plan();
    let growths = Growths { sequences: &sequences, num_new_tokens: &[1, 1], computed: &computed, ..NOTHING };
    assert_eq!(manager.num_that_fit(&growths), Ok(2));
    assert!(manager.allocate_slots_batch(&growths).unwrap().is_some());
    assert_eq!(manager.pool().ref_count(computed[0].blocks()[0]), Ok(2));
}

#[test]
fn batch_without_room_leaves_its_hits_where_they_were() {
    let (mut manager, sequences) = cached_prefixes(3, 2);
    let computed = manager.get_computed_blocks_batch(&sequences).unwrap();
    manager.begin_plan();
    let before = format!("{manager:?}");
    let growths = Growths { sequences: &sequences, num_new_tokens: &[1, 1], computed: &computed, ..NOTHING };
    assert_eq!(manager.allocate_slots_batch(&growths), Ok(None));
    assert_eq!(format!("{manager:?}"), before);
    assert_eq!(num_hit_tokens(&manager, sequences[1]), 2);
}

#[test]
fn batch_refuses_hits_that_another_call_made_stale() {
    let (mut manager, sequences) = cached_prefixes(8, 2);
    let computed = manager.get_computed_blocks_batch(&sequences).unwrap();
    let other = create(&mut manager, &[3]);
    compute(&mut manager, other, 1);
    manager.begin_plan();
    let growths = Growths { sequences: &sequences, num_new_tokens: &[1, 1], computed: &computed, ..NOTHING };
    let stale = Error::InBatch { index: 0, error: Box::new(Error::StaleComputedBlocks) };
    assert_eq!(manager.allocate_slots_batch(&growths), Err(stale));
}

// --- mistakes

#[test]
fn mistake_in_a_batch_names_the_element_and_changes_nothing() {
    let mut manager = manager(2, 8);
    let [first, second] = [create(&mut manager, &[1, 2]), create(&mut manager, &[3])];
    let gone = create(&mut manager, &[4]);
    manager.free(gone).unwrap();
    manager.begin_plan();
    let before = format!("{manager:?}");
    let unknown = Error::UnknownSequence(gone.to_bits());
    let in_batch = |index, error| Error::InBatch { index, error: Box::new(error) };
    assert_eq!(manager.free_batch(&[first, gone]), Err(in_batch(1, unknown.clone())));
    assert_eq!(manager.fork_batch(&[first, gone]), Err(in_batch(1, unknown.clone())));
    assert_eq!(manager.append_tokens_batch(&[gone], &[1], &[0, 1], &[]), Err(in_batch(0, unknown)));
    let element = |argument, index| move |error| matches!(error, Error::InvalidElement { argument: a, index: i, .. } if a == argument && i == index);
    let twice = manager.free_batch(&[first, second, first]).unwrap_err();
    assert!(element("sequences", 2)(twice));
    let too_many = Growths { sequences: &[first, second], num_new_tokens: &[2, 2], ..NOTHING };
    assert!(element("num_new_tokens", 1)(manager.allocate_slots_batch(&too_many).unwrap_err()));
    let negative = manager.append_tokens_batch(&[first, second], &[1, -1], &[0, 1, 2], &[]).unwrap_err();
    assert!(element("token_ids", 1)(negative));
    let accepted = manager.append_tokens_batch(&[first, second], &[1, 1], &[0, 1, 2], &[0, 1]).unwrap_err();
    assert!(element("num_accepted", 1)(accepted));
    let backwards = manager.create_batch(&[1, 2], &[0, 2, 1], &Arc::default(), true).unwrap_err();
    assert!(element("start_loc", 2)(backwards));
    let empty = manager.create_batch(&[1, 2], &[0, 2, 2], &Arc::default(), true).unwrap_err();
    assert!(element("start_loc", 2)(empty));
    let short = Growths { sequences: &[first, second], num_new_tokens: &[1], ..NOTHING };
    let refused = manager.allocate_slots_batch(&short);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "num_new_tokens", .. })));
    assert_eq!(format!("{manager:?}"), before);
}

// --- tables for kernels

#[test]
fn tables_of_a_batch_are_written_in_its_order() {
    let mut manager = manager(2, 8);
    let [long, short] = [create(&mut manager, &[1, 2, 3]), create(&mut manager, &[4])];
    compute(&mut manager, long, 3);
    compute(&mut manager, short, 1);
    let ids = |id| table(&manager, id).iter().map(|block| block.get() as i32).collect::<Vec<_>>();
    let mut out = [-1; 6];
    manager.write_block_table(&[short, long], 0, 3, &mut out).unwrap();
    assert_eq!(out, [ids(short)[0], 0, 0, ids(long)[0], ids(long)[1], 0]);
    let (mut indptr, mut indices, mut last) = ([-1; 3], [-1; 4], [-1; 2]);
    assert_eq!(manager.write_csr(&[short, long], 0, &mut indptr, &mut indices, &mut last), Ok(3));
    assert_eq!((indptr, last), ([0, 1, 3], [1, 1]));
    assert_eq!(indices, [ids(short)[0], ids(long)[0], ids(long)[1], -1]);
}
