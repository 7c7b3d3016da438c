//! How long a step takes.

mod fitted;
mod profile;
mod roofline;
mod swap_link;

pub use fitted::Fitted;
pub use profile::{Profile, ProfileError, Sample};
pub use roofline::{Gpu, Model, Roofline};
pub use swap_link::SwapLink;

/// What a step does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Sequences that compute anything.
    pub num_seqs: u32,
    /// Tokens whose keys and values are read by sequences that compute one token.
    pub context_tokens: u64,
    /// Tokens of prompts, or computed anew after a preemption.
    pub prompt_tokens: u64,
    /// Pairs of a token that is computed in a prompt and one that it sees.
    pub prompt_pairs: u64,
    /// Tokens whose keys and values are copied within the device.
    pub copied_tokens: u64,
    /// Blocks that go to the host, or come from it.
    pub swapped_blocks: u64,
}

impl Work {
    /// Whether the step does nothing at all.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Adds a prompt, or a part of one, behind tokens that are there already.
    pub(crate) fn add_prompt(&mut self, tokens: u64, context: u64) {
        self.prompt_tokens += tokens;
        self.prompt_pairs += tokens * context + tokens * (tokens + 1) / 2;
    }
}

/// A machine and a model on it.
pub trait CostModel: Send + Sync {
    /// Seconds that a step takes, transfers to and from the host left out.
    fn step_seconds(&self, work: &Work) -> f64;
}
