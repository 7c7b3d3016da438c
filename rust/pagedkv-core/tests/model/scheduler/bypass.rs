//! How often a waiting request sees later ones admitted before it.

use pagedkv_core::Policy;

use super::{Entry, Request, SchedulerModel};

impl SchedulerModel {
    /// Overtakings after which nobody passes a request that comes now: as many as wait with it and as ageing allows, and
    /// those of the pass in which it becomes due.
    pub(super) fn most_overtakings(&self) -> usize {
        self.requests.len() + self.limits.ageing + self.limits.max_num_seqs
    }

    /// Bypass is bounded under every policy that ages. A request that is held, or whose blocks are on their way out, is
    /// passed over; those that arrived after it, or whose turn began later, stand behind it in the model's list.
    pub(super) fn check_bypass(&mut self, entries: &[Entry]) {
        if self.limits.policy == Policy::Fcfs {
            return;
        }
        for admitted in entries.iter().filter(|entry| entry.is_admission).map(|entry| entry.handle) {
            let at = self.position(admitted).expect("planned requests live");
            let is_passed =
                |request: &&mut Request| !request.is_resident && !request.is_held && request.transfer.is_none();
            for request in self.requests[..at].iter_mut().filter(is_passed) {
                request.num_overtakings += 1;
                self.events.note("overtakings", 1);
                let is_bounded = request.num_overtakings <= request.most_overtakings;
                assert!(is_bounded, "{:?} was overtaken {} times", request.handle, request.num_overtakings);
            }
        }
    }
}
