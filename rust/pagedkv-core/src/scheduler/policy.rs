//! Who comes first: policies give keys, and the scheduler turns keys into an order that starves nobody.
//!
//! A policy gives each request a key when it comes in, and may change the keys of waiting requests once per plan; lower
//! keys come first, equal keys in the order of arrival. On top of every policy stands *ageing*: a request that was
//! overtaken too often is *due*. Due requests come before all others, in the order of arrival, whatever their keys, and
//! stay due until they end. So waiting, bypass and preemptions are bounded, without a clock:
//!
//! a request that arrives when `a` requests had been admitted and `w` were waiting is due as soon as `a + w + ageing`
//! were admitted. With `ageing = None` the policy is strict and may starve.

use std::collections::HashMap;

use crate::ids::Handle;

/// What a policy sees of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'a> {
    /// Its handle; handles rise in the order of arrival.
    pub handle: Handle,
    /// Its priority; lower is more urgent.
    pub priority: i32,
    /// Whose it is.
    pub tenant: Option<&'a str>,
    /// When it arrived, in the caller's seconds.
    pub arrival: f64,
    /// Tokens known: the prompt, and what was sampled before a preemption.
    pub num_tokens: u32,
    /// Most tokens that its samples may still need, the known ones included.
    pub max_tokens: u64,
    /// Known tokens that the prefix cache holds; 0 unless the policy [wants them](OrderPolicy::wants_hits).
    pub num_hit_tokens: u32,
}

/// Gives requests their keys.
pub trait OrderPolicy: std::fmt::Debug + Send {
    /// The key of a request that comes in, or of a session's next turn. Lower comes first; NaN comes last.
    fn arrival_key(&mut self, request: &RequestView<'_>) -> f64;

    /// Whether [`Self::waiting_key`] is asked before each plan.
    fn is_dynamic(&self) -> bool {
        false
    }

    /// Whether views must say how many tokens the prefix cache holds.
    fn wants_hits(&self) -> bool {
        false
    }

    /// The key of a request that waits, asked once per plan where [`Self::is_dynamic`].
    fn waiting_key(&mut self, request: &RequestView<'_>, key: f64) -> f64 {
        let _ = request;
        key
    }

    /// A request got its seats.
    fn admitted(&mut self, request: &RequestView<'_>, key: f64) {
        let _ = (request, key);
    }

    /// A request ended and left this many of its tokens unused.
    fn ended(&mut self, request: &RequestView<'_>, num_unused_tokens: u64) {
        let _ = (request, num_unused_tokens);
    }
}

/// First come, first served.
#[derive(Debug)]
pub(super) struct FirstComeFirstServed;

impl OrderPolicy for FirstComeFirstServed {
    fn arrival_key(&mut self, _: &RequestView<'_>) -> f64 {
        0.0
    }
}

/// Lower priorities first. A more urgent request takes seats and blocks from less urgent ones.
#[derive(Debug)]
pub(super) struct ByPriority;

impl OrderPolicy for ByPriority {
    fn arrival_key(&mut self, request: &RequestView<'_>) -> f64 {
        f64::from(request.priority)
    }
}

/// The longest cached prefix first.
#[derive(Debug)]
pub(super) struct LongestPrefixMatch;

impl OrderPolicy for LongestPrefixMatch {
    fn arrival_key(&mut self, _: &RequestView<'_>) -> f64 {
        0.0
    }

    fn is_dynamic(&self) -> bool {
        true
    }

    fn wants_hits(&self) -> bool {
        true
    }

