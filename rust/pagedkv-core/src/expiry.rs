//! Priorities of cached blocks that hold for a time only.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::error::{Result, reserve};
use crate::ids::BlockId;

/// Points in time that are not negative sort like their bits.
type Moment = u64;

/// "Never".
const NEVER: Moment = Moment::MAX;

#[derive(Clone, Copy, Debug)]
struct Record {
    /// How long the priority holds after the block's release, and when that ends.
    seconds: f64,
    end: Moment,
}

const FOREVER: Record = Record { seconds: f64::INFINITY, end: NEVER };

/// Times for every block of a pool, and the evictable ones in the order in which they fall due.
#[derive(Debug)]
pub(crate) struct Expiry {
    records: Vec<Record>,
    queue: BTreeSet<(Moment, BlockId)>,
}

impl Expiry {
    pub(crate) fn new(num_blocks: usize) -> Result<Self> {
        let mut records = reserve("times of expiry", num_blocks)?;
        records.resize(num_blocks, FOREVER);
        Ok(Self { records, queue: BTreeSet::new() })
    }

    /// A request asks to keep a block for a time; `ordering` compares the priority so far with the one that it asks for.
    pub(crate) fn retain(&mut self, block: BlockId, ordering: Ordering, seconds: f64) {
        let record = &mut self.records[block.index()];
        match ordering {
            Ordering::Less => record.seconds = seconds,
            Ordering::Equal => record.seconds = record.seconds.max(seconds),
            Ordering::Greater => {}
        }
    }

    /// How long the block's priority holds after its release.
    pub(crate) fn seconds(&self, block: BlockId) -> f64 {
        self.records[block.index()].seconds
    }

    pub(crate) fn reset(&mut self, block: BlockId) {
        self.records[block.index()] = FOREVER;
    }

    /// The block was released: the time of its priority runs.
    pub(crate) fn start(&mut self, block: BlockId, now: f64) {
        let record = &mut self.records[block.index()];
        if record.seconds.is_finite() {
            record.end = (now + record.seconds).to_bits();
            self.queue.insert((record.end, block));
        }
    }

    /// The block is held again, or holds something else.
    pub(crate) fn stop(&mut self, block: BlockId) {
        let end = std::mem::replace(&mut self.records[block.index()].end, NEVER);
        if end != NEVER {
            self.queue.remove(&(end, block));
        }
    }

    /// The next block whose priority ends by `now`.
    pub(crate) fn pop(&mut self, now: f64) -> Option<BlockId> {
        let &(end, block) = self.queue.first()?;
        if end > now.to_bits() {
            return None;
        }
        self.queue.pop_first();
        self.records[block.index()] = FOREVER;
        Some(block)
    }
}
