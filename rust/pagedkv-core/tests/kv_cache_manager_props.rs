//! Random commands to the manager, right and wrong ones, against the naive model; every law after each of them.
//!
//! The worlds are tiny (two tokens, blocks of 1 to 3, at most 8 of them) so that sharing, copies, evictions and fences
//! are the rule and not the exception.

mod model;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use model::manager::{Events, ManagerModel, states};
use model::random::Random;
use pagedkv_core::{
    CacheConfig, ComputedBlocks, Error, Identity, ImageSpan, KVCacheManager, PlanId, RootKey, SequenceId,
};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

const MOST_SEQUENCES: usize = 6;
const MOST_PLANS: usize = 3;
/// Tokens that may be scheduled before anyone knows them.
const MOST_UNKNOWN: usize = 2;
/// Sizes of worlds, by number.
const NUM_WORLDS: usize = 3 * 16 * 8;

/// What to do next. Numbers are taken modulo what there is, so that every command can be carried out in every state.
#[derive(Clone, Copy, Debug)]
enum Command {
    Create {
        length: u8,
        tokens: u8,
        identity: u8,
    },
    Append {
        sequence: u8,
        length: u8,
        tokens: u8,
    },
    Fork {
        sequence: u8,
    },
    Truncate {
        sequence: u8,
        length: u8,
    },
    Free {
        sequence: u8,
    },
    BeginPlan,
    Grow {
        sequence: u8,
        length: u8,
        lookup: bool,
    },
    /// Keeps a lookup for later.
    LookUp {
        sequence: u8,
    },
    /// Grows by a lookup that was kept, for the sequence that it was made for or for another.
    GrowByKept {
        sequence: u8,
        length: u8,
    },
    RunPlan,
    Commit,
    Rollback {
        plan: u8,
    },
    ResetPrefixCache,
    /// A call that must be refused.
    Mistake {
        which: u8,
        target: u8,
    },
}

impl Command {
    fn decode([kind, a, b, c]: [u8; 4]) -> Self {
        match kind % 100 {
            0..13 => Self::Create { length: a, tokens: b, identity: c },
            13..21 => Self::Append { sequence: a, length: b, tokens: c },
            21..29 => Self::Fork { sequence: a },
            29..35 => Self::Truncate { sequence: a, length: b },
            35..46 => Self::Free { sequence: a },
            46..51 => Self::BeginPlan,
            51..75 => Self::Grow { sequence: a, length: b, lookup: c % 8 > 0 },
            75..77 => Self::LookUp { sequence: a },
            77..80 => Self::GrowByKept { sequence: a, length: b },
            80..83 => Self::RunPlan,
            83..93 => Self::Commit,
            93..96 => Self::Rollback { plan: a },
            96 if a < 128 => Self::ResetPrefixCache,
            _ => Self::Mistake { which: a, target: b },
        }
    }
}

struct World {
    manager: KVCacheManager,
    model: ManagerModel,
    freed: Vec<SequenceId>,
    ended: Vec<PlanId>,
    kept: Option<(SequenceId, ComputedBlocks)>,
    num_refused: u64,
}

/// `length` tokens of two kinds, by number; most numbers share long prefixes.
fn two_tokens(length: usize, number: u8) -> Vec<i32> {
    let bits = [0, 0, 0, 0b1000_0000, 0b0010_0000, 0b0000_1000, 0b0000_0001, number][usize::from(number % 8)];
    (0..length).map(|i| i32::from(bits >> (i % 8) & 1)).collect()
}

/// Plain text, mostly.
fn identity(number: u8) -> Arc<Identity> {
    let image = |start, len, digest: u8| ImageSpan { start, len, digest: [digest].into() };
    let (lora_id, cache_salt, images) = match number % 32 {
        0 => (Some(1), None, vec![]),
        1 => (None, Some([1, 0, 0, 0, 0, 0, 0, 0].into()), vec![]),
        2 => (Some(1), Some([1].into()), vec![]),
        3 => (None, None, vec![image(1, 2, 7)]),
        4 => (None, None, vec![image(2, 2, 7)]),
        5 => (None, None, vec![image(1, 2, 8), image(3, 1, 7)]),
        _ => (None, None, vec![]),
    };
    Arc::new(Identity { root: RootKey { lora_id, cache_salt }, images })
}

