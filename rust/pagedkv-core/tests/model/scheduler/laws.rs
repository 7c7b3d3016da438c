//! What every plan must keep to, and what must hold after every command.

use pagedkv_core::step_plan::Field;
use pagedkv_core::{Handle, PlanId, Policy, Reason, Scheduler, StepPlan};

use super::{Entry, Request, SchedulerModel};

impl SchedulerModel {
    /// A row has one owner in a plan, and the same one in all plans in flight.
    pub(super) fn check_rows(&mut self, entries: &[Entry]) {
        for (i, entry) in entries.iter().enumerate() {
            assert!((entry.row as usize) < self.limits.max_num_seqs, "row {}", entry.row);
            assert!(entries[i + 1..].iter().all(|other| other.row != entry.row), "row {} has two owners", entry.row);
            for other in self.plans.iter().flat_map(|plan| &plan.entries) {
                let same = other.row != entry.row || other.handle == entry.handle;
                assert!(same, "row {} changed hands while a plan in flight names it", entry.row);
            }
        }
    }

    pub(super) fn check_limits(&mut self, plan: &StepPlan, entries: &[Entry]) {
        let num_tokens = plan.sizes().num_tokens as usize;
        assert!(num_tokens <= self.limits.max_num_batched_tokens, "{num_tokens} tokens");
        let num_seats: usize = self.residents().map(|request| request.live().count()).sum();
        assert!(num_seats <= self.limits.max_num_seqs, "{num_seats} seats");
        let lengths = plan.i32s(Field::QueryStartLoc).windows(2).map(|pair| pair[1] - pair[0]);
        assert!(lengths.is_sorted_by_key(|length| length > 1), "decodes come first");
        let from_before = plan.i32s(Field::InputFrom).iter().filter(|&&from| from >= 0).count();
        self.events.note("inputs from the plan before", from_before as u64);
        if entries.is_empty() {
            assert!(
                plan.sizes().num_samples == 0 && plan.i32s(Field::Copies).is_empty(),
                "an empty plan does something"
            );
        }
    }

    /// An admission beside running requests leaves room for all that they and it know, and the watermark; and first come,
    /// first served, it leaves nobody waiting who came before.
    pub(super) fn check_admissions(&self, scheduler: &Scheduler, entries: &[Entry], residents_before: &[Handle]) {
        let admitted = entries.iter().filter(|entry| entry.is_admission);
        let Some(at) = admitted.filter_map(|entry| self.position(entry.handle)).max() else {
            return;
        };
        if self.limits.policy != Policy::Fcfs {
            return;
        }
        let last = self.requests[at].handle;
        let mut before = self.requests[..at].iter().filter(|request| !request.is_held);
        let passed_over = before.clone().find(|other| !other.is_resident);
        assert!(passed_over.is_none(), "{last:?} is admitted before {passed_over:?}");
        let left_out = before.find(|request| {
            let is_in_time = !request.is_ready_gang(entries) || self.had_budget(request, entries);
            // Samples that go on by themselves are planned from the next step on.
            let is_new = entries.iter().any(|entry| entry.is_admission && entry.handle == request.handle);
            is_in_time && !is_new && !self.idle(request, entries).is_empty()
        });
        assert!(
            left_out.is_none() || self.limits.cuts_chunks,
            "{last:?} is admitted while {left_out:?} waits for room"
        );
        let first = self.residents().next().expect("the admitted one is resident");
        if residents_before.is_empty() || first.handle == last {
            return;
        }
        // Those behind it grow after it, and may take what it left.
        if self.requests[at + 1..].iter().any(|request| residents_before.contains(&request.handle)) {
            return;
        }
        let still_needed = |request: &Request| -> usize {
            let of_sequence = |sample| {
                let num_scheduled = request.num_scheduled(sample);
                let end = num_scheduled + self.num_wanted(request, sample, Self::is_lagging(request, entries));
                self.blocks_to_come(scheduler, request, sample, end)
            };
            request.sequences().into_iter().map(of_sequence).sum()
        };
        let counted = self.requests[..=at].iter().filter(|request| request.is_resident && !request.is_held);
        let needed: usize = counted.map(still_needed).sum();
        let available = scheduler.manager().pool().num_available() as usize;
        let left = available.checked_sub(self.limits.watermark_blocks);
        assert!(left >= Some(needed), "{last:?} is admitted, {needed} blocks are needed and {available} available");
    }

