//! What a caller can get wrong, with the values in it.

use std::fmt;

/// The result of every operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A caller's mistake. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// An element type that the argument cannot have.
    DType {
        /// The argument's name.
        argument: &'static str,
        /// What was wanted.
        expected: &'static str,
        /// What came.
        found: &'static str,
    },
    /// A rank or a size that does not fit the other arguments.
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The dimensions by name, with the sizes that other arguments fix.
        expected: String,
        /// The shape that came.
        found: String,
    },
    /// Strides that the operation cannot work with.
    Strides {
        /// The argument's name.
        argument: &'static str,
        /// What was wanted.
        expected: &'static str,
        /// The strides that came, in elements.
        found: String,
    },
    /// An element of an index array that points outside.
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
    Value {
        /// The argument's name.
        argument: &'static str,
        /// What was wanted.
        expected: String,
        /// What came.
        found: String,
    },
    /// An output whose memory an input or another output uses.
    Overlap {
        /// The output's name.
        output: &'static str,
        /// The other argument's name.
        other: &'static str,
    },
}

impl Error {
    /// The argument, what was expected of it, and what was found.
    pub fn parts(&self) -> (String, String, String) {
        match self {
            Self::DType { argument, expected, found } => {
                (argument.to_string(), format!("dtype {expected}"), found.to_string())
            }
            Self::Shape { argument, expected, found } => {
                (argument.to_string(), format!("shape {expected}"), found.clone())
            }
            Self::Strides { argument, expected, found } => {
                (argument.to_string(), expected.to_string(), format!("strides {found}"))
            }
            Self::Element { argument, index, expected, found } => {
                (format!("{argument}[{index}]"), expected.clone(), found.to_string())
            }
            Self::Value { argument, expected, found } => (argument.to_string(), expected.clone(), found.clone()),
            Self::Overlap { output, other } => {
                (output.to_string(), "memory of its own".to_owned(), format!("an overlap with {other}"))
            }
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (argument, expected, found) = self.parts();
        write!(f, "{argument}: expected {expected}, found {found}")
    }
}

impl std::error::Error for Error {}
