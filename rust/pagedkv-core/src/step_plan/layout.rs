//! Where each array of a plan lies in its buffer: one table, a function of the sizes alone.

use bytemuck::{Pod, Zeroable};

/// Every array starts on a cache line.
pub const ALIGNMENT: usize = 64;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"pagedkv\x01");

/// Sizes of a plan's arrays; the first bytes of its buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Header {
    pub(crate) magic: u64,
    /// Number of the plan.
    pub plan_id: u64,
    /// The plan whose end the next work waits for; 0 for none.
    pub blocked_on: u64,
    /// Sequences, S.
    pub num_sequences: u32,
    /// Tokens, T.
    pub num_tokens: u32,
    /// Samples, M.
    pub num_samples: u32,
    /// Cache groups, G.
    pub num_groups: u32,
    pub(crate) num_table_updates: u32,
    pub(crate) num_copies: u32,
    pub(crate) num_swap_in: u32,
    pub(crate) num_swap_out: u32,
    pub(crate) num_loads: u32,
    pub(crate) num_slot_moves: u32,
    pub(crate) num_tree_mask_bytes: u32,
    pub(crate) num_change_bytes: u32,
    /// 1 if the plan has no tokens while there is work, and transfers are outstanding; else 0.
    pub(crate) waits_for_transfers: u32,
    pub(crate) reserved: [u32; 13],
}

const _: () = assert!(size_of::<Header>() == 2 * ALIGNMENT);

/// Type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// Unsigned bytes.
    U8,
    /// 32-bit integers.
    I32,
    /// 64-bit integers.
    I64,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

/// The arrays of a plan, in the order of the buffer: those of fixed size for given S, T, M and G first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// `(S)`: the request of each sequence.
    Handles,
    /// `(G, T)`: where each token's key and value go; -1 for padding.
    SlotMapping,
    /// `(S)`: which sample of its request each sequence is.
    Sequence,
    /// `(S)`: its row in the block table.
    Rows,
    /// `(T)`: input ids.
    TokenIds,
    /// `(T)`: their positions.
    Positions,
    /// `(T)`: -1, or the sample of the previous plan whose token goes here.
    InputFrom,
    /// `(S + 1)`: where each sequence's tokens start.
    QueryStartLoc,
    /// `(S)`: lengths after this step.
    SeqLens,
    /// `(M)`: the token from whose output each sample is drawn.
    SampleRows,
    /// `(S + 1)`: where each sequence's samples start.
    SampleStartLoc,
    /// `(S + 1)`: where each sequence's rows of the tree mask start, in bytes; sequences without a draft tree have none.
    TreeMaskStartLoc,
    /// `(G)`: blocks that every sequence of the plan shares.
    NumCommonPrefixBlocks,
    /// Packed bits of draft trees; see [`super::StepPlan::tree_mask_row_bytes`].
    TreeMask,
    /// `(k, 3)`: group, source slot, destination slot.
    SlotMoves,
    /// `(k)`: transfers of `SwapIn`.
    SwapInIds,
    /// `(k)`: transfers of `SwapOut`.
    SwapOutIds,
    /// `(k)`: transfers of `Loads`.
    LoadIds,
    /// `(k)`: the request of each of `Loads`.
    LoadHandles,
    /// `(k, 4)`: group, row, column, block.
    TableUpdates,
    /// `(k, 2)`: source and destination block.
    Copies,
    /// `(k, 2)`: host and device block.
    SwapIn,
    /// `(k, 2)`: device and host block.
    SwapOut,
    /// `(k, 3)`: group, column, block.
    Loads,
    /// The encoded lists of new, preempted and finished sequences.
    Changes,
}

impl Field {
    /// Every array, in the order of the buffer.
    pub const ALL: [Self; 25] = [
        Self::Handles,
        Self::SlotMapping,
        Self::Sequence,
        Self::Rows,
        Self::TokenIds,
        Self::Positions,
        Self::InputFrom,
        Self::QueryStartLoc,
        Self::SeqLens,
        Self::SampleRows,
        Self::SampleStartLoc,
        Self::TreeMaskStartLoc,
        Self::NumCommonPrefixBlocks,
        Self::TreeMask,
        Self::SlotMoves,
        Self::SwapInIds,
        Self::SwapOutIds,
        Self::LoadIds,
        Self::LoadHandles,
        Self::TableUpdates,
        Self::Copies,
        Self::SwapIn,
        Self::SwapOut,
        Self::Loads,
        Self::Changes,
    ];

    /// Type of the elements.
    pub const fn element_type(self) -> ElementType {
        match self {
            Self::Handles
            | Self::SlotMapping
            | Self::SlotMoves
            | Self::SwapInIds
            | Self::SwapOutIds
            | Self::LoadIds
            | Self::LoadHandles => ElementType::I64,
            Self::TreeMask | Self::Changes => ElementType::U8,
            _ => ElementType::I32,
        }
    }

    /// Rows and columns; arrays of one dimension have no columns.
    pub const fn shape(self, sizes: &Header) -> (usize, Option<usize>) {
        let (s, t, m) = (sizes.num_sequences as usize, sizes.num_tokens as usize, sizes.num_samples as usize);
        match self {
            Self::Handles | Self::Sequence | Self::Rows | Self::SeqLens => (s, None),
            Self::SlotMapping => (sizes.num_groups as usize, Some(t)),
            Self::TokenIds | Self::Positions | Self::InputFrom => (t, None),
            Self::QueryStartLoc | Self::SampleStartLoc | Self::TreeMaskStartLoc => (s + 1, None),
            Self::SampleRows => (m, None),
            Self::NumCommonPrefixBlocks => (sizes.num_groups as usize, None),
            Self::SlotMoves => (sizes.num_slot_moves as usize, Some(3)),
            Self::SwapInIds => (sizes.num_swap_in as usize, None),
            Self::SwapOutIds => (sizes.num_swap_out as usize, None),
            Self::LoadIds | Self::LoadHandles => (sizes.num_loads as usize, None),
            Self::TableUpdates => (sizes.num_table_updates as usize, Some(4)),
            Self::Copies => (sizes.num_copies as usize, Some(2)),
            Self::SwapIn => (sizes.num_swap_in as usize, Some(2)),
            Self::SwapOut => (sizes.num_swap_out as usize, Some(2)),
            Self::Loads => (sizes.num_loads as usize, Some(3)),
            Self::TreeMask => (sizes.num_tree_mask_bytes as usize, None),
            Self::Changes => (sizes.num_change_bytes as usize, None),
        }
    }

    const fn size_bytes(self, sizes: &Header) -> usize {
        let (rows, columns) = self.shape(sizes);
        let columns = match columns {
            Some(columns) => columns,
            None => 1,
        };
        rows * columns * self.element_type().size_bytes()
    }
}

/// Start and length in bytes of each array, and the length of the whole buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    spans: [(usize, usize); Field::ALL.len()],
    pub(super) total_bytes: usize,
}

impl Layout {
    pub(super) fn new(sizes: &Header) -> Self {
        let mut at = size_of::<Header>();
        let spans = Field::ALL.map(|field| {
            let span = (at, field.size_bytes(sizes));
            at = (at + span.1).next_multiple_of(ALIGNMENT);
            span
        });
        Self { spans, total_bytes: at }
    }

    pub(super) const fn span(&self, field: Field) -> (usize, usize) {
        self.spans[field as usize]
    }
}
