//! What is kept of a plan until it ends: its entries, one per sequence, and what it announced.

use super::drafts::Node;
use crate::ids::{Handle, PlanId};
use crate::step_plan::Change;

/// What is kept of a plan until it ends.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) id: PlanId,
    pub(super) entries: Vec<Entry>,
    /// The sample number of each sample drawn.
    pub(super) samples: Vec<u32>,
    /// The guesses that entries run.
    pub(super) nodes: Vec<Node>,
    pub(super) announced: Announcements,
    /// Cells that the plan's table updates named, those of new rows apart.
    pub(super) cells: Vec<Cell>,
}

impl InFlight {
    pub(super) fn empty() -> Self {
        Self {
            id: PlanId::new(0),
            entries: Vec::new(),
            samples: Vec::new(),
            nodes: Vec::new(),
            announced: Announcements::default(),
            cells: Vec::new(),
        }
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.samples.clear();
        self.nodes.clear();
        self.cells.clear();
        self.announced = Announcements::default();
    }
}

/// A sequence in a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) handle: Handle,
    pub(super) slot: u32,
    pub(super) sample: u32,
    pub(super) sequence: u32,
    pub(super) epoch: u32,
    pub(super) row: u32,
    /// The positions that run.
    pub(super) start: u32,
    pub(super) end: u32,
    /// Samples drawn, and the first of them among the plan's.
    pub(super) num_samples: u32,
    pub(super) first_sample: u32,
    /// The sample's newest draw before this plan.
    pub(super) drawn_before: (PlanId, u32),
    /// Tokens that came from the cache before `start`.
    pub(super) num_hit_tokens: u32,
    /// Preemptions of the request before.
    pub(super) num_preemptions: u32,
    /// Tokens that an admission looked for in the cache; 0 if it did not look.
    pub(super) num_queried: u32,
    /// Guesses among the positions that run; the last ones. Which, and whether they are no chain.
    pub(super) num_drafts: u32,
    pub(super) first_node: u32,
    pub(super) is_tree: bool,
    /// Whether the plan gave the request its seats.
    pub(super) is_admission: bool,
    /// Whether the prompt is complete and the samples fork when the plan commits.
    pub(super) completes_prompt: bool,
}

impl Entry {
    /// A growth of a sequence to compute these positions, and nothing else.
    pub(super) const fn new(
        handle: Handle,
        slot: u32,
        sequence: u32,
        epoch: u32,
        row: u32,
        positions: std::ops::Range<u32>,
    ) -> Self {
        Self {
            handle,
            slot,
            sample: 0,
            sequence,
            epoch,
            row,
            start: positions.start,
            end: positions.end,
            num_samples: 0,
            first_sample: 0,
            drawn_before: (PlanId::new(0), 0),
            num_hit_tokens: 0,
            num_preemptions: 0,
            num_queried: 0,
            num_drafts: 0,
            first_node: 0,
            is_tree: false,
            is_admission: false,
            completes_prompt: false,
        }
    }

    /// Whether all that its commit does is to give its sample a token.
    pub(super) const fn draws_one(&self) -> bool {
        self.num_samples == 1 && self.num_drafts == 0 && !self.completes_prompt
    }
}

/// What the next plan has to announce.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    /// Residences whose whole row must be sent.
    pub(super) new: Vec<(u32, u32)>,
    /// Cells that a plan which never ran had sent.
    pub(super) repeated: Vec<Cell>,
    pub(super) preempted: Vec<Departure>,
    pub(super) finished: Vec<Departure>,
    /// Transfers that no plan in flight, or one that never ran, has told.
    pub(super) transfers: Vec<i64>,
}

/// A sequence during one residence, and an entry of its block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cell {
    pub(super) sequence: u32,
    pub(super) epoch: u32,
    pub(super) group: u32,
    pub(super) column: u32,
}

/// A request's sample that lost its seat, or ended.
#[derive(Clone, Debug)]
pub(super) struct Departure {
    pub(super) handle: Handle,
    pub(super) sample: u32,
    pub(super) change: Change,
}
