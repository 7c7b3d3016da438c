//! Joins the partial results of a tile whose keys were cut.

use std::sync::OnceLock;

use super::kernel::{Kernel, Partial};
use super::plan::Merge;
use crate::math;

/// Merges the partials in the order of their keys and writes the tile.
///
/// # Panics
///
/// If a partial is missing.
pub(super) fn run(kernel: &Kernel<'_>, merge: &Merge, partials: &[OnceLock<Partial>]) {
    let parts = &partials[merge.partials.clone()];
    let part = |i: usize| parts[i].get().expect("broken law: a partial result is missing");
    let mut merged = part(0).clone();
    for i in 1..parts.len() {
        merged.join(part(i));
    }
    kernel.finish(&merge.tile, &merged);
}

impl Partial {
    fn join(&mut self, other: &Self) {
        let head_dim = self.acc.len() / self.max.len();
        let rows = self.acc.chunks_exact_mut(head_dim).zip(other.acc.chunks_exact(head_dim));
        for (r, (acc, other_acc)) in rows.enumerate() {
            if other.max[r] == f32::NEG_INFINITY {
                // No score, or none but NaN, which must stay visible.
                self.sum[r] += other.sum[r];
                continue;
            }
            let max = self.max[r].max(other.max[r]);
            let mine = math::exp(self.max[r] - max);
            let theirs = math::exp(other.max[r] - max);
            self.max[r] = max;
            self.sum[r] = self.sum[r] * mine + other.sum[r] * theirs;
            for (a, b) in acc.iter_mut().zip(other_acc) {
                *a = *a * mine + b * theirs;
            }
        }
    }
}
