//! Who lost its blocks and seats to a plan, and whether it had to.

use pagedkv_core::{Handle, Policy, Scheduler, StepPlan};

use super::{Request, SchedulerModel};

impl SchedulerModel {
    pub(crate) fn before_schedule(&mut self, scheduler: &Scheduler) {
        let pool = scheduler.manager().pool();
        self.blocks_before = self.blocks_held(scheduler);
        self.num_blocks_before = (pool.num_available() + pool.num_fenced()) as usize;
    }

    /// `counts` says how often each request has lost its blocks.
    pub(super) fn follow_preemptions(&mut self, scheduler: &Scheduler, plan: &StepPlan, counts: &[(Handle, u32)]) {
        let num_victims = (scheduler.num_preemptions() - self.num_preemptions) as usize;
        let lost = |request: &&Request| counts.contains(&(request.handle, request.num_preemptions + 1));
        let victims: Vec<Handle> = self.requests.iter().filter(lost).map(|request| request.handle).collect();
        assert_eq!(victims.len(), num_victims, "preemptions");
        if self.limits.policy == Policy::Fcfs {
            self.check_victims(&victims);
        }
        self.follow_swap_outs(plan, &victims);
        for &handle in &victims {
            let victim = self.find_mut(handle).expect("victims live");
            let name = if victim.is_resident { "preemptions" } else { "preemptions of waiting requests" };
            victim.leave();
            victim.num_preemptions += 1;
            self.num_preemptions += 1;
            self.note_preemption(handle);
            self.events.note(name, 1);
        }
        for change in plan.changes().preempted {
            let request = self.requests.iter().find(|request| request.asked.request_id == change.request_id);
            let row = request.and_then(|request| request.samples[change.sample as usize].row);
            // Samples that start over keep their rows, and sit there again when they have parted.
            let starts_over = request.is_some_and(|request| !request.has_parted && row.is_none());
            // One that a session's earlier turn lost may be told in the next one.
            let was_preempted = |request: &Request| request.num_preemptions > 0 || request.is_session();
            // What plans that never ran told is told again: also of one that is back, and new in the same plan.
            let is_back = plan
                .changes()
                .new
                .iter()
                .any(|new| (&new.request_id, new.sample) == (&change.request_id, change.sample));
            let has_left = |request: &Request| !request.is_resident || starts_over || is_back;
            let holds = request.is_some_and(|request| was_preempted(request) && has_left(request));
            assert!(holds, "{change:?} was not preempted");
        }
    }

    /// First come, first served: victims are the youngest, never the oldest, and none while all can have what they want.
    fn check_victims(&self, victims: &[Handle]) {
        let oldest = self.requests.iter().find(|request| !request.is_held);
        assert!(oldest.is_none_or(|oldest| !victims.contains(&oldest.handle)), "the oldest is preempted");
        if self.requests.iter().any(|request| request.is_held || request.is_keeper()) {
            return;
        }
        let mut youngest: Vec<_> = self.residents().map(|request| request.handle).collect();
        let youngest = youngest.split_off(youngest.len() - victims.len());
        assert_eq!(victims, youngest, "the youngest are preempted");
        // A request that comes before those that run may have been released.
        let mut order = self.requests.iter().skip_while(|request| request.is_resident);
        if order.any(|request| request.is_resident) {
            return;
        }
        let wanted: usize = self.residents().map(|request| self.most_blocks_wanted(request)).sum();
        let fits = wanted <= self.num_blocks_before;
        assert!(victims.is_empty() || !fits, "{victims:?} for {wanted} of {} blocks", self.num_blocks_before);
    }

    /// New blocks, and one for a copy, for each sequence that can run.
    fn most_blocks_wanted(&self, request: &Request) -> usize {
        let wanted = |sample| {
            let (held, limit) = (request.num_scheduled(sample), request.limit(sample));
            let in_group =
                |size: usize| limit.div_ceil(size).saturating_sub(held.div_ceil(size)) + usize::from(limit > held);
            self.limits.groups.iter().map(|group| in_group(group.block_size)).sum::<usize>()
        };
        request.sequences().into_iter().map(wanted).sum()
    }
}
