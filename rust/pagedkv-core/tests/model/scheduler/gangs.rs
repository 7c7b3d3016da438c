//! Beams run together or not at all: what they need for that.

use std::collections::BTreeMap;

use pagedkv_core::Scheduler;

use super::{Entry, Request, SchedulerModel};

impl SchedulerModel {
    /// A plan draws for all live samples of a gang or for none of them, and for none only while some of them compute what
    /// they lost.
    pub(super) fn check_gangs(&self, entries: &[Entry]) {
        for request in self.residents().filter(|request| request.is_gang() && request.has_parted) {
            let own: Vec<_> = entries.iter().filter(|entry| entry.handle == request.handle).collect();
            let num_drawn = own.iter().filter(|entry| !entry.drawn.is_empty()).count();
            let lagged = own.iter().any(|entry| entry.before + 1 < request.tokens(entry.sample).len());
            let together = num_drawn == request.live().count();
            assert!(
                own.is_empty() || together || num_drawn == 0 && lagged,
                "{own:?} of {request:?} is planned in part"
            );
        }
    }

    /// Whether samples of a gang compute what they lost, in this plan or before it.
    pub(super) fn is_lagging(request: &Request, entries: &[Entry]) -> bool {
        let mut own = entries.iter().filter(|entry| entry.handle == request.handle).peekable();
        request.is_gang()
            && request.has_parted
            && if own.peek().is_some() { own.all(|entry| entry.drawn.is_empty()) } else { !request.is_ready() }
    }

    /// Blocks that the next tokens of all live samples of a gang take: one each on a block border; else a copy for all
    /// who write into one block but the last, and for the last as well if others hold the block.
    pub(super) fn blocks_of_the_gang(&self, scheduler: &Scheduler, request: &Request) -> usize {
        let groups = self.limits.groups.iter().enumerate();
        groups.map(|(number, group)| Self::blocks_of_the_gang_in(scheduler, request, number, group.block_size)).sum()
    }

    fn blocks_of_the_gang_in(scheduler: &Scheduler, request: &Request, group: usize, block_size: usize) -> usize {
        let mut writers = BTreeMap::new();
        let mut needed = 0;
        for sample in request.live() {
            let num_scheduled = request.num_scheduled(sample);
            if num_scheduled.is_multiple_of(block_size) {
                needed += 1;
                continue;
            }
            let table = scheduler.group_table(request.handle, sample as u32, group).expect("a live sample");
            let tail = table.expect("it holds blocks")[num_scheduled / block_size];
            *writers.entry(tail).or_insert(0) += 1;
        }
        for (tail, writers) in writers {
            let holders = scheduler.manager().pool().ref_count(tail).expect("a block of the pool") as usize;
            needed += writers - usize::from(holders == writers);
        }
        needed
    }

    /// Whether a gang that does not run could have: the budget that older requests left it is enough for all of it.
    pub(super) fn had_budget(&self, request: &Request, entries: &[Entry]) -> bool {
        let at = self.position(request.handle);
        let older = entries.iter().filter(|entry| self.position(entry.handle) < at);
        let used: usize = older.map(|entry| entry.end - entry.before - entry.num_hit_tokens).sum();
        self.limits.max_num_batched_tokens - used >= request.live().count()
    }
}

impl Request {
    /// Whether it is a gang whose samples could all go on.
    pub(super) fn is_ready_gang(&self, entries: &[Entry]) -> bool {
        self.is_gang() && self.has_parted && !SchedulerModel::is_lagging(self, entries)
    }
}
