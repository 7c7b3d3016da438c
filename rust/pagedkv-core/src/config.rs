//! Validated configuration, and the only home of defaults.

use crate::cache_layout::CacheLayout;
use crate::error::{Error, Result, invalid};
use crate::events::EventConfig;

/// Tokens per block where nothing else is said, as in the paper.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// Sequences that may be resident at once where nothing else is said.
pub const DEFAULT_MAX_NUM_SEQS: u32 = 256;
/// Tokens per step where nothing else is said.
pub const DEFAULT_MAX_NUM_BATCHED_TOKENS: u32 = 8192;
/// Longest sequence where nothing else is said.
pub const DEFAULT_MAX_MODEL_LEN: u32 = 8192;
/// Overtakings that make a request due where nothing else is said.
pub const DEFAULT_AGEING: u32 = 256;
/// Plans that may be in flight where nothing else is said.
pub const DEFAULT_MAX_PLANS_IN_FLIGHT: u32 = 1;

/// Bytes of an element of each type that a cache may hold, by its torch name.
const ELEMENT_BYTES: [(&str, u64); 5] =
    [("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1)];

/// Ids, lengths and counts stay below this, so that sums of two fit in an `i32`.
const LIMIT: u32 = 1 << 30;

/// Layers of one shape that share a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// The model's layers in the group, ascending.
    pub layers: Vec<u32>,
    /// Key/value heads of each layer.
    pub num_kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Element type by its torch name, such as `"bfloat16"`.
    pub dtype: String,
    /// Tokens that a query sees, itself included; `None` for all.
    pub sliding_window: Option<u32>,
    /// Tokens per block; `None` for what [`CacheConfig::layout`] finds, from which it may not differ.
    pub block_size: Option<u32>,
}

impl GroupSpec {
    /// The first `num_layers` layers with full attention.
    pub fn new(num_layers: u32, num_kv_heads: u32, head_dim: u32, dtype: impl Into<String>) -> Self {
        let layers = (0..num_layers).collect();
        Self { layers, num_kv_heads, head_dim, dtype: dtype.into(), sliding_window: None, block_size: None }
    }

    /// Bytes that a token's key and value take in each layer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an element type that has no known size.
    pub fn token_bytes(&self) -> Result<u64> {
        let known = ELEMENT_BYTES.iter().find(|(name, _)| *name == self.dtype);
        let Some(&(_, bytes)) = known else {
            let names: Vec<_> = ELEMENT_BYTES.iter().map(|&(name, _)| name).collect();
            return invalid("dtype", format!("one of {}", names.join(", ")), format!("{:?}", self.dtype));
        };
        Ok(2 * u64::from(self.num_kv_heads) * u64::from(self.head_dim) * bytes)
    }
}

/// Which cached block is reused when no block is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictionPolicy {
    /// The one that was released first; prefixes outlive what continues them.
    #[default]
    Lru,
    /// As `Lru`, but those that were never hit go first: a prefix that is used once does not push out a proven one.
    SegmentedLru,
    /// The lowest priority first, and within one as `Lru`; see [`Retention`].
    Priority,
}

impl EvictionPolicy {
    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::SegmentedLru => "slru",
            Self::Priority => "priority",
        }
    }
}

impl std::str::FromStr for EvictionPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Self::Lru, Self::SegmentedLru, Self::Priority];
        let found = all.into_iter().find(|policy| policy.name() == name);
        found.map_or_else(
            || invalid("eviction_policy", format!("one of {:?}", all.map(Self::name)), format!("{name:?}")),
            Ok,
        )
    }
}

/// How long a request's blocks are to stay in the cache after it, under [`EvictionPolicy::Priority`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Retention {
    /// From 0, which goes first, to 100.
    pub priority: u8,
    /// Seconds after the release of a block for which the priority holds; infinite for good.
    pub seconds: f64,
}

impl Retention {
    /// The highest priority.
    pub const MAX_PRIORITY: u8 = 100;
    /// The priority of blocks for which nothing was asked; TensorRT-LLM's.
    pub const DEFAULT_PRIORITY: u8 = 35;

    /// # Errors
    /// [`Error::InvalidArgument`] for a priority above 100, or a time that is negative or not a number.
    pub fn validate(&self) -> Result<()> {
        if self.priority > Self::MAX_PRIORITY {
            return invalid("cache_priority", format!("0 to {}", Self::MAX_PRIORITY), self.priority);
        }
        if self.seconds.is_nan() || self.seconds < 0.0 {
            return invalid("cache_ttl", "seconds of at least 0", self.seconds);
        }
        Ok(())
    }
}

