//! What somebody far away knows of the cache who sees nothing but its events.

use std::collections::BTreeSet;

use pagedkv_core::{BlockHash, KVCacheEvent, KVCacheManager, KVCacheSnapshot, KVEventBatch, Scheduler};

use super::events::Events;

/// Prefixes that can be hit: hash and group.
pub(crate) type Known = BTreeSet<(BlockHash, u32)>;

#[derive(Debug, Default)]
pub(crate) struct Mirror {
    pub(crate) known: Known,
    /// Number of the event to come.
    next: u64,
}

impl Mirror {
    pub(crate) fn joining(snapshot: &KVCacheSnapshot) -> Self {
        let mut mirror = Self { known: Known::new(), next: snapshot.next_sequence_number };
        // Of a prefix whose end a plan in flight names, the beginning may be gone.
        snapshot.events.iter().for_each(|event| mirror.apply(event, true, &mut Events::default()));
        mirror
    }

    /// Takes a batch in, as far as it is news; numbers have no gap but where events are said to be lost.
    pub(crate) fn take(&mut self, batch: &KVEventBatch, met: &mut Events) {
        let first = batch.sequence_number;
        assert!(first <= self.next || batch.num_lost >= first - self.next, "events are missing before {batch:?}");
        met.note("lost events", batch.num_lost);
        for (event, number) in batch.events.iter().zip(first..) {
            if number >= self.next {
                self.apply(event, batch.num_lost > 0, met);
                self.next = number + 1;
                met.note("events", 1);
            }
        }
        self.next = self.next.max(first);
    }

    fn apply(&mut self, event: &KVCacheEvent, may_be_orphan: bool, met: &mut Events) {
        match event {
            KVCacheEvent::BlockStored(stored) => {
                let group = stored.group_idx;
                // What a window group's block continues may have left the window.
                let is_orphan = stored.parent_block_hash.is_some_and(|parent| !self.known.contains(&(parent, group)));
                met.note("stored behind a window", u64::from(is_orphan));
                let may_be = may_be_orphan || stored.sliding_window.is_some();
                assert!(!is_orphan || may_be, "a prefix is stored and what it continues is not: {stored:?}");
                assert_eq!(stored.token_ids.len(), stored.block_hashes.len() * stored.block_size as usize);
                assert_eq!(stored.extra_keys.len(), stored.block_hashes.len());
                for &hash in &stored.block_hashes {
                    assert!(self.known.insert((hash, group)), "{hash:?} is stored twice");
                }
            }
            KVCacheEvent::BlockRemoved(removed) => {
                for &hash in &removed.block_hashes {
                    assert!(self.known.remove(&(hash, removed.group_idx)), "{hash:?} is removed and was not stored");
                }
            }
            KVCacheEvent::AllBlocksCleared => self.known.clear(),
        }
    }
}

/// What tells events.
pub(crate) trait Source {
    fn batch(&mut self) -> KVEventBatch;
    fn snapshot(&mut self) -> KVCacheSnapshot;
}

macro_rules! sources {
    ($($kind:ty)*) => {$(
        impl Source for $kind {
            fn batch(&mut self) -> KVEventBatch {
                self.take_events().expect("events are on")
            }

            fn snapshot(&mut self) -> KVCacheSnapshot {
                self.event_snapshot().expect("events are on")
            }
        }
    )*};
}
sources!(KVCacheManager Scheduler);

/// A mirror from the start and one that joined late, beside the real cache.
#[derive(Debug, Default)]
pub(crate) struct Mirrors {
    first: Mirror,
    late: Option<Mirror>,
    num_turns: u64,
}

impl Mirrors {
    /// After a command: now and then a mirror joins, and now and then the events are taken and all must agree.
    pub(crate) fn follow(&mut self, source: &mut impl Source, met: &mut Events) -> Option<&Known> {
        self.num_turns += 1;
        if self.num_turns.is_multiple_of(7) {
            self.late = Some(Mirror::joining(&source.snapshot()));
        }
        if !self.num_turns.is_multiple_of(3) && !self.num_turns.is_multiple_of(5) {
            return None;
        }
        let batch = source.batch();
        self.first.take(&batch, met);
        if let Some(late) = &mut self.late {
            late.take(&batch, met);
            assert_eq!(late.known, self.first.known, "who joined late and who did not");
        }
        Some(&self.first.known)
    }
}
