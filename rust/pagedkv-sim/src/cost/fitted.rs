//! A straight line through the paper's own figures.

use super::{CostModel, Work};

/// Seconds as a linear function of what a step does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fitted {
    /// Of every step.
    pub base: f64,
    /// Of every sequence.
    pub per_seq: f64,
    /// Of every token that is read.
    pub per_context_token: f64,
    /// Of every token of a prompt.
    pub per_prompt_token: f64,
    /// Of every token whose keys and values are copied.
    pub per_copied_token: f64,
}

impl Fitted {
    /// OPT-13B on an A100 with 40 GB.
    ///
    /// Not from the paper: fitted to the batches of its Figure 13 (by Little's law) and to the rates at which its
    /// baselines give way. Reading a token's 800 KB at 1.3 TB/s takes 0.63 us; copying one reads and writes them.
    pub const OPT_13B_A100: Self = Self {
        base: 23e-3,
        per_seq: 0.33e-3,
        per_context_token: 0.63e-6,
        per_prompt_token: 0.15e-3,
        per_copied_token: 2.0 * 0.63e-6,
    };
}

impl CostModel for Fitted {
    fn step_seconds(&self, work: &Work) -> f64 {
        let parts = [
            self.per_seq * f64::from(work.num_seqs),
            self.per_context_token * work.context_tokens as f64,
            self.per_prompt_token * work.prompt_tokens as f64,
            self.per_copied_token * work.copied_tokens as f64,
        ];
        let computes = work.num_seqs > 0;
        parts.iter().sum::<f64>() + if computes { self.base } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_sequences_of_the_paper_take_about_45_milliseconds() {
        // The mean context of a running ShareGPT request is 460 tokens; one prompt of 161 comes every 11 steps.
        let work = Work { num_seqs: 30, context_tokens: 30 * 460, prompt_tokens: 15, ..Work::default() };
        let seconds = Fitted::OPT_13B_A100.step_seconds(&work);
        assert!((0.040..0.050).contains(&seconds), "{seconds}");
    }

    #[test]
    fn a_step_without_work_takes_no_time() {
        assert!(Fitted::OPT_13B_A100.step_seconds(&Work::default()).abs() < f64::EPSILON);
    }
}
