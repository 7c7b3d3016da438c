//! What can be asked of a scheduler at any time: counts, block tables, how far samples are.

use super::Scheduler;
use crate::error::{Error, Result, invalid};
use crate::ids::{BlockId, Handle};
use crate::kv_cache_manager::Sequence;

/// How far a sample is, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Known tokens, the prompt included.
    pub num_tokens: u32,
    /// Tokens whose keys and values are in its blocks, by plans that committed and transfers that ended.
    pub num_computed: u32,
    /// The same when every plan in flight has committed and its transfer has ended.
    pub num_scheduled: u32,
    /// How often its request lost its blocks.
    pub num_preemptions: u32,
}

impl Scheduler {
    /// Requests that were added and have not ended, sessions at rest left out.
    pub fn num_unfinished_requests(&self) -> usize {
        self.inbox.num_unfinished_requests()
    }

    /// Requests with seats, and requests that wait for them.
    pub fn num_requests(&self) -> (usize, usize) {
        (self.running.len(), self.num_unfinished_requests() - self.running.len())
    }

    /// Tokens of all resident sequences, those of plans in flight included. A block that several share counts for each.
    ///
    /// # Complexity
    /// O(resident sequences).
    pub fn num_resident_tokens(&self) -> u64 {
        self.resident_sequences().map(|sequence| u64::from(sequence.num_scheduled)).sum()
    }

    /// Blocks in the tables of all resident sequences, those that left a window left out. A block that several share counts
    /// for each.
    ///
    /// # Complexity
    /// O(resident sequences x cache groups).
    pub fn num_resident_blocks(&self) -> u64 {
        let tables = self.resident_sequences().flat_map(|sequence| &sequence.tables);
        tables.map(|table| u64::from(table.num_held())).sum()
    }

    fn resident_sequences(&self) -> impl Iterator<Item = &Sequence> {
        let samples = self.running.iter().flat_map(|&slot| &self.request(slot).samples);
        samples.filter_map(|sample| self.manager.sequences.get(sample.sequence as usize))
    }

    /// Preemptions since the scheduler was made.
    pub fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// Preemptions whose blocks went to the host tier.
    pub fn num_swaps(&self) -> u64 {
        self.num_swaps
    }

    /// The block table of a sample in the first cache group; `None` while it holds none.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that is not live, [`Error::InvalidArgument`] for a sample that it has not.
    ///
    /// # Complexity
    /// O(1).
    pub fn block_table(&self, handle: Handle, sample: u32) -> Result<Option<&[BlockId]>> {
        self.group_table(handle, sample, 0)
    }

    /// The block table of a sample in a cache group, the null block where a window needs none; `None` while it has none.
    ///
    /// # Errors
    /// As [`Self::block_table`]; [`Error::InvalidArgument`] also for a group that the pool has not.
    pub fn group_table(&self, handle: Handle, sample: u32, group: usize) -> Result<Option<&[BlockId]>> {
        let slot = self.by_handle.get(&handle).copied();
        // A request that is still in the inbox has its samples, and holds nothing.
        let n = slot.map(|slot| self.request(slot).samples.len() as u32).or_else(|| self.inbox.num_samples(handle));
        let n = n.ok_or(Error::UnknownHandle(handle))?;
        if sample >= n {
            return invalid("sequence", format!("0 to {}", n - 1), sample);
        }
        self.manager.check_group(group)?;
        let Some(slot) = slot else { return Ok(None) };
        let found = &self.request(slot).samples[sample as usize];
        let sequence = self.manager.sequences.get(found.sequence as usize);
        let table = sequence.map(|sequence| sequence.tables[group].blocks.as_slice());
        Ok(table.filter(|table| !table.is_empty()))
    }

    /// How far a sample is. While its request shares one sequence, that is the first live sample's, and the others have
    /// nothing of their own.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that is not live, [`Error::InvalidArgument`] for a sample that it has not.
    pub fn progress(&self, handle: Handle, sample: u32) -> Result<Progress> {
        let slot = *self.by_handle.get(&handle).ok_or(Error::UnknownHandle(handle))?;
        let request = self.request(slot);
        let Some(found) = request.samples.get(sample as usize) else {
            return invalid("sequence", format!("0 to {}", request.samples.len() - 1), sample);
        };
        let num_preemptions = request.num_preemptions;
        let none = Progress { num_tokens: request.prompt_len(), num_computed: 0, num_scheduled: 0, num_preemptions };
        Ok(self.manager.sequences.get(found.sequence as usize).map_or(none, |sequence| Progress {
            num_tokens: sequence.tokens.len(),
            num_computed: sequence.num_computed,
            num_scheduled: sequence.num_scheduled,
            num_preemptions,
        }))
    }
}
