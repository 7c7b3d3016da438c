//! Which beams survive a step: what a simulation of beam search needs to know and a trace of lengths does not say.
//!
//! The model is neutral drift: in each step every beam, with probability `turnover`, goes on from another one drawn at
//! random, and otherwise from itself. So no beam is better than the others for long, and two of `k` beams have had a common
//! ancestor some `(k - 1) / turnover / 2` steps ago: the more beams, the further back, as in the paper's figures. What is drawn
//! depends on the seed, the request and the step alone, so that every system sees the same beams.

use crate::error::{Result, invalid};
use crate::random::Random;

/// The model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Survival {
    /// Chance that a beam goes on from another one, drawn at random.
    pub turnover: f64,
    /// Seed of what is drawn.
    pub seed: u64,
}

impl Survival {
    /// The turnover with which the savings of the paper's Figure 15 (Alpaca, beams) come out; see `docs/paper.md`.
    pub const DEFAULT_TURNOVER: f64 = 0.07;

    /// # Errors
    /// [`crate::SimError::InvalidArgument`] for a turnover that is no chance.
    pub fn validate(&self) -> Result<()> {
        if (0.0..=1.0).contains(&self.turnover) {
            return Ok(());
        }
        invalid("beam_turnover", "a chance from 0 to 1", self.turnover)
    }

    /// The beams from which the next ones continue, ascending.
    pub fn step(&self, request: u32, step: u32, width: usize, parents: &mut Vec<u32>) {
        let mut random = Random::of(self.seed, u64::from(request) << 32 | u64::from(step));
        parents.clear();
        parents.extend((0..width as u32).map(|own| {
            if width == 1 || random.uniform() >= self.turnover {
                return own;
            }
            let other = random.below(width - 1) as u32;
            other + u32::from(other >= own)
        }));
        parents.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survivors(turnover: f64) -> f64 {
        let survival = Survival { turnover, seed: 1 };
        let mut parents = Vec::new();
        let mut distinct = 0;
        for step in 0..500 {
            survival.step(3, step, 4, &mut parents);
            assert_eq!(parents.len(), 4);
            parents.dedup();
            distinct += parents.len();
        }
        f64::from(distinct as u32) / 500.0
    }

    #[test]
    fn fewer_beams_survive_with_more_turnover() {
        assert!((survivors(0.0) - 4.0).abs() < f64::EPSILON);
        assert!(survivors(1.0) < survivors(0.2));
        // Of four beams, 4 x (1 - (2/3)^3) are drawn by one of the three others.
        assert!((survivors(1.0) - 2.815).abs() < 0.15, "{}", survivors(1.0));
    }

    #[test]
    fn a_single_beam_goes_on_from_itself() {
        let mut parents = Vec::new();
        Survival { turnover: 1.0, seed: 1 }.step(3, 0, 1, &mut parents);
        assert_eq!(parents, [0]);
    }

    #[test]
    fn a_step_depends_on_the_request_and_the_step_alone() {
        let survival = Survival { turnover: 0.5, seed: 5 };
        let run = |request, step| {
            let mut parents = vec![7];
            survival.step(request, step, 6, &mut parents);
            parents
        };
        assert_eq!(run(9, 4), run(9, 4));
        assert!((0..20).any(|step| run(9, step) != run(8, step)));
    }

    #[test]
    fn a_turnover_above_one_is_refused() {
        let error = Survival { turnover: 1.5, seed: 0 }.validate().unwrap_err().to_string();
        assert_eq!(error, "beam_turnover: expected a chance from 0 to 1, found 1.5");
    }
}