    fn waiting_key(&mut self, request: &RequestView<'_>, _: f64) -> f64 {
        -f64::from(request.num_hit_tokens)
    }
}

/// Keys that the caller gives before each plan; requests that it has not seen come last.
#[derive(Debug)]
pub(super) struct External;

impl OrderPolicy for External {
    fn arrival_key(&mut self, _: &RequestView<'_>) -> f64 {
        f64::INFINITY
    }
}

/// Weighted fair share per tenant, by start tags (start-time fair queueing): a tenant's next request starts, in virtual
/// time, where its last one ends or where service is now, whichever is later, and lasts as long as its tokens over the
/// tenant's weight. What a request leaves unused is given back to its tenant.
#[derive(Debug)]
pub(super) struct FairShare {
    weights: HashMap<String, f64>,
    ends: HashMap<String, f64>,
    now: f64,
    prune_at: usize,
}

impl FairShare {
    pub(super) fn new(weights: &[(String, f64)]) -> Self {
        Self { weights: weights.iter().cloned().collect(), ends: HashMap::new(), now: 0.0, prune_at: 64 }
    }

    fn weight(&self, tenant: &str) -> f64 {
        self.weights.get(tenant).copied().unwrap_or(1.0)
    }
}

impl OrderPolicy for FairShare {
    fn arrival_key(&mut self, request: &RequestView<'_>) -> f64 {
        let tenant = request.tenant.unwrap_or_default();
        let start = self.ends.get(tenant).copied().unwrap_or(0.0).max(self.now);
        let end = start + request.max_tokens as f64 / self.weight(tenant);
        self.ends.insert(tenant.to_owned(), end);
        start
    }

    fn admitted(&mut self, _: &RequestView<'_>, key: f64) {
        self.now = self.now.max(key);
        if self.ends.len() >= self.prune_at {
            // A tenant whose last request ends in the past of virtual time starts at the present one anyway.
            let now = self.now;
            self.ends.retain(|_, end| *end > now);
            self.prune_at = 2 * self.ends.len().max(32);
        }
    }

    fn ended(&mut self, request: &RequestView<'_>, num_unused_tokens: u64) {
        let tenant = request.tenant.unwrap_or_default();
        let given_back = num_unused_tokens as f64 / self.weight(tenant);
        if let Some(end) = self.ends.get_mut(tenant) {
            *end -= given_back;
        }
    }
}

/// A request's place among all; lower comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Order {
    not_due: bool,
    key: i64,
    /// Number of the arrival: that of a session's next turn is a new one.
    arrival: u64,
}

impl Order {
    pub(super) fn is_due(&self) -> bool {
        !self.not_due
    }

    pub(super) fn new(key: f64, is_due: bool, arrival: u64) -> Self {
        Self { not_due: !is_due, key: if is_due { 0 } else { total_order(key) }, arrival }
    }
}

/// An integer that orders as `f64::total_cmp` does, with every NaN last and both zeros the same.
fn total_order(key: f64) -> i64 {
    if key.is_nan() {
        return i64::MAX;
    }
    let bits = (key + 0.0).to_bits() as i64;
    bits ^ (((bits >> 63) as u64) >> 1) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_numbers_and_nan_comes_last() {
        let keys = [f64::NEG_INFINITY, -3.5, -1.0, 0.0, 2.0, 1e300, f64::INFINITY, f64::NAN];
        assert!(keys.is_sorted_by_key(|&key| total_order(key)));
        assert_eq!(total_order(-0.0), total_order(0.0));
    }

    #[test]
    fn a_due_request_comes_before_any_key() {
        let due = Order::new(5.0, true, 9);
        assert!(due < Order::new(f64::NEG_INFINITY, false, 1));
    }

    #[test]
    fn fair_share_gives_start_tags_by_weight() {
        let mut policy = FairShare::new(&[("gold".into(), 2.0)]);
        let view = |tenant| RequestView {
            handle: Handle::new(0),
            priority: 0,
            tenant: Some(tenant),
            arrival: 0.0,
            num_tokens: 4,
            max_tokens: 10,
            num_hit_tokens: 0,
        };
        let mut key = |tenant| policy.arrival_key(&view(tenant)) as i64;
        assert_eq!([key("gold"), key("gold"), key("gold")], [0, 5, 10]);
        assert_eq!([key("plain"), key("plain")], [0, 10]);
    }
}
