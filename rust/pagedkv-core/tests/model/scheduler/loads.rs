//! Requests of whose prompts a prefix is outside.

use pagedkv_core::{Handle, Scheduler};

use super::super::device::Told;
use super::super::memory::{outside_place, owner_outside};
use super::SchedulerModel;
use super::transfers::Swapped;

/// Whether a transfer is a load of this request.
pub(super) fn is_load_of(handle: Handle, told: &Told) -> bool {
    told.2.iter().all(|&(_, place)| owner_outside(place) == Some(handle.get()))
}

impl SchedulerModel {
    /// A request that has nothing asks for a prefix of its prompt, which lies outside as whoever computed it left it.
    pub(super) fn come_from_outside(&mut self, at: usize) {
        let request = &mut self.requests[at];
        assert!(!request.is_keeper(), "{:?} has blocks of its own", request.handle);
        let num_external = std::mem::take(&mut request.num_external);
        let lens = vec![num_external; request.samples.len()];
        let residence = request.residence;
        request.swapped = Some(Swapped { residence, has_parted: false, lens, is_short: false });
        let (handle, asked) = (request.handle, request.asked.clone());
        let mut histories = self.histories.of_tokens(&asked.identity, asked.prompt_token_ids.iter().copied());
        histories.truncate(num_external);
        for (group, spec) in self.limits.groups.iter().enumerate() {
            for (column, slots) in histories.chunks(spec.block_size).enumerate() {
                let place = outside_place(handle.get(), group, column);
                self.device.put_outside(place, group, slots.iter().copied().map(Some));
            }
        }
        self.events.note("loads", 1);
    }

    /// Each column is loaded into the block that the request has there.
    pub(super) fn check_load(&self, scheduler: &Scheduler, handle: Handle, (id, _, pairs): &Told) {
        let mut at_home = Vec::new();
        for group in 0..self.limits.groups.len() {
            for request in self.all().filter(|request| request.handle == handle) {
                let leader = request.sequences()[0];
                let table = scheduler.group_table(handle, leader as u32, group).expect("a live sample");
                let blocks = table.unwrap_or_default().iter().enumerate();
                at_home.extend(
                    blocks.map(|(column, block)| (block.get() as usize, outside_place(handle.get(), group, column))),
                );
            }
        }
        assert!(pairs.iter().all(|pair| at_home.contains(pair)), "load {id} of {pairs:?} into {at_home:?}");
    }

    /// The cache was searched for the prompt before the rest was asked for.
    pub(super) fn note_lookup_before_load(&mut self, at: usize, num_loaded: usize) {
        let caching = self.limits.caching;
        let request = &mut self.requests[at];
        let is_first = request.num_preemptions == 0;
        let sample = request.sequences()[0];
        let asks = caching && request.asked.use_prefix_cache;
        let queries = if asks { request.limit(sample) as u64 } else { 0 };
        let hits = request.num_scheduled(sample) - num_loaded;
        request.num_cached_tokens += if is_first { hits } else { 0 };
        self.count_lookup(is_first, u64::from(asks), queries, hits as u64);
    }
}