impl World {
    fn new(block_size: usize, num_blocks: usize, caching: bool) -> Self {
        let config = CacheConfig {
            block_size: block_size as u32,
            enable_prefix_caching: caching,
            ..CacheConfig::new(num_blocks as u32)
        };
        Self {
            manager: KVCacheManager::new(&config).expect("a valid configuration"),
            model: ManagerModel::new(num_blocks, block_size, caching),
            freed: Vec::new(),
            ended: Vec::new(),
            kept: None,
            num_refused: 0,
        }
    }

    /// A world of one of the sizes, by number: mostly of 4 to 8 blocks, and with a prefix cache.
    fn numbered(number: usize) -> Self {
        let usable = [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 8, 8, 8, 8][number / 3 % 16];
        Self::new(1 + number % 3, 1 + usable, !(number / 48).is_multiple_of(8))
    }

    fn sequence(&self, number: u8) -> Option<SequenceId> {
        let len = self.model.sequences.len();
        (len > 0).then(|| self.model.sequences[usize::from(number) % len].id)
    }

    fn run(&mut self, command: Command) {
        match command {
            Command::Create { length, tokens, identity } => self.create(length, tokens, identity),
            Command::BeginPlan => self.begin_plan(),
            Command::RunPlan => self.model.run_next_plan(),
            Command::Commit => self.commit(),
            Command::Rollback { plan } => self.rollback(plan),
            Command::ResetPrefixCache => {
                self.manager.reset_prefix_cache();
                self.model.reset_prefix_cache();
            }
            Command::Mistake { which, target } => self.mistake(which, target),
            Command::Append { sequence, .. }
            | Command::Fork { sequence }
            | Command::Truncate { sequence, .. }
            | Command::Free { sequence }
            | Command::Grow { sequence, .. }
            | Command::LookUp { sequence }
            | Command::GrowByKept { sequence, .. } => match self.sequence(sequence) {
                Some(id) => self.run_on(id, command),
                None => self.create(sequence, sequence, sequence),
            },
        }
        self.model.check(&self.manager);
    }

    fn run_on(&mut self, id: SequenceId, command: Command) {
        match command {
            Command::Append { length, tokens, .. } => {
                let tokens = self.model.next_tokens(id, &two_tokens(1 + usize::from(length % 3), tokens));
                self.manager.append_tokens(id, &tokens).expect("a live sequence");
                self.model.append_tokens(id, &tokens);
            }
            Command::Fork { .. } => self.fork(id),
            Command::Truncate { length, .. } => self.truncate(id, length),
            Command::Free { .. } => self.free(id),
            Command::Grow { length, lookup, .. } => {
                self.open_plan();
                let computed = if lookup { self.look_up(id) } else { ComputedBlocks::default() };
                self.grow(id, length, &computed);
            }
            Command::LookUp { .. } => self.kept = Some((id, self.look_up(id))),
            Command::GrowByKept { length, .. } => self.grow_by_kept(id, length),
            other => unreachable!("{other:?} concerns no sequence"),
        }
    }

    fn create(&mut self, length: u8, tokens: u8, number: u8) {
        if self.model.sequences.len() == MOST_SEQUENCES {
            let oldest = self.model.sequences[0].id;
            return self.free(oldest);
        }
        let tokens = two_tokens(1 + usize::from(length) % (4 * self.model.block_size), tokens);
        let uses_cache = number < 240;
        let identity = identity(number);
        let created = self.manager.create(tokens.as_slice().into(), identity.clone(), uses_cache);
        self.model.create(created.expect("valid arguments"), &tokens, &identity, uses_cache);
    }

    fn fork(&mut self, id: SequenceId) {
        if self.model.sequences.len() == MOST_SEQUENCES {
            return self.free(id);
        }
        if self.model.is_idle(id) {
            let child = self.manager.fork(id).expect("an idle sequence");
            self.model.fork(id, child);
        } else {
            self.refused(Error::SequenceInFlight(id.to_bits()), |manager| manager.fork(id));
        }
    }