    /// What was said of each request before a plan came true, as far as the plan shares nothing and guesses nothing.
    pub(crate) fn check_reasons(&mut self, plan: &StepPlan, reasons: &[(Handle, Reason)]) {
        let starts = plan.i32s(Field::QueryStartLoc);
        let has_drafts =
            self.requests.iter().flat_map(|request| &request.samples).any(|sample| !sample.drafts.is_empty());
        let mut planned = std::collections::BTreeMap::<i64, u32>::new();
        for (s, &handle) in plan.i64s(Field::Handles).iter().enumerate() {
            *planned.entry(handle).or_default() += (starts[s + 1] - starts[s]) as u32;
            let sample = plan.i32s(Field::Sequence)[s] as usize;
            let start = plan.i32s(Field::SeqLens)[s] - (starts[s + 1] - starts[s]);
            let request = &self.requests[self.position(Handle::new(handle)).expect("a live request")];
            let before =
                if request.is_resident { request.num_scheduled(sample) } else { request.samples[sample].num_scheduled };
            let is_to_be_hit =
                self.fills_for_others(request, sample, start as usize..plan.i32s(Field::SeqLens)[s] as usize);
            if start as usize > before || is_to_be_hit {
                return;
            }
        }
        let is_elsewhere =
            |request: &Request| request.swapped.is_some() || request.transfer.is_some() || request.num_external > 0;
        let is_out = self.requests.iter().any(is_elsewhere);
        if has_drafts || is_out {
            return;
        }
        self.events.note("reasons", reasons.len() as u64);
        for (handle, reason) in reasons {
            let num_tokens = planned.get(&handle.get()).copied();
            match reason {
                Reason::Ready { num_tokens: expected } => {
                    assert_eq!(num_tokens, Some(*expected), "{handle:?}: {reason}");
                }
                _ => assert_eq!(num_tokens, None, "{handle:?}: {reason}"),
            }
        }
    }

    /// Whether a sample that waits begins with the tokens of a block that is filled by computing these positions.
    fn fills_for_others(&self, request: &Request, sample: usize, positions: std::ops::Range<usize>) -> bool {
        let tokens = request.known(sample);
        let waiting = self.requests.iter().filter(|other| !other.is_resident);
        let known = waiting.flat_map(|other| other.live().map(|sample| other.known(sample)).collect::<Vec<_>>());
        known.into_iter().any(|other| {
            let shared = other.iter().zip(&tokens).take_while(|(one, other)| one == other).count().min(positions.end);
            shared - shared % self.limits.block_size > positions.start
        })
    }

    /// If work fits it is planned.
    pub(super) fn check_blocked(&mut self, plan: &StepPlan, entries: &[Entry]) {
        if entries.is_empty() && !self.requests.is_empty() {
            let is_kept_out = self.requests.iter().all(|request| request.is_held);
            assert_eq!(plan.waits_for_transfers(), self.has_transfers() && !is_kept_out);
            let waits = plan.blocked_on().is_some() || plan.waits_for_transfers();
            assert!(
                waits || is_kept_out || self.sessions_keep_blocks(),
                "an empty plan while there is work, and nothing to wait for"
            );
            let is_in_flight = |plan: &PlanId| self.in_flight().contains(plan);
            assert!(plan.blocked_on().as_ref().is_none_or(is_in_flight), "{:?} is not in flight", plan.blocked_on());
            self.events.note(if waits { "blocked plans" } else { "plans that wait for sessions" }, 1);
        } else {
            assert!(plan.blocked_on().is_none() && !plan.waits_for_transfers());
        }
    }

    /// First come, first served, the oldest always progresses, and whoever comes next runs if it fits.
    pub(super) fn check_progress(
        &self,
        scheduler: &Scheduler,
        plan: &StepPlan,
        entries: &[Entry],
        residents_before: &[Handle],
    ) {
        if self.limits.policy != Policy::Fcfs {
            return;
        }
        let oldest = self.requests.iter().find(|request| !request.is_held);
        if let (Some(oldest), true) =
            (oldest, self.plans.is_empty() && !self.has_transfers() && !self.sessions_keep_blocks())
        {
            let progresses = entries.iter().any(|entry| entry.handle == oldest.handle);
            assert!(progresses, "the oldest request waits, and no plan is in flight");
        }
        let budget_left = self.limits.max_num_batched_tokens - plan.sizes().num_tokens as usize;
        let available = scheduler.manager().pool().num_available() as usize;
        if budget_left > 0 && !self.limits.cuts_chunks && available >= self.limits.groups.len() {
            let mut in_order = self.requests.iter().filter(|request| !request.is_held);
            let waits = in_order.find(|request| !request.is_resident || !self.idle(request, entries).is_empty());
            // What is available may be kept for one that is still to be admitted.
            let Some(request) = waits.filter(|request| request.is_resident) else { return };
            // Or it was, for one that took others in the end.
            let place = self.position(request.handle).expect("it is one of them");
            let is_new = |other: &Request| other.is_resident && !residents_before.contains(&other.handle);
            if self.requests[..=place].iter().any(is_new) {
                return;
            }
            // One token takes one block of each group at the most, so whoever is the first that does not run wants more than
            // that.
            let could_run = if request.is_ready_gang(entries) {
                let needed = self.blocks_of_the_gang(scheduler, request);
                budget_left >= request.live().count() && available >= needed
            } else {
                self.idle(request, entries)[0] == 1
            };
            assert!(!could_run, "{request:?} could run");
        }
    }

