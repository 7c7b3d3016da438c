//! Requests that go out to the host tier and come back, and the transfers that carry them.

use std::collections::BTreeSet;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{Handle, Scheduler, StepPlan};

use super::super::device::{Told, transfers_of};
use super::SchedulerModel;
use super::loads::is_load_of;

/// What a request has in the host tier.
#[derive(Clone, Debug)]
pub(super) struct Swapped {
    pub(super) residence: u32,
    pub(super) has_parted: bool,
    /// Tokens of each sample's sequence that are good, before a cap for what must be left to compute.
    pub(super) lens: Vec<usize>,
    /// Whether a copy failed, so that less may come back.
    pub(super) is_short: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub(super) id: i64,
    handle: Handle,
    is_out: bool,
    pairs: Vec<(usize, usize)>,
    /// Tokens that come from outside.
    num_loaded: usize,
}

impl SchedulerModel {
    /// The blocks of every request, before a plan is made.
    pub(super) fn blocks_held(&self, scheduler: &Scheduler) -> Vec<(Handle, BTreeSet<usize>)> {
        let blocks = |handle, sample: usize| self.blocks_of(scheduler, handle, sample);
        let of = |request: &super::Request| {
            request.sequences().into_iter().flat_map(|sample| blocks(request.handle, sample)).collect()
        };
        self.residents().map(|request| (request.handle, of(request))).collect()
    }

    fn blocks_of(&self, scheduler: &Scheduler, handle: Handle, sample: usize) -> Vec<usize> {
        let table = |group| scheduler.group_table(handle, sample as u32, group).expect("a live sample");
        let blocks = (0..self.limits.groups.len()).flat_map(|group| table(group).unwrap_or_default());
        blocks.map(|block| block.get() as usize).filter(|&block| block > 0).collect()
    }

    /// Who of the victims went out: each distinct block of it once, and all of it or nothing. Answers those that did.
    pub(super) fn follow_swap_outs(&mut self, plan: &StepPlan, victims: &[Handle]) {
        let known: BTreeSet<i64> = self.transfers.iter().map(|transfer| transfer.id).collect();
        let mut gone_out: Vec<Handle> = Vec::new();
        for (id, is_out, pairs) in transfers_of(plan) {
            if known.contains(&id) {
                let transfer = self.transfers.iter().find(|transfer| transfer.id == id).expect("it is known");
                assert_eq!((transfer.is_out, &transfer.pairs), (is_out, &pairs), "transfer {id} changed");
                self.to_repeat.remove(&id);
                continue;
            }
            assert!(known.last().is_none_or(|&last| last < id), "ids of transfers rise");
            self.events.note("transfers", 1);
            if !is_out {
                continue;
            }
            let blocks: BTreeSet<usize> = pairs.iter().map(|&(device, _)| device).collect();
            assert_eq!(blocks.len(), pairs.len(), "a block goes out twice: {pairs:?}");
            let is_it = |&&handle: &&Handle| {
                !gone_out.contains(&handle) && self.blocks_before.contains(&(handle, blocks.clone()))
            };
            let handle = *victims.iter().find(is_it).expect("what goes out is all that a victim had");
            gone_out.push(handle);
            self.transfers.push(Transfer { id, handle, is_out, pairs, num_loaded: 0 });
            // Guesses that are being checked are as good as not computed.
            let in_flight = self.plans.iter().flat_map(|plan| &plan.entries);
            let guesses: Vec<_> = in_flight
                .filter(|entry| entry.handle == handle && !entry.drafts.is_empty())
                .map(|entry| (entry.sample, entry.residence, entry.drafts.len()))
                .collect();
            let request = self.find_mut(handle).expect("victims live");
            let good = |sample: usize| {
                let moved = request.samples[sample].awaiting.as_ref().map_or(usize::MAX, |(from, _)| *from);
                let is_it =
                    |&&(of, residence, _): &&(usize, u32, usize)| of == sample && residence == request.residence;
                let num_guesses = guesses.iter().find(is_it).map_or(0, |&(.., len)| len);
                (request.num_scheduled(sample) - num_guesses).min(moved)
            };
            let lens = (0..request.samples.len()).map(good).collect();
            let (residence, has_parted) = (request.residence, request.has_parted);
            request.swapped = Some(Swapped { residence, has_parted, lens, is_short: false });
            request.transfer = Some(id);
            self.events.note("swap-outs", 1);
        }
        assert!(self.to_repeat.is_empty(), "transfers {:?} were undone and not told again", self.to_repeat);
        for &handle in victims {
            let request = self.find_mut(handle).expect("victims live");
            // What was on its way in is still out, and nothing else is.
            if !gone_out.contains(&handle) && request.transfer.is_none() {
                request.swapped = None;
            }
        }
    }