    fn truncate(&mut self, id: SequenceId, length: u8) {
        let len = self.model.find(id).tokens.len();
        let num_tokens = 1 + usize::from(length) % len;
        if self.model.is_idle(id) {
            let done = self.manager.truncate(id, num_tokens as u32);
            done.expect("an idle sequence");
            self.model.truncate(id, num_tokens);
        } else {
            let error = Error::SequenceInFlight(id.to_bits());
            self.refused(error, |manager| manager.truncate(id, num_tokens as u32));
        }
    }

    fn free(&mut self, id: SequenceId) {
        self.manager.free(id).expect("a live sequence");
        self.model.free(id);
        self.freed.push(id);
    }

    fn begin_plan(&mut self) {
        if self.model.in_flight().count() == MOST_PLANS {
            return self.commit();
        }
        let plan = self.manager.begin_plan();
        self.model.begin_plan(plan);
    }

    /// The newest plan, ready for growth: a plan that ran already is closed.
    fn open_plan(&mut self) {
        if self.model.num_plans_to_run() == 0 {
            self.begin_plan();
        }
        if self.model.num_plans_to_run() == 0 {
            self.begin_plan();
        }
    }

    fn look_up(&self, id: SequenceId) -> ComputedBlocks {
        let computed = self.manager.get_computed_blocks(id).expect("a live sequence");
        assert_eq!(computed.blocks().len(), self.model.num_hits(id), "the hits of {id:?}");
        assert_eq!(computed.num_tokens() as usize, computed.blocks().len() * self.model.block_size);
        self.model.check_hits(id, computed.blocks());
        computed
    }

    fn grow(&mut self, id: SequenceId, length: u8, computed: &ComputedBlocks) {
        let sequence = self.model.find(id);
        let start = sequence.num_scheduled + computed.num_tokens() as usize;
        let most = (sequence.tokens.len() + MOST_UNKNOWN).saturating_sub(start);
        if most == 0 {
            return;
        }
        let num_new_tokens = 1 + usize::from(length) % most;
        let states = states(&self.manager);
        let before = self.digest();
        let answer = self.manager.allocate_slots(id, num_new_tokens as u32, computed);
        let answer = answer.expect("the lookup is fresh");
        if answer.is_none() {
            assert_eq!(self.digest(), before, "a refusal for want of room changed something");
        }
        self.model.grow(id, num_new_tokens, computed.blocks(), &states, answer.as_ref());
    }

    /// A lookup that was kept is refused, or it still holds.
    fn grow_by_kept(&mut self, id: SequenceId, length: u8) {
        let Some((owner, computed)) = self.kept.take() else {
            return;
        };
        if self.model.num_plans_to_run() == 0 {
            return;
        }
        let is_known = self.model.sequences.iter().any(|sequence| sequence.id == owner);
        let target = if is_known && !length.is_multiple_of(4) { owner } else { id };
        let before = self.digest();
        if target != owner && computed.num_tokens() > 0 {
            let error = Error::StaleComputedBlocks;
            return self.refused(error, |manager| manager.allocate_slots(target, 1, &computed));
        }
        let start = self.model.find(target).num_scheduled + computed.num_tokens() as usize;
        if start >= self.model.find(target).tokens.len() + MOST_UNKNOWN {
            return;
        }
        let states = states(&self.manager);
        match self.manager.allocate_slots(target, 1, &computed) {
            Ok(answer) => {
                self.model.check_hits(target, computed.blocks());
                self.model.grow(target, 1, computed.blocks(), &states, answer.as_ref());
            }
            Err(error) => {
                assert_eq!(error, Error::StaleComputedBlocks);
                assert!(computed.num_tokens() > 0, "nothing found cannot be stale");
                assert_eq!(self.digest(), before, "a refused call changed something");
                self.num_refused += 1;
            }
        }
    }

    fn commit(&mut self) {
        let Some(plan) = self.model.oldest_plan() else {
            return self.begin_plan();
        };
        // The device runs the plan at the latest now.
        self.manager.commit(plan).expect("the oldest plan");
        self.model.commit();
        self.ended.push(plan);
    }

