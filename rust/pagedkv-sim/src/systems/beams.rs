//! The beams of running requests.

use hashbrown::HashMap;

use crate::survival::Survival;

/// The step that the beams of every running request are at.
#[derive(Debug)]
pub(super) struct Beams {
    survival: Survival,
    width: usize,
    steps: HashMap<u32, u32>,
}

impl Beams {
    pub(super) fn new(survival: Survival, width: u32) -> Self {
        Self { survival, width: width as usize, steps: HashMap::new() }
    }

    /// The beams from which a request's next ones continue, ascending.
    pub(super) fn step(&mut self, request: u32, parents: &mut Vec<u32>) {
        let step = self.steps.entry(request).or_insert(0);
        self.survival.step(request, *step, self.width, parents);
        *step += 1;
    }

    pub(super) fn end(&mut self, request: u32) {
        self.steps.remove(&request);
    }
}