/// The pool and how prefixes are told apart in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Blocks of the pool, the null block included.
    pub num_blocks: u32,
    /// Tokens per block; in the group with the smallest blocks, where groups differ.
    pub block_size: u32,
    /// Seed of the prefix hashes. Give each tenant boundary that matters its own.
    pub hash_seed: u64,
    /// Whether prefixes are cached at all.
    pub enable_prefix_caching: bool,
    /// Which cached block is reused when no block is free.
    pub eviction_policy: EvictionPolicy,
    /// Blocks that pins may keep; they are kept from requests.
    pub pin_quota_blocks: u32,
    /// Every how-many-eth block is watched for the time that it holds what it holds; 0 for none.
    pub residency_sampling: u32,
    /// How events of the prefix cache are made; `None` for no events.
    pub events: Option<EventConfig>,
    /// Blocks of the host tier, for requests that are preempted by swap; 0 for none.
    pub num_host_blocks: u32,
    /// Cache groups; empty for bookkeeping alone.
    pub groups: Vec<GroupSpec>,
    /// Layers that each block has room for; `None` for the smallest layer count of a group.
    pub num_layer_slots: Option<u32>,
}

impl CacheConfig {
    /// A pool of `num_blocks` blocks, the null block included, with defaults for the rest.
    pub fn new(num_blocks: u32) -> Self {
        Self {
            num_blocks,
            block_size: DEFAULT_BLOCK_SIZE,
            hash_seed: 0,
            enable_prefix_caching: true,
            eviction_policy: EvictionPolicy::default(),
            pin_quota_blocks: 0,
            residency_sampling: 0,
            events: None,
            num_host_blocks: 0,
            groups: Vec::new(),
            num_layer_slots: None,
        }
    }

    /// Blocks that requests can be sure of.
    pub const fn usable_blocks(&self) -> u32 {
        self.num_blocks - 1 - self.pin_quota_blocks
    }

    /// The groups as the pool and the plans have them: split to equal numbers of layer slots, with their block sizes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a size out of range, a layer that is in no group or in two, an unknown element
    /// type, a block size other than equal bytes ask for, or more than a tenth of the layer slots without a layer;
    /// [`Error::Unsupported`] for groups whose blocks can't have equal bytes.
    pub fn layout(&self) -> Result<CacheLayout> {
        in_range("num_blocks", self.num_blocks, 2)?;
        in_range("block_size", self.block_size, 1)?;
        if let Some(events) = &self.events {
            in_range("max_pending_events", events.max_pending, 1)?;
        }
        if self.pin_quota_blocks > self.num_blocks - 2 {
            let expected = format!("at most {}, which leaves requests a block", self.num_blocks - 2);
            return invalid("pin_quota_blocks", expected, self.pin_quota_blocks);
        }
        in_range("num_host_blocks", self.num_host_blocks, 0)?;
        if u64::from(self.num_blocks) * u64::from(self.block_size) > i64::MAX as u64 {
            return invalid("num_blocks", "num_blocks x block_size to fit in 63 bits", self.num_blocks);
        }
        CacheLayout::new(self)
    }

    /// # Errors
    /// Those of [`Self::layout`].
    pub fn validate(&self) -> Result<()> {
        self.layout().map(drop)
    }
}

/// How requests are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower priorities first; they take seats and blocks from higher ones.
    Priority,
    /// The longest cached prefix first.
    LongestPrefixMatch,
    /// Weighted fair share per tenant.
    FairShare,
    /// By keys that the caller gives before each plan.
    External,
}

impl Policy {
    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Priority => "priority",
            Self::LongestPrefixMatch => "lpm",
            Self::FairShare => "fair",
            Self::External => "external",
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Self::Fcfs, Self::Priority, Self::LongestPrefixMatch, Self::FairShare, Self::External];
        let found = all.into_iter().find(|policy| policy.name() == name);
        found.map_or_else(|| invalid("policy", format!("one of {:?}", all.map(Self::name)), format!("{name:?}")), Ok)
    }
}

/// What becomes of the blocks of a request that is preempted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreemptionMode {
    /// They are dropped, but for what the prefix cache keeps, and computed again.
    #[default]
    Recompute,
    /// They go to the host tier and come back. A request that has not filled a block, or for which the host tier has no
    /// room, is computed again.
    Swap,
}

