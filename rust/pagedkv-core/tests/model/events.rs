//! What happened, for tests that ask whether they met everything worth meeting.

use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Events(BTreeMap<&'static str, u64>);

impl Events {
    pub(crate) fn note(&mut self, name: &'static str, count: u64) {
        *self.0.entry(name).or_default() += count;
    }

    pub(crate) fn add(&mut self, others: &Self) {
        others.0.iter().for_each(|(name, &count)| self.note(name, count));
    }

    /// Each of these happened at least `least` times.
    pub(crate) fn assert_met(&self, names: &[&str], least: u64) {
        for name in names {
            let count = self.0.get(name).copied().unwrap_or(0);
            assert!(count >= least, "too few {name}: {self:?}");
        }
    }
}