    fn rollback(&mut self, number: u8) {
        let plans: Vec<_> = self.model.in_flight().collect();
        if plans.is_empty() {
            return self.begin_plan();
        }
        let first = usize::from(number) % plans.len();
        self.manager.rollback(plans[first]).expect("a plan in flight");
        self.model.rollback(plans[first]);
        self.ended.extend(&plans[first..]);
    }

    fn digest(&self) -> String {
        format!("{:?}", self.manager)
    }

    fn refused<T: std::fmt::Debug>(
        &mut self,
        error: Error,
        call: impl FnOnce(&mut KVCacheManager) -> pagedkv_core::Result<T>,
    ) {
        let before = self.digest();
        let answer = call(&mut self.manager);
        assert_eq!(answer.map_err(|refused| (refused, ())).err(), Some((error, ())));
        assert_eq!(self.digest(), before, "a refused call changed something");
        self.num_refused += 1;
    }

    fn invalid<T: std::fmt::Debug>(
        &mut self,
        argument: &'static str,
        call: impl FnOnce(&mut KVCacheManager) -> pagedkv_core::Result<T>,
    ) {
        let before = self.digest();
        let answer = call(&mut self.manager);
        let refused = matches!(&answer, Err(Error::InvalidArgument { argument: found, .. }) if *found == argument);
        assert!(refused, "{argument}: {answer:?}");
        assert_eq!(self.digest(), before, "a refused call changed something");
        self.num_refused += 1;
    }

    fn mistake(&mut self, which: u8, target: u8) {
        let stale = (!self.freed.is_empty()).then(|| self.freed[usize::from(target) % self.freed.len()]);
        if let (0..6, Some(stale)) = (which % 16, stale) {
            return self.mistake_about_a_freed_sequence(which % 16, stale);
        }
        match (which % 16, self.sequence(target)) {
            (6, Some(id)) if self.model.is_idle(id) => {
                let too_many = self.model.find(id).tokens.len() as u32 + 1;
                self.invalid("num_tokens", |manager| manager.truncate(id, 0));
                self.invalid("num_tokens", |manager| manager.truncate(id, too_many));
            }
            (7, Some(id)) if self.model.in_flight().count() > 0 => {
                self.invalid("num_new_tokens", |manager| manager.allocate_slots(id, 0, &ComputedBlocks::default()));
            }
            (8, Some(id)) if self.model.in_flight().count() > 0 => {
                self.invalid("num_new_tokens", |manager| {
                    manager.allocate_slots(id, u32::MAX, &ComputedBlocks::default())
                });
            }
            (9, Some(id)) if self.model.in_flight().count() == 0 => {
                self.refused(Error::NoPlan, |manager| manager.allocate_slots(id, 1, &ComputedBlocks::default()));
            }
            (10, _) => self.invalid("tokens", |manager| manager.create([].into(), identity(0), true)),
            (11, _) => self.create_with_bad_images(target),
            _ => self.mistake_about_a_plan(target),
        }
    }

    fn mistake_about_a_freed_sequence(&mut self, which: u8, stale: SequenceId) {
        let error = Error::UnknownSequence(stale.to_bits());
        match which {
            0 => self.refused(error, |manager| manager.free(stale)),
            1 => self.refused(error, |manager| manager.fork(stale)),
            2 => self.refused(error, |manager| manager.truncate(stale, 1)),
            3 => self.refused(error, |manager| manager.append_tokens(stale, &[0])),
            4 => self.refused(error, |manager| manager.get_computed_blocks(stale)),
            _ => self.refused(error, |manager| manager.allocate_slots(stale, 1, &ComputedBlocks::default())),
        }
    }

    fn create_with_bad_images(&mut self, which: u8) {
        let image = |start, len| ImageSpan { start, len, digest: [0].into() };
        let images = match which % 4 {
            0 => vec![image(0, 0)],
            1 => vec![image(2, 2), image(3, 1)],
            2 => vec![image(4, 1), image(0, 1)],
            _ => vec![image(u32::MAX, 1)],
        };
        let identity = Arc::new(Identity { root: RootKey::default(), images });
        self.invalid("image_spans", |manager| manager.create([0, 1].into(), identity, true));
    }

