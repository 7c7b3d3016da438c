//! Who lost its blocks and seats to a plan, and whether it had to.

use pagedkv_core::step_plan::Field;
use pagedkv_core::{Handle, Policy, Scheduler, StepPlan};

use super::{Request, SchedulerModel};

impl SchedulerModel {
    pub(crate) fn before_schedule(&mut self, scheduler: &Scheduler) {
        let pool = scheduler.manager().pool();
        self.blocks_before = self.blocks_held(scheduler);
        self.num_blocks_before = (pool.num_available() + pool.num_fenced()) as usize;
    }

    pub(super) fn follow_preemptions(&mut self, scheduler: &Scheduler, plan: &StepPlan) {
        let num_victims = (scheduler.num_preemptions() - self.num_preemptions) as usize;
        let victims = if self.limits.policy == Policy::Fcfs {
            self.youngest(num_victims)
        } else {
            self.find_victims(scheduler, plan, num_victims)
        };
        self.follow_swap_outs(plan, &victims);
        for &handle in &victims {
            let victim = self.find_mut(handle).expect("victims live");
            victim.leave();
            victim.num_preemptions += 1;
            self.num_preemptions += 1;
            self.note_preemption(handle);
            self.events.note("preemptions", 1);
        }
        for change in plan.changes().preempted {
            let request = self.requests.iter().find(|request| request.asked.request_id == change.request_id);
            let row = request.and_then(|request| request.samples[change.sample as usize].row);
            // Samples that start over keep their rows, and sit there again when they have parted.
            let starts_over = request.is_some_and(|request| !request.has_parted && row.is_none());
            let holds =
                request.is_some_and(|request| request.num_preemptions > 0 && (!request.is_resident || starts_over));
            assert!(holds, "{change:?} was not preempted");
        }
    }

    /// First come, first served: victims are the youngest, never the oldest, and none while all can have what they want.
    fn youngest(&self, num_victims: usize) -> Vec<Handle> {
        let youngest: Vec<_> = self.residents().map(|request| request.handle).collect();
        assert!(num_victims == 0 || num_victims < youngest.len(), "the oldest is preempted");
        let wanted: usize = self.residents().map(|request| self.most_blocks_wanted(request)).sum();
        let fits = wanted <= self.num_blocks_before;
        assert!(num_victims == 0 || !fits, "{num_victims} victims for {wanted} of {} blocks", self.num_blocks_before);
        youngest.into_iter().rev().take(num_victims).collect()
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

    /// Under other policies: who lost its blocks, or starts over, or is said to have been preempted.
    fn find_victims(&self, scheduler: &Scheduler, plan: &StepPlan, num_victims: usize) -> Vec<Handle> {
        let has_lost_all = |request: &&Request| {
            let table = |&sample: &usize| scheduler.block_table(request.handle, sample as u32).expect("it is live");
            request.live().all(|sample| table(&sample).is_none())
        };
        let starts_over = |request: &&Request| {
            let starts = plan.i32s(Field::QueryStartLoc);
            let mut entries = (0..plan.sizes().num_sequences as usize)
                .filter(|&s| plan.i64s(Field::Handles)[s] == request.handle.get());
            entries.any(|s| {
                let start = plan.i32s(Field::SeqLens)[s] - (starts[s + 1] - starts[s]);
                (start as usize) < request.num_scheduled(plan.i32s(Field::Sequence)[s] as usize)
            })
        };
        let preempted = plan.changes().preempted;
        let is_said = |request: &&Request| preempted.iter().any(|change| change.request_id == request.asked.request_id);
        // One whose blocks never came has none to lose.
        let is_counted = |request: &&Request| {
            let sample = request.live().next().expect("a live request has a live sample") as u32;
            let found = scheduler.progress(request.handle, sample).expect("it is live");
            found.num_preemptions > request.num_preemptions
        };
        let victims: Vec<_> = self
            .residents()
            .filter(is_counted)
            .inspect(|request| {
                let held = self.blocks_before.iter().find(|(handle, _)| *handle == request.handle);
                let had_none = held.is_some_and(|(_, blocks)| blocks.is_empty());
                assert!(had_none || has_lost_all(request) || starts_over(request) || is_said(request), "{request:?}");
            })
            .map(|request| request.handle)
            .collect();
        assert_eq!(victims.len(), num_victims, "preemptions");
        victims
    }
}
