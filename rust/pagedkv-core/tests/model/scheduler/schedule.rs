//! Following a plan that `schedule` made, sequence by sequence.

use pagedkv_core::step_plan::Field;
use pagedkv_core::{Handle, PlanId, Scheduler, StepPlan};

use super::request::{Pending, Request, path};
use super::{Entry, Expected, Plan, SchedulerModel};

impl SchedulerModel {
    /// Judges a plan that `schedule` made; `token` gives the tokens that will be sampled.
    pub(crate) fn schedule(
        &mut self,
        scheduler: &Scheduler,
        plan: StepPlan,
        counts: &[(Handle, u32)],
        mut token: impl FnMut() -> i32,
    ) {
        let sizes = plan.sizes();
        let residents_before: Vec<Handle> = self.residents().map(|request| request.handle).collect();
        self.follow_preemptions(scheduler, &plan, counts);
        self.follow_returns(scheduler, &plan);
        let moved = self.follow_moves(&plan);
        let tokens: Vec<i32> = (0..sizes.num_samples).map(|_| token()).collect();
        let mut entries: Vec<Entry> = Vec::new();
        let mut drawn = 0;
        for s in 0..sizes.num_sequences as usize {
            let mut entry = self.enter(&plan, s, &entries);
            self.note_entry(&mut entry);
            drawn += if entry.drafts.is_empty() { entry.drawn.len() } else { entry.drafts.len() + 1 };
            entries.push(entry);
        }
        assert_eq!(drawn, tokens.len(), "one token per sample");
        self.check_rows(&entries);
        self.check_gangs(&entries);
        self.check_admissions(scheduler, &entries, &residents_before);
        self.check_bypass(&entries);
        self.check_blocked(&plan, &entries);
        self.check_progress(scheduler, &plan, &entries, &residents_before);
        let mut index = 0;
        for entry in &entries {
            let request = self.find_mut(entry.handle).expect("planned requests live");
            if !entry.drafts.is_empty() {
                request.samples[entry.sample].drafting = Some(plan.id());
                index += entry.drafts.len() + 1;
                continue;
            }
            for &sample in &entry.drawn {
                request.samples[sample].pending.push(Pending { plan: plan.id(), index, token: tokens[index] });
                index += 1;
            }
        }
        self.check_limits(&plan, &entries);
        let tables = (0..self.limits.groups.len()).map(|group| self.tables(scheduler, &plan, group)).collect();
        let tokens_before = self.plans.back().map_or(Vec::new(), |before| before.tokens.clone());
        let told = plan.i32s(Field::TableUpdates).chunks(4).filter(|update| update[3] == 0).count();
        self.events.note("null entries told", told as u64);
        let has_windows = self.limits.groups.iter().any(|group| group.window.is_some());
        let hits: usize = entries.iter().map(|entry| entry.num_hit_tokens).sum();
        self.events.note("hit tokens before a window", if has_windows { hits as u64 } else { 0 });
        self.events.note("tokens", u64::from(sizes.num_tokens));
        self.events.note("copies", plan.i32s(Field::Copies).len() as u64 / 2);
        self.plans.push_back(Plan { arrays: plan, entries, tokens, tokens_before, moved, tables, has_run: false });
    }

