//! What to run in one step: flat arrays in one buffer, as kernels read them.
//!
//! All arrays lie in one buffer that starts with its own sizes, so a plan travels to another process, or to a device,
//! as one copy and is rebuilt there by [`StepPlan::from_buffer`]. Buffers are recycled when the plan is dropped.

mod changes;
mod layout;

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};

pub(crate) use changes::encode as encode_changes;
pub use changes::{Change, Changes};
pub use layout::{ALIGNMENT, ElementType, Field, Header};
use layout::{Layout, MAGIC};

use crate::error::{Result, invalid, reserve};
use crate::ids::PlanId;

/// Buffers that wait for the next plan; more are given back to the system.
const MAX_SPARE_BUFFERS: usize = 8;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ALIGNMENT]);

/// Buffers of plans that are gone.
#[derive(Clone, Default)]
pub(crate) struct BufferPool(Arc<Mutex<Vec<Vec<Line>>>>);

impl BufferPool {
    fn take(&self) -> Vec<Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn give_back(&self, buffer: Vec<Line>) {
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < MAX_SPARE_BUFFERS {
            spare.push(buffer);
        }
    }
}

impl std::fmt::Debug for BufferPool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("BufferPool")
    }
}

/// One step's plan. It never changes once made.
pub struct StepPlan {
    lines: Vec<Line>,
    layout: Layout,
    pool: BufferPool,
}

impl StepPlan {
    /// A plan with arrays of these sizes, all zero.
    pub(crate) fn with_sizes(mut sizes: Header, pool: &BufferPool) -> Self {
        sizes.magic = MAGIC;
        let layout = Layout::new(&sizes);
        let mut lines = pool.take();
        lines.clear();
        lines.resize(layout.total_bytes / ALIGNMENT, Line([0; ALIGNMENT]));
        let mut plan = Self { lines, layout, pool: pool.clone() };
        plan.bytes_mut()[..size_of::<Header>()].copy_from_slice(bytemuck::bytes_of(&sizes));
        plan
    }

    /// Rebuilds a plan from the bytes of another's [`Self::buffer`].
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for bytes that are not a whole plan of this version.
    ///
    /// # Complexity
    /// O(bytes).
    pub fn from_buffer(bytes: &[u8]) -> Result<Self> {
        let expected = "the whole buffer of a step plan of this version";
        let Some(head) = bytes.get(..size_of::<Header>()) else {
            return invalid("buffer", expected, format!("{} bytes", bytes.len()));
        };
        let sizes: Header = bytemuck::pod_read_unaligned(head);
        if sizes.magic != MAGIC {
            return invalid("buffer", expected, format!("a first word of {:#018x}", sizes.magic));
        }
        let counts: &[u32] = bytemuck::cast_slice(&bytemuck::bytes_of(&sizes)[24..]);
        let too_many = counts.iter().any(|&count| count as usize > bytes.len());
        if too_many || Layout::new(&sizes).total_bytes != bytes.len() {
            return invalid("buffer", expected, format!("{} bytes", bytes.len()));
        }
        let mut plan = Self::with_sizes(sizes, &BufferPool::default());
        plan.bytes_mut().copy_from_slice(bytes);
        changes::decode(plan.bytes(Field::Changes))?;
        Ok(plan)
    }

    /// A copy with arrays of at least as many sequences, tokens and samples, the rest padded so that kernels skip it:
    /// rows 0, slots -1, lengths 0, `input_from` -1, `sample_rows` 0, the start arrays repeating their last value.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a size below the plan's own.
    ///
    /// # Complexity
    /// O(bytes of the copy).
    pub fn pad_to(&self, sequences: u32, tokens: u32, samples: u32) -> Result<Self> {
        let own = self.sizes();
        for (argument, size, least) in [
            ("sequences", sequences, own.num_sequences),
            ("tokens", tokens, own.num_tokens),
            ("samples", samples, own.num_samples),
        ] {
            if size < least || size > i32::MAX as u32 {
                return invalid(argument, format!("{least} to 2^31 - 1"), size);
            }
        }
        let sizes = Header { num_sequences: sequences, num_tokens: tokens, num_samples: samples, ..own };
        drop(reserve::<Line>("the padded plan", Layout::new(&sizes).total_bytes / ALIGNMENT)?);
        let mut padded = Self::with_sizes(sizes, &self.pool);
        for field in Field::ALL {
            if field == Field::SlotMapping {
                continue;
            }
            let source = self.bytes(field);
            padded.bytes_of_mut(field)[..source.len()].copy_from_slice(source);
        }
        let (own_tokens, tokens) = (own.num_tokens as usize, tokens as usize);
        padded.i64s_mut(Field::SlotMapping).fill(-1);
        for group in 0..own.num_groups as usize {
            let source = &self.i64s(Field::SlotMapping)[group * own_tokens..][..own_tokens];
            padded.i64s_mut(Field::SlotMapping)[group * tokens..][..own_tokens].copy_from_slice(source);
        }
        padded.i64s_mut(Field::Handles)[own.num_sequences as usize..].fill(-1);
        padded.i32s_mut(Field::InputFrom)[own_tokens..].fill(-1);
        padded.i32s_mut(Field::QueryStartLoc)[own.num_sequences as usize..].fill(own.num_tokens as i32);
        padded.i32s_mut(Field::SampleStartLoc)[own.num_sequences as usize..].fill(own.num_samples as i32);
        let mask_end = own.num_tree_mask_bytes as i32;
        padded.i32s_mut(Field::TreeMaskStartLoc)[own.num_sequences as usize..].fill(mask_end);
        Ok(padded)
    }

