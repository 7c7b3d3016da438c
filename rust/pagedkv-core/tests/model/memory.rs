//! Device memory that knows what it holds.

use std::collections::BTreeMap;

use pagedkv_core::{CacheConfig, GroupSpec, Identity};

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

/// What the model knows of a cache group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) block_size: usize,
    /// Tokens that a query sees, itself included.
    pub(crate) window: Option<usize>,
}

/// Cache groups that worlds draw from: multiples of the smallest block size, and windows in tokens.
pub(crate) const GROUP_SHAPES: [&[(usize, Option<usize>)]; 7] = [
    &[(1, None)],
    &[(1, Some(3))],
    &[(1, Some(4)), (1, None)],
    &[(1, None), (2, Some(3)), (1, Some(5))],
    &[(2, None), (1, Some(2))],
    &[(3, None), (2, None), (1, None)],
    &[(1, Some(1)), (3, Some(6))],
];

impl Group {
    /// The groups of one of the shapes.
    pub(crate) fn shaped(shape: usize, block_size: usize) -> Vec<Self> {
        let group = |&(multiple, window)| Self { block_size: multiple * block_size, window };
        GROUP_SHAPES[shape].iter().map(group).collect()
    }

    /// The first position that a query at `position` sees.
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Columns that no query at `position` or behind it sees.
    pub(crate) fn columns_before(&self, position: usize) -> usize {
        self.first_seen(position) / self.block_size
    }

    /// The columns that a query at `position` needs of `start..position`.
    pub(crate) fn columns_needed(&self, start: usize, position: usize) -> std::ops::Range<usize> {
        let first = self.columns_before(position).max(start / self.block_size);
        first..(position / self.block_size).max(first)
    }

    /// Where a position lies, through a block table.
    pub(crate) fn place(&self, group: usize, table: &[usize], position: usize) -> Place {
        Place { group, block: table[position / self.block_size], offset: position % self.block_size }
    }
}

/// The cache groups of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups {
    all: [Group; 3],
    len: usize,
}

impl Groups {
    pub(crate) fn new(groups: &[Group]) -> Self {
        let all = std::array::from_fn(|i| groups[i.min(groups.len() - 1)]);
        Self { all, len: groups.len() }
    }

    /// Whether a prefix of so many tokens is whole blocks in every group.
    pub(crate) fn are_whole_at(&self, num_tokens: usize) -> bool {
        self.iter().all(|group| num_tokens.is_multiple_of(group.block_size))
    }
}

impl std::ops::Deref for Groups {
    type Target = [Group];

    fn deref(&self) -> &[Group] {
        &self.all[..self.len]
    }
}

/// A pool with these groups, of one layer each; the narrower a token, the larger the blocks.
pub(crate) fn cache_config(groups: &[Group], num_blocks: usize) -> CacheConfig {
    let smallest = groups.iter().map(|group| group.block_size).min().expect("at least one group");
    let spec = |(layer, group): (u32, &Group)| GroupSpec {
        layers: vec![layer],
        // A multiple of all that block sizes are multiplied by.
        head_dim: (12 * smallest / group.block_size) as u32,
        sliding_window: group.window.map(|window| window as u32),
        ..GroupSpec::new(0, 1, 0, "float16")
    };
    let groups = (0..).zip(groups).map(spec).collect();
    CacheConfig { block_size: smallest as u32, groups, ..CacheConfig::new(num_blocks as u32) }
}

/// A token's place in a block of a group. Blocks of all groups have the same bytes, so what one group wrote means nothing
/// to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) group: usize,
    pub(crate) block: usize,
    pub(crate) offset: usize,
}

/// The place of a block that is outside, among those of the host tier: it belongs to a request's column in a group.
pub(crate) fn outside_place(handle: i64, group: usize, column: usize) -> usize {
    OUTSIDE + (handle as usize * GROUP_SHAPES.len() + group) * 64 + column
}

const OUTSIDE: usize = 1 << 40;

/// Whose block a place is, if it is outside.
pub(crate) fn owner_outside(place: usize) -> Option<i64> {
    let place = place.checked_sub(OUTSIDE)?;
    Some((place / 64 / GROUP_SHAPES.len()) as i64)
}

/// The slots of every block, each with the history of what was last written there; `None` where nothing ever was.
#[derive(Debug)]
pub(crate) struct Memory {
    /// By block: the group that wrote there last, and its slots.
    blocks: Vec<(usize, Vec<Option<History>>)>,
    host: Vec<(usize, Vec<Option<History>>)>,
    /// What others computed, by its place.
    outside: BTreeMap<usize, (usize, Vec<Option<History>>)>,
    /// Transfers that were started and have not ended.
    transfers: BTreeMap<i64, Transfer>,
    last_started: i64,
}

/// Copies of whole blocks that go on while plans run.
#[derive(Clone, Debug)]
struct Transfer {
    is_out: bool,
    /// Device and host block.
    pairs: Vec<(usize, usize)>,
}

