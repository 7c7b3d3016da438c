//! A manager and its model, side by side.

use std::sync::Arc;

use pagedkv_core::{
    CacheConfig, ComputedBlocks, Error, EventConfig, EvictionPolicy, HashAlgorithm, Identity, ImageSpan,
    KVCacheManager, PlanId, RootKey, SequenceId,
};

use super::command::Command;
use crate::model::driven::Driven;
use crate::model::events::Events;
use crate::model::manager::ManagerModel;
use crate::model::memory::{Group, cache_config};
use crate::model::mirror::Mirrors;
use crate::model::random::two_tokens;

const MOST_SEQUENCES: usize = 6;
const MOST_PLANS: usize = 3;
/// Sizes of worlds, by number.
pub(crate) const NUM_WORLDS: usize = 3 * 16 * 8 * 8;

pub(crate) struct World {
    pub(crate) manager: KVCacheManager,
    pub(crate) model: ManagerModel,
    pub(crate) freed: Vec<SequenceId>,
    pub(crate) ended: Vec<PlanId>,
    pub(crate) kept: Option<(SequenceId, ComputedBlocks)>,
    /// Those who see nothing but events, where there are some.
    mirrors: Option<Mirrors>,
}

/// Plain text, mostly.
pub(crate) fn identity(number: u8) -> Arc<Identity> {
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
    fn new(
        groups: &[Group],
        num_blocks: usize,
        caching: bool,
        eviction_policy: EvictionPolicy,
        max_pending: Option<u32>,
    ) -> Self {
        let config = CacheConfig {
            enable_prefix_caching: caching,
            eviction_policy,
            events: max_pending.map(|max_pending| EventConfig {
                algorithm: HashAlgorithm::Xxh3_128,
                seed: "model".into(),
                max_pending,
            }),
            ..cache_config(groups, num_blocks)
        };
        Self {
            manager: KVCacheManager::new(&config).expect("a valid configuration"),
            model: ManagerModel::new(num_blocks, groups, caching),
            freed: Vec::new(),
            ended: Vec::new(),
            kept: None,
            mirrors: max_pending.map(|_| Mirrors::default()),
        }
    }

    /// A world of one of the sizes, by number: mostly of 4 to 8 blocks, and with a prefix cache.
    pub(crate) fn numbered(number: usize) -> Self {
        let usable = [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 8, 8, 8, 8][number / 3 % 16];
        let policies = [EvictionPolicy::Lru, EvictionPolicy::SegmentedLru, EvictionPolicy::Priority];
        let policy = policies[number / 48 % 3];
        let max_pending = [None, Some(100), None, Some(3), Some(100)][number % 5];
        let block_size = 1 + number % 3;
        let groups = Group::shaped([0, 0, 1, 2, 3, 4, 5, 6][number / 384 % 8], block_size);
        let usable = usable + 4 * (groups.len() - 1);
        Self::new(&groups, 1 + usable, !(number / 48).is_multiple_of(8), policy, max_pending)
    }

    pub(crate) fn sequence(&self, number: u8) -> Option<SequenceId> {
        let len = self.model.sequences.len();
        (len > 0).then(|| self.model.sequences[usize::from(number) % len].id)
    }

    /// The mirrors must know what the model knows.
    fn follow_events(&mut self) {
        let Some(mirrors) = &mut self.mirrors else { return };
        if let Some(known) = mirrors.follow(&mut self.manager, &mut self.model.events) {
            let hittable = self.model.hittable();
            assert_eq!(*known, hittable, "what the events told and what can be hit");
        }
    }

    fn run_on(&mut self, id: SequenceId, command: Command) {
        match command {
            Command::Append { length, tokens, .. } => self.append(id, length, tokens),
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

    pub(crate) fn append(&mut self, id: SequenceId, length: u8, tokens: u8) {
        let wanted = two_tokens(1 + usize::from(length % 3), tokens);
        let most = self.model.drafts_under(id, wanted.len());
        let num_accepted = usize::from(length) / 3 % (most + 1);
        let tokens = self.model.next_tokens(id, &wanted, num_accepted);
        self.invalid("num_accepted", |manager| manager.append_accepted(id, &tokens, most as u32 + 1));
        let appended = self.manager.append_accepted(id, &tokens, num_accepted as u32);
        appended.expect("a live sequence");
        self.model.append_tokens(id, &tokens, num_accepted);
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

    pub(crate) fn begin_plan(&mut self) {
        if self.model.in_flight().count() == MOST_PLANS {
            return self.commit();
        }
        let plan = self.manager.begin_plan();
        self.model.begin_plan(plan);
    }

    fn commit(&mut self) {
        let Some(plan) = self.model.oldest_plan() else {
            return self.begin_plan();
        };
        while let Some(id) = self.model.untold() {
            self.refused(Error::UntoldTokens(id.to_bits()), |manager| manager.commit(plan));
            let tokens = self.model.next_tokens(id, &[0], 0);
            self.manager.append_tokens(id, &tokens).expect("a live sequence");
            self.model.append_tokens(id, &tokens, 0);
        }
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

    pub(crate) fn digest(&self) -> String {
        format!("{:?}", self.manager)
    }

    /// Runs the world and the commands that these bytes stand for, to the end.
    #[allow(dead_code, reason = "the soak run has no bytes to replay")]
    pub(crate) fn replay(bytes: &[u8]) {
        let (head, commands) = bytes.split_at(bytes.len().min(3));
        let [low, high, number] = std::array::from_fn(|at| head.get(at).copied().unwrap_or(0));
        Self::numbered(usize::from(u16::from_le_bytes([low, high])) % NUM_WORLDS).live_bytes(commands, number.into());
    }
}

impl Driven for World {
    type Command = Command;

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
        self.follow_events();
    }

    /// Ends and frees everything: nothing may be left over.
    fn end(&mut self, number: usize) {
        while let Some(plan) = self.model.oldest_plan() {
            if number.is_multiple_of(2) {
                self.commit();
            } else {
                self.rollback(0);
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

    fn met(&self) -> &Events {
        &self.model.events
    }
}
