//! The commands, and how often each comes.

/// What to do next. Numbers are taken modulo what there is, so that every command can be carried out in every state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Create {
        length: u8,
        tokens: u8,
        identity: u8,
    },
    Append {
        sequence: u8,
        length: u8,
        tokens: u8,
    },
    Fork {
        sequence: u8,
    },
    Truncate {
        sequence: u8,
        length: u8,
    },
    Free {
        sequence: u8,
    },
    BeginPlan,
    Grow {
        sequence: u8,
        length: u8,
        lookup: bool,
    },
    /// Keeps a lookup for later.
    LookUp {
        sequence: u8,
    },
    /// Grows by a lookup that was kept, for the sequence that it was made for or for another.
    GrowByKept {
        sequence: u8,
        length: u8,
    },
    RunPlan,
    Commit,
    Rollback {
        plan: u8,
    },
    ResetPrefixCache,
    /// A call that must be refused.
    Mistake {
        which: u8,
        target: u8,
    },
}

impl From<[u8; 4]> for Command {
    fn from([kind, a, b, c]: [u8; 4]) -> Self {
        match kind % 100 {
            0..13 => Self::Create { length: a, tokens: b, identity: c },
            13..21 => Self::Append { sequence: a, length: b, tokens: c },
            21..29 => Self::Fork { sequence: a },
            29..38 => Self::Truncate { sequence: a, length: b },
            38..46 => Self::Free { sequence: a },
            46..51 => Self::BeginPlan,
            51..75 => Self::Grow { sequence: a, length: b, lookup: c % 8 > 0 },
            75..77 => Self::LookUp { sequence: a },
            77..80 => Self::GrowByKept { sequence: a, length: b },
            80..83 => Self::RunPlan,
            83..93 => Self::Commit,
            93..96 => Self::Rollback { plan: a },
            96 if a < 128 => Self::ResetPrefixCache,
            _ => Self::Mistake { which: a, target: b },
        }
    }
}