    /// Who came back from the host tier, or came in from outside, with this plan, and whether it has all that it should.
    pub(super) fn follow_returns(&mut self, scheduler: &Scheduler, plan: &StepPlan) {
        let mut new = transfers_of(plan);
        new.retain(|(id, ..)| self.transfers.iter().all(|known| known.id != *id));
        for at in 0..self.requests.len() {
            self.follow_return(scheduler, plan, at, &mut new);
        }
        assert!(new.is_empty(), "transfers {new:?} are nobody's");
        self.transfers.sort_by_key(|transfer| transfer.id);
    }

    fn follow_return(&mut self, scheduler: &Scheduler, plan: &StepPlan, at: usize, new: &mut Vec<Told>) {
        let request = &self.requests[at];
        let handle = request.handle;
        let progress = |sample: usize| scheduler.progress(handle, sample as u32).expect("a live sample");
        if request.is_resident || !request.live().any(|sample| progress(sample).num_scheduled > 0) {
            return;
        }
        let comes_in = request.num_external > 0 && new.iter().any(|told| is_load_of(handle, told));
        if comes_in {
            self.come_from_outside(at);
        }
        let request = &self.requests[at];
        let is_planned = plan.i64s(Field::Handles).contains(&handle.get());
        let from_scratch = is_planned && request.live().all(|sample| progress(sample).num_computed == 0);
        let Some(swapped) = request.swapped.clone().filter(|_| !from_scratch) else {
            self.requests[at].swapped = None;
            return;
        };
        assert!(request.transfer.is_none(), "{handle:?} comes back before it has gone out");
        assert!(!self.is_in_flight(handle), "{handle:?} comes back while a plan in flight is about it");
        let tables: BTreeSet<usize> =
            request.live().flat_map(|sample| self.blocks_of(scheduler, handle, sample)).collect();
        let is_its = |(_, _, pairs): &Told| pairs.iter().all(|(device, _)| tables.contains(device));
        let told = new.iter().position(is_its).map(|at| new.remove(at));
        let num_waiting = self.check_what_came_back(scheduler, at, &swapped, told.is_some());
        self.note_return(handle);
        self.events.note("returns", 1);
        let num_arriving = told.as_ref().map_or(0, |(_, _, pairs)| pairs.len());
        self.events.note("blocks taken back", (tables.len() - num_arriving) as u64);
        let Some(told) = told else {
            self.requests[at].swapped = None;
            return;
        };
        let is_load = is_load_of(handle, &told);
        if is_load {
            self.check_load(scheduler, handle, &told);
        }
        if comes_in {
            self.note_lookup_before_load(at, num_waiting);
        }
        self.requests[at].transfer = Some(told.0);
        self.events.note("swap-ins", 1);
        let (id, is_out, pairs) = told;
        self.transfers.push(Transfer { id, handle, is_out, pairs, num_loaded: if is_load { num_waiting } else { 0 } });
    }

    /// A request has what went out of it, up to the token that must be left to compute. Answers how many tokens of its
    /// last sequence wait for a transfer.
    fn check_what_came_back(&mut self, scheduler: &Scheduler, at: usize, swapped: &Swapped, waits: bool) -> usize {
        let request = &mut self.requests[at];
        request.is_resident = true;
        request.has_parted = swapped.has_parted || request.live().count() == 1;
        let mut num_waiting = 0;
        for sample in request.sequences() {
            let found = scheduler.progress(request.handle, sample as u32).expect("a live sample");
            num_waiting = (found.num_scheduled - found.num_computed) as usize;
            let len = if waits { found.num_scheduled } else { found.num_computed } as usize;
            let longest = swapped.lens.iter().copied().max().unwrap_or(0);
            let good = if swapped.has_parted { swapped.lens[sample] } else { longest };
            let known = if request.has_parted { request.tokens(sample).len() } else { request.prompt_len() };
            let most = good.min(known - 1);
            let is_expected = len == most || swapped.is_short && len < most;
            assert!(is_expected, "{len} of {most} tokens of {:?} come back", request.handle);
            request.set_num_scheduled(sample, len);
            request.set_num_computed(sample, found.num_computed as usize);
            self.events.note("tokens that came back", len as u64);
        }
        num_waiting
    }

