//! Random visits to a small cache, against a naive model of what may be evicted: every victim is a prefix that no cached
//! one continues, and under priorities one of the least wanted.

use std::collections::BTreeMap;
use std::sync::Arc;

use pagedkv_core::{CacheConfig, EvictionPolicy, KVCacheManager, Retention, SequenceId};
use proptest::prelude::*;

const USABLE: u32 = 7;

/// A cached prefix, by its tokens: one block each.
#[derive(Clone, Debug)]
struct Entry {
    holders: u32,
    wanted: Option<(u8, f64)>,
    released: f64,
}

impl Entry {
    fn priority(&self, now: f64) -> u8 {
        let holds = |&(_, seconds): &(u8, f64)| self.released + seconds > now;
        self.wanted.filter(holds).map_or(Retention::DEFAULT_PRIORITY, |(priority, _)| priority)
    }
}

struct World {
    manager: KVCacheManager,
    cached: BTreeMap<Vec<i32>, Entry>,
    live: Vec<(SequenceId, Vec<i32>)>,
    has_priorities: bool,
    now: f64,
}

impl World {
    fn new(eviction_policy: EvictionPolicy) -> Self {
        let config = CacheConfig { block_size: 1, eviction_policy, ..CacheConfig::new(USABLE + 1) };
        Self {
            manager: KVCacheManager::new(&config).unwrap(),
            cached: BTreeMap::new(),
            live: Vec::new(),
            has_priorities: eviction_policy == EvictionPolicy::Priority,
            now: 0.0,
        }
    }

    /// Computes a prompt block by block, so that one victim at most goes at a time; gives up where there is no room.
    fn visit(&mut self, prompt: &[i32], retention: Option<Retention>) {
        let retention = retention.filter(|_| self.has_priorities);
        let longer = [prompt, &[9]].concat();
        let sequence = self.manager.create(longer.into(), Arc::default(), true).unwrap();
        if let Some(retention) = retention {
            self.manager.retain(sequence, retention).unwrap();
        }
        let mut len = 0;
        while len < prompt.len() {
            let plan = self.manager.begin_plan();
            let hits = self.manager.get_computed_blocks(sequence).unwrap();
            let num_hit = hits.num_tokens() as usize;
            let expected = (len..prompt.len()).take_while(|&at| self.cached.contains_key(&prompt[..=at])).count();
            assert_eq!(num_hit, expected);
            // The hits are held before room is made.
            let is_done = len + num_hit == prompt.len();
            let grown = !is_done && self.manager.allocate_slots(sequence, 1, &hits).unwrap().is_some();
            if is_done || !grown {
                self.manager.rollback(plan).unwrap();
                break;
            }
            self.manager.commit(plan).unwrap();
            (len..len + num_hit).for_each(|at| self.take(&prompt[..=at], retention));
            len += num_hit + 1;
            self.note_victim(&prompt[..len]);
            self.take(&prompt[..len], retention);
        }
        self.live.push((sequence, prompt[..len].to_vec()));
    }

    fn take(&mut self, prefix: &[i32], retention: Option<Retention>) {
        let entry = Entry { holders: 0, wanted: None, released: self.now };
        let now = self.now;
        let entry = self.cached.entry(prefix.to_vec()).or_insert(entry);
        if entry.holders == 0 && entry.wanted.is_some() && entry.released + entry.wanted.unwrap().1 <= now {
            entry.wanted = None;
        }
        entry.holders += 1;
        let asked = retention.map(|retention| (retention.priority, retention.seconds));
        entry.wanted = match (entry.wanted, asked) {
            (Some(had), Some(asked)) if had.0 == asked.0 => Some((had.0, had.1.max(asked.1))),
            (Some(had), Some(asked)) => Some(if had.0 > asked.0 { had } else { asked }),
            (had, asked) => had.or(asked),
        };
    }

    /// Whatever the manager evicted for a new block is a leaf, and of the evictable leaves one with the lowest priority.
    fn note_victim(&mut self, new: &[i32]) {
        let is_full = self.cached.len() == USABLE as usize;
        let prefixes: Vec<_> = self.cached.keys().cloned().collect();
        let gone: Vec<_> = prefixes.into_iter().filter(|prefix| !self.is_cached(prefix)).collect();
        assert_eq!(gone.len(), usize::from(is_full), "for {new:?} of {:?}", self.cached);
        let leaves = |prefix: &Vec<i32>| {
            !self.cached.keys().any(|other| other.len() == prefix.len() + 1 && other.starts_with(prefix))
        };
        for victim in &gone {
            let entry = &self.cached[victim];
            assert!(entry.holders == 0 && leaves(victim), "{victim:?} of {:?}", self.cached);
            let others = self.cached.iter().filter(|(prefix, entry)| entry.holders == 0 && leaves(prefix));
            let lowest = others.map(|(_, entry)| entry.priority(self.now)).min().unwrap();
            assert!(!self.has_priorities || entry.priority(self.now) == lowest, "{victim:?} of {:?}", self.cached);
        }
        self.cached.retain(|prefix, _| !gone.contains(prefix));
    }

    fn is_cached(&mut self, prefix: &[i32]) -> bool {
        let longer = [prefix, &[9]].concat();
        let probe = self.manager.create(longer.into(), Arc::default(), true).unwrap();
        let found = self.manager.get_computed_blocks(probe).unwrap();
        self.manager.free(probe).unwrap();
        found.num_tokens() as usize == prefix.len()
    }

    fn free(&mut self, which: usize) {
        let (sequence, prompt) = self.live.swap_remove(which % self.live.len());
        self.manager.free(sequence).unwrap();
        for len in 1..=prompt.len() {
            let entry = self.cached.get_mut(&prompt[..len]).expect("what is held stays cached");
            entry.holders -= 1;
            entry.released = self.now;
        }
    }

    fn run(&mut self, [kind, a, b, c]: [u8; 4]) {
        match kind % 8 {
            0..4 if self.live.len() < 4 => {
                let prompt: Vec<_> = (0..=a % 4).map(|at| i32::from(b >> at & 1)).collect();
                let seconds = if c & 1 == 0 { f64::INFINITY } else { f64::from(c % 8) };
                let retention = Retention { priority: c % 5 * 20, seconds };
                self.visit(&prompt, Some(retention).filter(|_| c % 3 > 0));
            }
            0..7 if !self.live.is_empty() => self.free(usize::from(a)),
            _ => {
                self.now += f64::from(a % 4);
                self.manager.advance(self.now).unwrap();
            }
        }
        self.manager.check_integrity().unwrap_or_else(|broken| panic!("{broken}"));
    }
}

fn check(policy: EvictionPolicy, commands: Vec<[u8; 4]>) {
    let mut world = World::new(policy);
    commands.into_iter().for_each(|command| world.run(command));
    while !world.live.is_empty() {
        world.free(0);
    }
    assert_eq!(world.manager.pool().num_available(), USABLE);
}

fn commands() -> impl Strategy<Value = Vec<[u8; 4]>> {
    prop::collection::vec(any::<[u8; 4]>(), 0..150)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn lru_evicts_leaves_only(commands in commands()) {
        check(EvictionPolicy::Lru, commands);
    }

    #[test]
    fn segmented_lru_evicts_leaves_only(commands in commands()) {
        check(EvictionPolicy::SegmentedLru, commands);
    }

    #[test]
    fn priority_evicts_a_leaf_of_the_lowest_priority(commands in commands()) {
        check(EvictionPolicy::Priority, commands);
    }
}