    fn mistake_about_a_plan(&mut self, number: u8) {
        let plans: Vec<_> = self.model.in_flight().collect();
        if let (&[oldest, .., newest], 0) = (plans.as_slice(), number % 2) {
            let error = Error::PlanOutOfOrder { found: newest, oldest };
            return self.refused(error, |manager| manager.commit(newest));
        }
        let newest = self.ended.iter().chain(&plans).map(|plan| plan.get()).max().unwrap_or(0);
        let never = PlanId::new(newest + 1 + u64::from(number));
        let ended = self.ended.get(usize::from(number) % self.ended.len().max(1));
        let plan = *ended.filter(|_| !number.is_multiple_of(3)).unwrap_or(&never);
        self.refused(Error::PlanNotInFlight(plan), |manager| manager.commit(plan));
        self.refused(Error::PlanNotInFlight(plan), |manager| manager.rollback(plan));
    }

    /// Ends and frees everything: nothing may be left over.
    fn drain(&mut self, rolls_back: bool) {
        while let Some(plan) = self.model.oldest_plan() {
            if rolls_back {
                self.rollback(0);
            } else {
                self.commit();
            }
            assert!(self.model.in_flight().all(|other| other != plan));
            self.model.check(&self.manager);
        }
        while let Some(id) = self.sequence(0) {
            self.free(id);
            self.model.check(&self.manager);
        }
        self.model.check_empty(&self.manager);
    }
}

fn sum(total: &mut Events, events: &Events) {
    total.hit_blocks += events.hit_blocks;
    total.hits_in_flight += events.hits_in_flight;
    total.hits_on_fenced += events.hits_on_fenced;
    total.copies += events.copies;
    total.copies_for_the_cache += events.copies_for_the_cache;
    total.refusals += events.refusals;
    total.evictions += events.evictions;
    total.undone_growths += events.undone_growths;
    total.undone_after_running += events.undone_after_running;
    total.fenced_blocks += events.fenced_blocks;
}

/// Runs worlds of 250 commands each; what fails names the seed, the world and the command.
fn run_worlds(seed: u64, num_worlds: usize) -> (Events, u64) {
    let (mut total, mut num_refused) = (Events::default(), 0);
    for number in 0..num_worlds {
        let mut random = Random::new(seed.wrapping_add(number as u64));
        let mut world = World::numbered(random.below(NUM_WORLDS));
        for step in 0..250 {
            let command = Command::decode(random.bytes());
            let outcome = catch_unwind(AssertUnwindSafe(|| world.run(command)));
            assert!(outcome.is_ok(), "seed {seed}, world {number}, step {step}: {command:?}");
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| world.drain(number % 2 > 0)));
        assert!(outcome.is_ok(), "seed {seed}, world {number}: at the end");
        sum(&mut total, &world.model.events);
        num_refused += world.num_refused;
    }
    (total, num_refused)
}

fn check_volume(seed: u64) {
    let (events, num_refused) = run_worlds(seed, 2000);
    let met = [
        events.hit_blocks,
        events.hits_in_flight,
        events.hits_on_fenced,
        events.copies,
        events.copies_for_the_cache,
        events.refusals,
        events.evictions,
        events.undone_growths,
        events.undone_after_running,
        events.fenced_blocks,
        num_refused,
    ];
    assert!(met.iter().all(|&count| count >= 100), "too little happens: {events:?}, {num_refused} refused");
}

#[test]
fn kv_cache_manager_agrees_with_the_model_over_500_000_commands() {
    check_volume(0x5eed_0000_0000);
}

#[test]
fn kv_cache_manager_agrees_with_the_model_over_another_500_000_commands() {
    check_volume(0x5eed_0001_0000);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn kv_cache_manager_agrees_with_the_model(
        world in 0..NUM_WORLDS,
        commands in prop::collection::vec(any::<[u8; 4]>().prop_map(Command::decode), 0..120),
        rolls_back: bool,
    ) {
        let mut world = World::numbered(world);
        commands.into_iter().for_each(|command| world.run(command));
        world.drain(rolls_back);
    }
}
