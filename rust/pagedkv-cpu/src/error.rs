//! What a caller can get wrong, with the values in it.

use thiserror::Error as ThisError;

/// The result of every operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A caller's mistake. Nothing was written.
#[derive(Clone, Debug, PartialEq, ThisError)]
pub enum Error {
    /// An element type that the argument cannot have.
    #[error("{argument}: expected dtype {expected}, found {found}")]
    DType {
        /// The argument's name.
        argument: &'static str,
        /// What was wanted.
        expected: &'static str,
        /// What came.
        found: &'static str,
    },
    /// A rank or a size that does not fit the other arguments.
    #[error("{argument}: expected shape {expected}, found {found}")]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The dimensions by name, with the sizes that other arguments fix.
        expected: String,
        /// The shape that came.
        found: String,
    },
    /// Strides that the operation cannot work with.
    #[error("{argument}: expected {expected}, found strides {found}")]
    Strides {
        /// The argument's name.
        argument: &'static str,
        /// What was wanted.
        expected: &'static str,
        /// The strides that came, in elements.
        found: String,
    },
    /// An element of an index array that points outside.
    #[error("{argument}[{index}]: expected {expected}, found {found}")]
    Element {
        /// The argument's name.
        argument: &'static str,
        /// Where in the argument.
        index: String,
        /// What was wanted.
        expected: String,
        /// What came.
        found: i64,
    },
    /// A number that is out of its range.
    #[error("{argument}: expected {expected}, found {found}")]
    Value {
        /// The argument's name.
        argument: &'static str,
        /// What was wanted.
        expected: String,
        /// What came.
        found: String,
    },
    /// An output whose memory an input or another output uses.
    #[error("{output}: expected memory of its own, found an overlap with {other}")]
    Overlap {
        /// The output's name.
        output: &'static str,
        /// The other argument's name.
        other: &'static str,
    },
}
