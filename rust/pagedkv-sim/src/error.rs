//! What can be wrong with a simulation.

/// A simulation that cannot be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// An argument outside its range.
    #[error("{argument}: expected {expected}, found {found}")]
    InvalidArgument {
        /// Name of the argument.
        argument: &'static str,
        /// What it must be.
        expected: String,
        /// What came.
        found: String,
    },
    /// A request that the system could never run.
    #[error("request {index}{}: {field}: expected {expected}, found {found}", at_line(*.line))]
    InvalidRequest {
        /// Place of the request in its workload.
        index: u32,
        /// Line of the file that it came from; 0 for none.
        line: u32,
        /// What is wrong with it.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What came.
        found: String,
    },
    /// Requests wait, nothing runs, and nothing more will come.
    #[error("nothing runs at {seconds:.3} s while {num_unfinished} requests wait: a bug of the simulator")]
    Stalled {
        /// When.
        seconds: f64,
        /// How many wait.
        num_unfinished: usize,
    },
    /// What the core refuses.
    #[error(transparent)]
    Core(#[from] pagedkv_core::Error),
}

fn at_line(line: u32) -> String {
    if line == 0 { String::new() } else { format!(" (line {line})") }
}

/// The result of something that can be refused.
pub type Result<T> = std::result::Result<T, SimError>;

pub(crate) fn invalid<T>(
    argument: &'static str,
    expected: impl Into<String>,
    found: impl std::fmt::Display,
) -> Result<T> {
    Err(SimError::InvalidArgument { argument, expected: expected.into(), found: found.to_string() })
}