impl Memory {
    pub(crate) fn new(num_blocks: usize, groups: &[Group]) -> Self {
        let largest = groups.iter().map(|group| group.block_size).max().expect("at least one group");
        let blocks = vec![(0, vec![None; largest]); num_blocks];
        Self { blocks, host: Vec::new(), outside: BTreeMap::new(), transfers: BTreeMap::new(), last_started: 0 }
    }

    pub(crate) fn add_host_blocks(&mut self, num_blocks: usize) {
        self.host = vec![(0, vec![None; self.blocks[0].1.len()]); num_blocks];
    }

    /// What a block outside has in its slots.
    pub(crate) fn put_outside(&mut self, place: usize, group: usize, slots: impl Iterator<Item = Option<History>>) {
        let num_slots = self.blocks[0].1.len();
        let slots = slots.chain(std::iter::repeat(None)).take(num_slots).collect();
        self.outside.insert(place, (group, slots));
    }

    /// Starts a transfer of (device, host) blocks, unless it was started before. What it writes to holds nothing that can be
    /// relied on until it ends.
    pub(crate) fn start_transfer(&mut self, id: i64, is_out: bool, pairs: Vec<(usize, usize)>) {
        if id <= self.last_started {
            return;
        }
        for &(device, host) in &pairs {
            for other in self.transfers.values() {
                let apart = |&(other_device, other_host): &(usize, usize)| {
                    host != other_host && (device != other_device || is_out && other.is_out)
                };
                assert!(other.pairs.iter().all(apart), "transfer {id} of {pairs:?} meets {other:?}");
            }
            let to = if is_out { &mut self.host[host] } else { &mut self.blocks[device] };
            to.1.fill(None);
        }
        self.transfers.insert(id, Transfer { is_out, pairs });
    }

    pub(crate) fn note_started(&mut self, id: i64) {
        self.last_started = self.last_started.max(id);
    }

    pub(crate) fn started(&self) -> Vec<i64> {
        self.transfers.keys().copied().collect()
    }

    /// Ends a transfer: only now is anything read.
    pub(crate) fn end_transfer(&mut self, id: i64, ok: bool) {
        let transfer = self.transfers.remove(&id).expect("a transfer that was started");
        for (device, host) in transfer.pairs.into_iter().filter(|_| ok) {
            let device = &mut self.blocks[device];
            if let Some(outside) = self.outside.get(&host) {
                device.clone_from(outside);
                continue;
            }
            let host = &mut self.host[host];
            if transfer.is_out { host.clone_from(device) } else { device.clone_from(host) }
        }
    }

    fn assert_untouched(&self, block: usize) {
        let touches = |transfer: &&Transfer| transfer.pairs.iter().any(|&(device, _)| device == block);
        let found = self.transfers.values().find(touches);
        assert!(found.is_none(), "block {block} is written during {found:?}");
    }

    /// What a device does for a plan: the copies, in any order, and then the writes, in any order.
    pub(crate) fn run(&mut self, copies: &[(usize, usize)], writes: &[(Place, History)]) {
        for (i, &(source, target)) in copies.iter().enumerate() {
            for &(other_source, other_target) in &copies[i + 1..] {
                let independent = target != other_target && target != other_source && source != other_target;
                assert!(independent, "the copies of a plan depend on their order: {copies:?}");
            }
            assert!(source > 0 && target > 0, "the null block is copied");
            self.assert_untouched(target);
            self.blocks[target] = self.blocks[source].clone();
        }
        for (i, &(place, history)) in writes.iter().enumerate() {
            let written_once = writes[i + 1..].iter().all(|&(other, _)| other != place);
            assert!(written_once && place.block > 0, "{place:?} is written twice by one plan, or is none");
            self.assert_untouched(place.block);
            let (group, slots) = &mut self.blocks[place.block];
            if std::mem::replace(group, place.group) != place.group {
                slots.fill(None);
            }
            slots[place.offset] = Some(history);
        }
    }

    /// What a device does first: all sources are read before any destination is written.
    pub(crate) fn move_slots(&mut self, moves: &[(Place, Place)]) {
        let read: Vec<_> = moves.iter().map(|&(source, _)| self.read(source)).collect();
        for (i, (&(_, target), read)) in moves.iter().zip(read).enumerate() {
            let once = moves[i + 1..].iter().all(|&(_, other)| other != target);
            assert!(once && target.block > 0, "{target:?} is moved to twice, or is none");
            let (group, slots) = &mut self.blocks[target.block];
            assert_eq!(*group, target.group, "{target:?} is in a block of another group");
            slots[target.offset] = read;
        }
    }

    /// What a kernel of the place's group reads there.
    pub(crate) fn read(&self, place: Place) -> Option<History> {
        let (group, slots) = &self.blocks[place.block];
        slots[place.offset].filter(|_| *group == place.group && place.block > 0)
    }
}
