//! What can be done to a world.

#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Add {
        prompt: u8,
        output: u8,
        kind: u8,
    },
    Schedule {
        tokens: u8,
    },
    RunPlan,
    Draft {
        request: u8,
        sample: u8,
        tokens: u8,
    },
    TransfersDone {
        which: u8,
        outcome: u8,
    },
    Commit {
        outcome: u8,
    },
    Rollback {
        plan: u8,
    },
    Abort {
        request: u8,
        sample: u8,
    },
    Finish {
        request: u8,
        sample: u8,
    },
    ResetPrefixCache,
    InvalidateLora,
    Append {
        request: u8,
        sample: u8,
        tokens: u8,
    },
    Free {
        request: u8,
        sample: u8,
    },
    Hold {
        request: u8,
    },
    Release {
        request: u8,
    },
    Fork {
        request: u8,
        sample: u8,
        kind: u8,
    },
    /// A call that must be refused.
    Mistake {
        which: u8,
        target: u8,
    },
}

impl From<[u8; 4]> for Command {
    fn from([kind, a, b, c]: [u8; 4]) -> Self {
        match kind % 120 {
            0..16 => Self::Add { prompt: a, output: b, kind: c },
            16..47 => Self::Schedule { tokens: a },
            47..52 => Self::RunPlan,
            52..56 => Self::Draft { request: a, sample: b, tokens: c },
            56..61 => Self::TransfersDone { which: a, outcome: b },
            61..87 => Self::Commit { outcome: a },
            87..92 => Self::Rollback { plan: a },
            92..94 => Self::Abort { request: a, sample: b },
            94 => Self::Finish { request: a, sample: b },
            95 if a < 128 => Self::ResetPrefixCache,
            95 => Self::InvalidateLora,
            100..107 => Self::Append { request: a, sample: b, tokens: c },
            107 => Self::Free { request: a, sample: b },
            108..111 => Self::Hold { request: a },
            111..116 => Self::Release { request: a },
            116..120 => Self::Fork { request: a, sample: b, kind: c },
            _ => Self::Mistake { which: a, target: b },
        }
    }
}
