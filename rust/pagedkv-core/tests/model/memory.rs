//! Device memory that knows what it holds.

use std::collections::BTreeMap;

use pagedkv_core::Identity;

/// All that a key and a value depend on: the extra keys of the sequence and every token up to their own.
///
/// Histories are interned, so that equal numbers mean equal histories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct History(u32);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Start {
        lora_id: Option<i64>,
        cache_salt: Option<Vec<u8>>,
    },
    Token {
        token: i32,
        /// Of the image that the position stands for: its digest, its length, and the position within it.
        image: Option<(Vec<u8>, u32, u32)>,
    },
}

#[derive(Debug, Default)]
pub(crate) struct Histories {
    known: BTreeMap<(Option<History>, Step), History>,
    before: Vec<Option<History>>,
}

impl Histories {
    /// The histories of a sequence: entry `i` is that of its token `i`.
    pub(crate) fn of_tokens(&mut self, identity: &Identity, tokens: impl Iterator<Item = i32>) -> Vec<History> {
        let start = Step::Start {
            lora_id: identity.root.lora_id,
            cache_salt: identity.root.cache_salt.as_deref().map(<[u8]>::to_vec),
        };
        let mut history = self.intern(None, start);
        let mut histories = Vec::new();
        for (position, token) in (0..).zip(tokens) {
            let covering =
                |image: &&pagedkv_core::ImageSpan| (image.start..image.start + image.len).contains(&position);
            let image = identity.images.iter().find(covering);
            let image = image.map(|image| (image.digest.to_vec(), image.len, position - image.start));
            history = self.intern(Some(history), Step::Token { token, image });
            histories.push(history);
        }
        histories
    }

    /// Whether `longer` is `shorter` and something more.
    pub(crate) fn continues(&self, longer: History, shorter: History) -> bool {
        self.ancestors(longer).any(|history| history == shorter)
    }

    /// The last `len` histories up to `last`, latest first.
    pub(crate) fn back_from(&self, last: History, len: usize) -> impl Iterator<Item = History> {
        std::iter::once(last).chain(self.ancestors(last)).take(len)
    }

    fn ancestors(&self, history: History) -> impl Iterator<Item = History> {
        std::iter::successors(self.before[history.0 as usize], |&earlier| self.before[earlier.0 as usize])
    }

    fn intern(&mut self, before: Option<History>, step: Step) -> History {
        let next = History(self.before.len() as u32);
        let history = *self.known.entry((before, step)).or_insert(next);
        if history == next {
            self.before.push(before);
        }
        history
    }
}

/// The slots of every block, each with the history of what was last written there; `None` where nothing ever was.
#[derive(Debug)]
pub(crate) struct Memory {
    block_size: usize,
    slots: Vec<Option<History>>,
}

impl Memory {
    pub(crate) fn new(num_blocks: usize, block_size: usize) -> Self {
        Self { block_size, slots: vec![None; num_blocks * block_size] }
    }

    /// What a device does for a plan: the copies, in any order, and then the writes, in any order.
    pub(crate) fn run(&mut self, copies: &[(usize, usize)], writes: &[(usize, History)]) {
        for (i, &(source, target)) in copies.iter().enumerate() {
            for &(other_source, other_target) in &copies[i + 1..] {
                let independent = target != other_target && target != other_source && source != other_target;
                assert!(independent, "the copies of a plan depend on their order: {copies:?}");
            }
            let source = source * self.block_size;
            self.slots.copy_within(source..source + self.block_size, target * self.block_size);
        }
        for (i, &(slot, history)) in writes.iter().enumerate() {
            let written_once = writes[i + 1..].iter().all(|&(other, _)| other != slot);
            assert!(written_once, "slot {slot} is written twice by one plan");
            self.slots[slot] = Some(history);
        }
    }

    pub(crate) fn slot(&self, slot: usize) -> Option<History> {
        self.slots[slot]
    }

    /// What a kernel reads at `position` through `table`.
    pub(crate) fn read(&self, table: &[usize], position: usize) -> Option<History> {
        self.slots[table[position / self.block_size] * self.block_size + position % self.block_size]
    }
}