    /// A plan is undone: its transfers are told again, and what it computed of those who went out since is void.
    pub(super) fn undo_transfers(&mut self, plan: &StepPlan) {
        for (id, ..) in transfers_of(plan) {
            if self.transfers.iter().any(|transfer| transfer.id == id) {
                self.to_repeat.insert(id);
            }
        }
    }

    pub(super) fn undo_swapped(&mut self, handle: Handle, sample: usize, residence: u32, before: usize) {
        // So many tokens are whole blocks in every group.
        let multiple = (1..1000).find(|&len| self.limits.groups.are_whole_at(len)).expect("some length is");
        let Some(request) = self.find_mut(handle) else { return };
        let Some(swapped) = request.swapped.as_mut().filter(|swapped| swapped.residence == residence) else {
            return;
        };
        let border = before - before % multiple;
        if swapped.has_parted {
            swapped.lens[sample] = swapped.lens[sample].min(border);
        } else {
            swapped.lens.iter_mut().for_each(|len| *len = (*len).min(border));
        }
    }

    /// Transfers that were started and have not ended.
    pub(crate) fn started_transfers(&self) -> Vec<i64> {
        self.device.started_transfers()
    }

    /// Transfers end, all together; the scheduler has been told.
    pub(crate) fn end_transfers(&mut self, scheduler: &Scheduler, ids: &[i64], ok: bool) {
        for &id in ids {
            self.device.end_transfer(id, ok);
            let at = self.transfers.iter().position(|transfer| transfer.id == id).expect("it was told");
            let transfer = self.transfers.remove(at);
            self.to_repeat.remove(&id);
            self.events.note(if ok { "transfers that succeeded" } else { "transfers that failed" }, 1);
            let Some(request) = self.find_any_mut(transfer.handle).filter(|request| request.transfer == Some(id))
            else {
                self.events.note("transfers of requests that had ended", 1);
                continue;
            };
            request.transfer = None;
            if transfer.is_out {
                if let Some(swapped) = &mut request.swapped {
                    swapped.is_short |= !ok;
                }
            } else if request.is_resident {
                request.swapped = None;
                if !ok && request.live().count() > 1 {
                    // What the samples shared is computed once for all, as after any preemption.
                    request.residence += 1;
                    request.has_parted = false;
                    request.samples.iter_mut().for_each(|sample| sample.row = None);
                }
                for sample in request.sequences() {
                    let found = scheduler.progress(transfer.handle, sample as u32).expect("a live sample");
                    assert_eq!(found.num_computed, found.num_scheduled, "what came back counts as computed");
                    let before = request.num_scheduled(sample);
                    let len = found.num_scheduled as usize;
                    assert!(if ok { len == before } else { len <= before }, "{len} of {before} tokens are there");
                    request.set_num_scheduled(sample, len);
                    request.set_num_computed(sample, len);
                }
                if ok && transfer.num_loaded > 0 {
                    self.note_loaded(transfer.handle, transfer.num_loaded);
                }
            } else {
                self.events.note("transfers of requests that were preempted again", 1);
                let request = self.find_any_mut(transfer.handle).expect("it was just there");
                if !ok {
                    request.swapped = None;
                }
            }
        }
    }

    pub(super) fn waits_for_transfer(&self, handle: Handle) -> bool {
        self.requests.iter().any(|request| request.handle == handle && request.transfer.is_some())
    }

    /// Whether the plan's blocks may wait for a transfer.
    pub(super) fn has_transfers(&self) -> bool {
        !self.transfers.is_empty()
    }
}
