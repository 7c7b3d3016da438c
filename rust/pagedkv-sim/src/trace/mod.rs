//! Request traces: what came in, when, and how long the answer was.

mod date;
mod jsonl;
mod table;

use std::io::Read;

pub use jsonl::read_jsonl;
pub use table::read_table;

/// Lengths of one request, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Prompt tokens; at least 1.
    pub prompt_tokens: u32,
    /// Tokens to sample; at least 1.
    pub output_tokens: u32,
}

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file that is not a table.
    #[error("{0}")]
    Csv(#[from] csv::Error),
    /// A file that cannot be read.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A table without a column that is needed.
    #[error("line 1: no column {0}")]
    NoColumn(&'static str),
    /// A trace without a request.
    #[error("no request: expected at least one")]
    Empty,
    /// A line that is no object of JSON.
    #[error("line {line}: {message}")]
    Json {
        /// Line in the file.
        line: u64,
        /// What the parser says.
        message: String,
    },
    /// A field that is not what it must be.
    #[error("line {line}: {field} is {found}, expected {expected}")]
    WrongField {
        /// Line in the file.
        line: u64,
        /// Name of the field.
        field: &'static str,
        /// What stands there.
        found: String,
        /// What it must be.
        expected: String,
    },
    /// A field that is not a length of at least 1.
    #[error("line {line}: {field} is {found:?}, expected a whole number from 1 to 2147483647")]
    NotALength {
        /// Line in the file.
        line: u64,
        /// Name of the column.
        field: &'static str,
        /// What stands there.
        found: String,
    },
}

/// Reads a table with the columns `prompt_tokens` and `output_tokens`, in file order.
///
/// # Errors
/// [`TraceError`], naming line and field.
pub fn read_lengths(source: impl Read) -> Result<Vec<Lengths>, TraceError> {
    const COLUMNS: [&str; 2] = ["prompt_tokens", "output_tokens"];
    let mut reader = csv::Reader::from_reader(source);
    let headers = reader.headers()?;
    let find = |name| headers.iter().position(|header| header == name).ok_or(TraceError::NoColumn(name));
    let at = [find(COLUMNS[0])?, find(COLUMNS[1])?];
    let mut lengths = Vec::new();
    let mut record = csv::StringRecord::new();
    while reader.read_record(&mut record)? {
        let line = record.position().map_or(0, csv::Position::line);
        let field = |column: usize| {
            let found = record.get(at[column]).unwrap_or_default();
            let length = found.parse().ok().filter(|length| (1..=i32::MAX as u32).contains(length));
            length.ok_or_else(|| TraceError::NotALength { line, field: COLUMNS[column], found: found.to_owned() })
        };
        lengths.push(Lengths { prompt_tokens: field(0)?, output_tokens: field(1)? });
    }
    Ok(lengths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read_in_file_order() {
        let rows = read_lengths("prompt_tokens,output_tokens\n21,518\n8,66\n".as_bytes()).unwrap();
        let expected = [(21, 518), (8, 66)];
        assert_eq!(rows, expected.map(|(prompt_tokens, output_tokens)| Lengths { prompt_tokens, output_tokens }));
    }

    #[test]
    fn a_negative_length_is_refused_with_its_line_and_field() {
        let error = read_lengths("prompt_tokens,output_tokens\n21,518\n8,-66\n".as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("line 3: output_tokens is \"-66\""), "{error}");
    }

    #[test]
    fn a_missing_column_is_refused_by_name() {
        let error = read_lengths("prompt_tokens\n21\n".as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "line 1: no column output_tokens");
    }

    #[test]
    fn a_length_of_zero_is_refused_with_its_line_and_field() {
        let error = read_lengths("prompt_tokens,output_tokens\n0,5\n".as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("line 2: prompt_tokens is \"0\""), "{error}");
    }
}