    /// What each sequence of a request that could run and does not wants, in tokens.
    fn idle(&self, request: &Request, entries: &[Entry]) -> Vec<usize> {
        let is_lagging = Self::is_lagging(request, entries);
        let runs =
            |&sample: &usize| entries.iter().any(|entry| entry.handle == request.handle && entry.sample == sample);
        let idle = request.sequences().into_iter().filter(|sample| !runs(sample));
        idle.map(move |sample| self.num_wanted(request, sample, is_lagging)).filter(|&wanted| wanted > 0).collect()
    }

    /// Tokens of a sequence that could run in this plan: it does not wait for a commit, and what it draws from was drawn
    /// by the plan before.
    fn num_wanted(&self, request: &Request, sample: usize, is_lagging: bool) -> usize {
        let previous = self.plans.back().map(|plan| plan.arrays.id());
        let mut in_flight = self.plans.iter().flat_map(|plan| &plan.entries);
        if request.asked.needs_commit && in_flight.any(|entry| entry.handle == request.handle) {
            return 0;
        }
        if request.samples[sample].drafting.is_some() || request.transfer.is_some() {
            return 0;
        }
        let pending = &request.samples[sample].pending;
        let unknown = if request.has_parted && pending.last().is_some_and(|last| Some(last.plan) != previous) {
            pending.len()
        } else {
            0
        };
        let limit = request.limit(sample).min(request.tokens(sample).len() - unknown - usize::from(is_lagging));
        limit.saturating_sub(request.num_scheduled(sample))
    }

    pub(crate) fn check(&self, scheduler: &Scheduler) {
        scheduler.check_integrity().unwrap_or_else(|broken| panic!("{broken}"));
        let num_resident = self.residents().count();
        assert_eq!(scheduler.num_unfinished_requests(), self.requests.len());
        assert_eq!(scheduler.num_requests(), (num_resident, self.requests.len() - num_resident));
        assert_eq!(scheduler.num_preemptions(), self.num_preemptions);
        self.check_stats(scheduler);
        let outstanding: Vec<i64> = self.transfers.iter().map(|transfer| transfer.id).collect();
        assert_eq!(scheduler.outstanding_transfers().collect::<Vec<_>>(), outstanding);
        let sequences = self.residents().flat_map(|request| {
            request.sequences().into_iter().map(|sample| (request.handle, sample, request.num_scheduled(sample)))
        });
        for (handle, sample, num_scheduled) in sequences {
            for (number, group) in self.limits.groups.iter().enumerate() {
                let table = scheduler.group_table(handle, sample as u32, number).expect("a live sample");
                let num_blocks = table.map_or(0, <[_]>::len);
                let expected = num_scheduled.div_ceil(group.block_size);
                assert_eq!(num_blocks, expected, "blocks of {handle:?} {sample} in group {number}");
            }
        }
        self.check_kept(scheduler);
    }

    /// With all requests over and all plans ended, the whole pool is there again and nobody sits anywhere.
    pub(crate) fn check_empty(&self, scheduler: &Scheduler) {
        assert!(self.requests.is_empty() && self.resting.is_empty());
        assert!(self.plans.is_empty() && self.transfers.is_empty());
        let (num_host_blocks, num_free) = scheduler.num_host_blocks();
        assert_eq!(num_host_blocks, num_free, "host blocks are lost");
        assert!(scheduler.manager().usage().abs() < 1e-9, "blocks are lost");
        assert_eq!(scheduler.manager().num_sequences(), 0);
        assert_eq!(self.device.num_seats(), 0, "somebody was never said to have left");
    }
}