    /// Bytes of a row of the tree mask, for a sequence that runs so many tokens: its bits in whole 64-bit words.
    ///
    /// A sequence with a draft tree has one row for each of its tokens. Bit `k` of a row, counted from the lowest bit of
    /// its first byte on, tells whether the token sees the `k`-th token of the same sequence in this step.
    pub const fn tree_mask_row_bytes(num_tokens: usize) -> usize {
        num_tokens.div_ceil(64) * 8
    }

    /// Number of the plan.
    pub fn id(&self) -> PlanId {
        PlanId::new(self.sizes().plan_id)
    }

    /// The plan whose end unfinished work waits for, where this plan is empty for that reason.
    pub fn blocked_on(&self) -> Option<PlanId> {
        Some(self.sizes().blocked_on).filter(|&plan| plan != 0).map(PlanId::new)
    }

    /// Whether this plan has no tokens while there is work, and transfers are outstanding, those of this plan included:
    /// work may go on when they end.
    pub fn waits_for_transfers(&self) -> bool {
        self.sizes().waits_for_transfers != 0
    }

    /// Sizes of the arrays.
    pub fn sizes(&self) -> Header {
        bytemuck::pod_read_unaligned(&self.buffer()[..size_of::<Header>()])
    }

    /// The whole plan as bytes; starts on a cache line.
    pub fn buffer(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }

    /// The lists of new, preempted and finished sequences.
    ///
    /// # Panics
    /// Never: the encoding is checked when a plan is made.
    ///
    /// # Complexity
    /// O(bytes of the lists).
    pub fn changes(&self) -> Changes {
        changes::decode(self.bytes(Field::Changes)).expect("the changes were checked when the plan was made")
    }

    /// An array of bytes, or the bytes of any array.
    pub fn bytes(&self, field: Field) -> &[u8] {
        let (start, len) = self.layout.span(field);
        &self.buffer()[start..start + len]
    }

    /// An array of 32-bit integers, row by row.
    ///
    /// # Panics
    /// If `field` has another element type.
    pub fn i32s(&self, field: Field) -> &[i32] {
        assert!(field.element_type() == ElementType::I32, "{field:?} is not an array of 32-bit integers");
        bytemuck::cast_slice(self.bytes(field))
    }

    /// An array of 64-bit integers, row by row.
    ///
    /// # Panics
    /// If `field` has another element type.
    pub fn i64s(&self, field: Field) -> &[i64] {
        assert!(field.element_type() == ElementType::I64, "{field:?} is not an array of 64-bit integers");
        bytemuck::cast_slice(self.bytes(field))
    }

    pub(crate) fn i32s_mut(&mut self, field: Field) -> &mut [i32] {
        bytemuck::cast_slice_mut(self.bytes_of_mut(field))
    }

    pub(crate) fn i64s_mut(&mut self, field: Field) -> &mut [i64] {
        bytemuck::cast_slice_mut(self.bytes_of_mut(field))
    }

    pub(crate) fn bytes_of_mut(&mut self, field: Field) -> &mut [u8] {
        let (start, len) = self.layout.span(field);
        &mut self.bytes_mut()[start..start + len]
    }

    /// The arrays that are written sequence by sequence, side by side.
    pub(crate) fn arrays_mut(&mut self) -> Arrays<'_> {
        let span = |field| {
            let (start, len) = self.layout.span(field);
            start..start + len
        };
        let spans = [
            Field::Handles,
            Field::SlotMapping,
            Field::Sequence,
            Field::Rows,
            Field::TokenIds,
            Field::Positions,
            Field::InputFrom,
            Field::QueryStartLoc,
            Field::SeqLens,
            Field::SampleRows,
            Field::SampleStartLoc,
        ]
        .map(span);
        let arrays = self.bytes_mut().get_disjoint_mut(spans).expect("the arrays of a plan do not overlap");
        let [handles, slots, sequence, rows, ids, positions, input_from, queries, seq_lens, sample_rows, samples] =
            arrays;
        Arrays {
            handles: bytemuck::cast_slice_mut(handles),
            slot_mapping: bytemuck::cast_slice_mut(slots),
            sequence: bytemuck::cast_slice_mut(sequence),
            rows: bytemuck::cast_slice_mut(rows),
            token_ids: bytemuck::cast_slice_mut(ids),
            positions: bytemuck::cast_slice_mut(positions),
            input_from: bytemuck::cast_slice_mut(input_from),
            query_start_loc: bytemuck::cast_slice_mut(queries),
            seq_lens: bytemuck::cast_slice_mut(seq_lens),
            sample_rows: bytemuck::cast_slice_mut(sample_rows),
            sample_start_loc: bytemuck::cast_slice_mut(samples),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }
}

/// The arrays of a plan that are written sequence by sequence; see [`Field`].
pub(crate) struct Arrays<'a> {
    pub(crate) handles: &'a mut [i64],
    pub(crate) slot_mapping: &'a mut [i64],
    pub(crate) sequence: &'a mut [i32],
    pub(crate) rows: &'a mut [i32],
    pub(crate) token_ids: &'a mut [i32],
    pub(crate) positions: &'a mut [i32],
    pub(crate) input_from: &'a mut [i32],
    pub(crate) query_start_loc: &'a mut [i32],
    pub(crate) seq_lens: &'a mut [i32],
    pub(crate) sample_rows: &'a mut [i32],
    pub(crate) sample_start_loc: &'a mut [i32],
}

impl Drop for StepPlan {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.lines));
    }
}

impl std::fmt::Debug for StepPlan {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("StepPlan").field("sizes", &self.sizes()).finish_non_exhaustive()
    }
}