    /// The plan moves exactly what was accepted and awaits it; answers whose.
    fn follow_moves(&mut self, plan: &StepPlan) -> Vec<(Handle, usize, u32, usize)> {
        let mut expected = Vec::new();
        let mut moved = Vec::new();
        for request in &mut self.requests {
            for sample in request.live().collect::<Vec<_>>() {
                if let Some((from, moves)) = request.samples[sample].awaiting.take() {
                    expected.extend(moves);
                    moved.push((request.handle, sample, request.residence, from));
                }
            }
        }
        let slots = plan.i64s(Field::SlotMoves).chunks(3);
        let mut found: Vec<_> = slots.map(|slots| [slots[0], slots[1], slots[2]]).collect();
        self.events.note("moves", found.len() as u64);
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "the moves");
        moved
    }

    /// Follows one sequence of a plan into it.
    fn enter(&mut self, plan: &StepPlan, s: usize, entries: &[Entry]) -> Entry {
        let handle = Handle::new(plan.i64s(Field::Handles)[s]);
        let sample = plan.i32s(Field::Sequence)[s] as usize;
        let starts = plan.i32s(Field::QueryStartLoc);
        let end = plan.i32s(Field::SeqLens)[s] as usize;
        let num_tokens = (starts[s + 1] - starts[s]) as usize;
        let planned_twice = entries.iter().any(|entry| entry.handle == handle && entry.sample == sample);
        assert!(num_tokens > 0 && !planned_twice, "{handle:?} {sample} is planned twice or for nothing");
        let waits = self.plans.iter().flat_map(|plan| &plan.entries).any(|entry| entry.handle == handle);
        let groups = self.limits.groups;
        let previous = self.plans.back().map(|plan| plan.arrays.id());
        let request = self.requests.iter_mut().find(|request| request.handle == handle);
        let request = request.expect("only live requests are planned");
        assert!(request.transfer.is_none(), "{handle:?} is planned during a transfer");
        assert!(!(request.asked.needs_commit && waits), "{handle:?} is planned before the commit that it waits for");
        let is_admission = !request.is_resident;
        let has_blocks = request.is_keeper();
        if is_admission {
            assert!(!waits, "{handle:?} is admitted while a plan in flight is about it");
            request.admit();
            self.events.note("admissions", 1);
        }
        assert!(!request.is_held, "{handle:?} is held");
        assert!(request.sequences().contains(&sample), "{handle:?} {sample} has no sequence to plan");
        let before = request.num_scheduled(sample);
        let start = end - num_tokens;
        let num_hit_tokens = start.checked_sub(before).expect("nothing is computed twice");
        if is_admission && !has_blocks {
            let known = if request.has_parted { request.tokens(sample).len() } else { request.prompt_len() };
            let least = request.num_external.min(known - 1);
            assert!(num_hit_tokens >= least, "{handle:?} computes tokens that are outside");
        }
        let is_hit = groups.are_whole_at(before) && groups.are_whole_at(start);
        assert!(
            num_hit_tokens == 0 || is_hit && request.asked.use_prefix_cache,
            "{num_hit_tokens} tokens from the cache"
        );
        assert!(request.samples[sample].drafting.is_none(), "{handle:?} {sample} waits for a commit");
        let limit = request.limit(sample);
        let num_drafts = end.saturating_sub(limit);
        assert!(num_drafts <= request.num_drafts(sample), "{handle:?} {sample} runs to {end} of {limit}");
        let drafts = request.samples[sample].drafts[..num_drafts].to_vec();
        request.set_num_scheduled(sample, end);
        request.samples[sample].row = Some(plan.i32s(Field::Rows)[s]);
        if request.num_preemptions == 0 {
            request.num_cached_tokens += num_hit_tokens;
        }
        Self::check_inputs(plan, s, request, sample, previous);

        let completes_prompt = !request.has_parted && end == request.prompt_len();
        let mut tokens = request.tokens(sample);
        tokens.extend(drafts.iter().map(|node| node.token));
        let drawn: Vec<usize> = if request.has_parted {
            if end == tokens.len() { vec![sample] } else { vec![] }
        } else if completes_prompt {
            // One that had more tokens before goes on behind those.
            request.live().filter(|&sample| request.samples[sample].outputs.is_empty()).collect()
        } else {
            vec![]
        };
        let sample_starts = &plan.i32s(Field::SampleStartLoc)[s..s + 2];
        let sample_rows = &plan.i32s(Field::SampleRows)[sample_starts[0] as usize..sample_starts[1] as usize];
        let last = starts[s + 1] - 1;
        let expected_rows: Vec<i32> =
            if drafts.is_empty() { vec![last; drawn.len()] } else { (last - drafts.len() as i32..=last).collect() };
        assert_eq!(sample_rows, expected_rows, "the tokens from which {handle:?} {sample} draws");
        let request = request.clone();
        self.events.note("drafts", drafts.len() as u64);
        self.events.note("hit tokens", num_hit_tokens as u64);
        let num_known = tokens.len() - drafts.len();
        let mut histories = self.histories.of_tokens(&request.asked.identity, tokens[..num_known].iter().copied());
        let mut paths = Vec::new();
        for node in 0..drafts.len() {
            let path = path(&drafts, node);
            let guesses = path.iter().map(|&node| drafts[node].token);
            let all = tokens[..num_known].iter().copied().chain(guesses);
            histories.push(self.histories.of_tokens(&request.asked.identity, all).pop().expect("at least the guess"));
            paths.push(path.into_iter().map(|node| num_known + node).collect());
        }
        let is_tree = (-1..).zip(&drafts).any(|(before, node)| node.parent != before);
        self.events.note("trees", u64::from(is_tree));
        Entry {
            handle,
            sample,
            row: plan.i32s(Field::Rows)[s],
            residence: request.residence,
            before,
            end,
            num_hit_tokens,
            num_queried: 0,
            is_admission,
            completes_prompt,
            drawn,
            drafts,
            expected: Expected {
                request_id: request.asked.request_id.clone(),
                sample: sample as u32,
                tokens,
                histories,
                paths,
                is_tree,
            },
        }
    }

    /// A token that nobody knows yet comes from the plan before, by the number of its sample.
    fn check_inputs(plan: &StepPlan, s: usize, request: &Request, sample: usize, previous: Option<PlanId>) {
        let starts = plan.i32s(Field::QueryStartLoc);
        let num_known = request.prompt_len() + request.samples[sample].outputs.len();
        let num_sampled = num_known + request.samples[sample].pending.len();
        for t in starts[s] as usize..starts[s + 1] as usize {
            let position = plan.i32s(Field::Positions)[t] as usize;
            let from = plan.i32s(Field::InputFrom)[t];
            if position < num_known || position >= num_sampled {
                assert_eq!(from, -1, "the token at {position} is known");
            } else {
                let pending = request.samples[sample].pending[position - num_known];
                assert_eq!(Some(pending.plan), previous, "the token at {position} comes from an older plan");
                assert_eq!(from as usize, pending.index, "the token at {position} comes from another sample");
            }
        }
    }

    /// The host's view of the plan's tables in a group, in both forms.
    fn tables(&self, scheduler: &Scheduler, plan: &StepPlan, group: usize) -> Vec<Vec<i32>> {
        let num_sequences = plan.sizes().num_sequences as usize;
        let columns = self.limits.num_columns();
        let block_size = self.limits.groups[group].block_size;
        let mut padded = vec![-1; num_sequences * columns];
        scheduler.write_block_table(plan.id(), group, columns, &mut padded).expect("the plan is in flight");
        let len = |s: usize| (plan.i32s(Field::SeqLens)[s] as usize).div_ceil(block_size);
        let tables: Vec<_> = padded.chunks(columns).enumerate().map(|(s, row)| row[..len(s)].to_vec()).collect();
        let (mut indptr, mut last) = (vec![-1; num_sequences + 1], vec![-1; num_sequences]);
        let mut indices = vec![-1; padded.len()];
        let written = scheduler.write_csr(plan.id(), group, &mut indptr, &mut indices, &mut last);
        let total = written.expect("the plan is in flight");
        assert_eq!(indices[..total], tables.concat());
        for s in 0..num_sequences {
            assert_eq!((indptr[s + 1] - indptr[s]) as usize, len(s));
            let full = (len(s) - 1) * block_size;
            assert_eq!(full + last[s] as usize, plan.i32s(Field::SeqLens)[s] as usize, "tokens in the last block");
        }
        tables
    }
}