impl PreemptionMode {
    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::Swap => "swap",
        }
    }
}

impl std::str::FromStr for PreemptionMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Self::Recompute, Self::Swap];
        let found = all.into_iter().find(|mode| mode.name() == name);
        let expected = || format!("one of {:?}", all.map(Self::name));
        found.map_or_else(|| invalid("preemption_mode", expected(), format!("{name:?}")), Ok)
    }
}

/// Limits of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Seats: sequences that may be resident at once.
    pub max_num_seqs: u32,
    /// Tokens per step.
    pub max_num_batched_tokens: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u32,
    /// Share of the usable blocks that an admission leaves free while other requests run.
    pub watermark: f64,
    /// Most draft nodes per sequence.
    pub lookahead: u32,
    /// Plans that may be made before the oldest is ended.
    pub max_plans_in_flight: u32,
    /// What becomes of the blocks of a request that is preempted.
    pub preemption_mode: PreemptionMode,
    /// Order of requests.
    pub policy: Policy,
    /// Overtakings after which a request comes first; `None` is strict and may starve. See [`crate::scheduler`].
    pub ageing: Option<u32>,
    /// Weights of tenants under [`Policy::FairShare`]; 1 for those not named.
    pub tenant_weights: Vec<(String, f64)>,
    /// Most prompt tokens of one request per step; 0 for no limit but the budget.
    pub long_prefill_token_threshold: u32,
    /// Most requests that may be in the middle of their prompt.
    pub max_num_partial_prefills: u32,
    /// A chunk that does not end a prefill ends on a multiple of this many tokens.
    pub prefill_chunk_multiple: u32,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: DEFAULT_MAX_NUM_SEQS,
            max_num_batched_tokens: DEFAULT_MAX_NUM_BATCHED_TOKENS,
            max_model_len: DEFAULT_MAX_MODEL_LEN,
            watermark: 0.0,
            lookahead: 0,
            max_plans_in_flight: DEFAULT_MAX_PLANS_IN_FLIGHT,
            preemption_mode: PreemptionMode::default(),
            policy: Policy::default(),
            ageing: Some(DEFAULT_AGEING),
            tenant_weights: Vec::new(),
            long_prefill_token_threshold: 0,
            max_num_partial_prefills: LIMIT - 1,
            prefill_chunk_multiple: 1,
        }
    }
}

impl SchedulerConfig {
    /// Blocks that an admission leaves free.
    pub(crate) fn watermark_blocks(&self, usable_blocks: u32) -> u32 {
        (self.watermark * f64::from(usable_blocks)).ceil() as u32
    }

    /// # Errors
    /// [`Error::InvalidArgument`] for a limit out of range, [`Error::Unsupported`] for draft tokens.
    pub fn validate(&self) -> Result<()> {
        in_range("max_num_seqs", self.max_num_seqs, 1)?;
        in_range("max_num_batched_tokens", self.max_num_batched_tokens, 1)?;
        in_range("max_model_len", self.max_model_len, 1)?;
        in_range("max_plans_in_flight", self.max_plans_in_flight, 1)?;
        if !(0.0..1.0).contains(&self.watermark) {
            return invalid("watermark", "a share in [0, 1)", self.watermark);
        }
        for (tenant, weight) in &self.tenant_weights {
            if !(weight.is_finite() && *weight > 0.0) {
                return invalid("tenant_weights", "weights above 0", format!("{weight} for {tenant:?}"));
            }
        }
        in_range("max_num_partial_prefills", self.max_num_partial_prefills, 1)?;
        in_range("prefill_chunk_multiple", self.prefill_chunk_multiple, 1)?;
        let chunk = match self.long_prefill_token_threshold {
            0 => self.max_num_batched_tokens,
            threshold => threshold.min(self.max_num_batched_tokens),
        };
        if self.prefill_chunk_multiple > chunk {
            return invalid(
                "prefill_chunk_multiple",
                format!("1 to {chunk}, the largest chunk"),
                self.prefill_chunk_multiple,
            );
        }
        in_range("lookahead", self.lookahead, 0)?;
        Ok(())
    }
}

pub(crate) fn in_range(argument: &'static str, value: u32, least: u32) -> Result<()> {
    if (least..LIMIT).contains(&value) { Ok(()) } else { invalid(argument, format!("{least} to {}", LIMIT - 1), value) }
}
