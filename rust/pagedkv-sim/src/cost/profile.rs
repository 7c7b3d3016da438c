//! A cost model fitted to steps that were measured.

use std::io::Read;

use super::{CostModel, Fitted, Work};

/// A step that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// What it did.
    pub work: Work,
    /// Seconds that it took.
    pub seconds: f64,
}

/// The line through measured steps, and how far from it they lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    line: Fitted,
    /// Root of the mean square of the distances from the line, in seconds.
    pub residual: f64,
}

/// A profile that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// A file that is not a table.
    #[error("{0}")]
    Csv(#[from] csv::Error),
    /// A table without a column that is needed.
    #[error("line 1: no column {0}")]
    NoColumn(&'static str),
    /// A field that is not a number of at least 0.
    #[error("line {line}: {field} is {found:?}, expected a finite number of at least 0")]
    NotANumber {
        /// Line in the file.
        line: u64,
        /// Name of the column.
        field: &'static str,
        /// What stands there.
        found: String,
    },
    /// Steps that do not tell the four costs apart.
    #[error("the steps do not tell apart what {0} costs: measure steps in which it differs from the others")]
    Undetermined(&'static str),
}

const COLUMNS: [&str; 4] = ["num_seqs", "context_tokens", "prompt_tokens", "seconds"];
const TERMS: [&str; 4] = ["a step itself", "num_seqs", "context_tokens", "prompt_tokens"];

impl Profile {
    /// Reads a table with the columns `num_seqs`, `context_tokens`, `prompt_tokens` and `seconds`, and fits the line.
    ///
    /// # Errors
    /// [`ProfileError`], naming line and field, or what the steps leave open.
    pub fn read(source: impl Read) -> Result<Self, ProfileError> {
        let mut reader = csv::Reader::from_reader(source);
        let headers = reader.headers()?.clone();
        let mut at = [0; 4];
        for (place, name) in at.iter_mut().zip(COLUMNS) {
            *place = headers.iter().position(|header| header == name).ok_or(ProfileError::NoColumn(name))?;
        }
        let mut samples = Vec::new();
        for record in reader.records() {
            let record = record?;
            let line = record.position().map_or(0, csv::Position::line);
            let mut values = [0.0; 4];
            for ((value, place), field) in values.iter_mut().zip(at).zip(COLUMNS) {
                let found = record.get(place).unwrap_or_default();
                let number = found.trim().parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
                *value = number.ok_or_else(|| ProfileError::NotANumber { line, field, found: found.to_owned() })?;
            }
            let [seqs, context, prompt, seconds] = values;
            let work = Work {
                num_seqs: seqs as u32,
                context_tokens: context as u64,
                prompt_tokens: prompt as u64,
                ..Work::default()
            };
            samples.push(Sample { work, seconds });
        }
        Self::fit(&samples)
    }

    /// The line with the least squares of distances.
    ///
    /// # Errors
    /// [`ProfileError::Undetermined`] for steps that do not tell the four costs apart.
    pub fn fit(samples: &[Sample]) -> Result<Self, ProfileError> {
        let rows: Vec<[f64; 4]> = samples.iter().map(|sample| terms(&sample.work)).collect();
        // Columns of one size, so that "nearly singular" means the same for tokens and for steps.
        let scales: [f64; 4] =
            std::array::from_fn(|column| rows.iter().map(|row| row[column]).fold(0.0, f64::max).max(f64::MIN_POSITIVE));
        let mut system = [[0.0; 5]; 4];
        for (row, sample) in rows.iter().zip(samples) {
            let row: [f64; 4] = std::array::from_fn(|column| row[column] / scales[column]);
            for i in 0..4 {
                for j in 0..4 {
                    system[i][j] += row[i] * row[j];
                }
                system[i][4] += row[i] * sample.seconds;
            }
        }
        let solution = solve(system).map_err(|term| ProfileError::Undetermined(TERMS[term]))?;
        let [base, per_seq, per_context_token, per_prompt_token] =
            std::array::from_fn(|term| solution[term] / scales[term]);
        let line =
            Fitted { base, per_seq, per_context_token, per_prompt_token, per_copied_token: 2.0 * per_context_token };
        let squares = samples.iter().map(|sample| (line.step_seconds(&sample.work) - sample.seconds).powi(2));
        Ok(Self { line, residual: (squares.sum::<f64>() / samples.len() as f64).sqrt() })
    }

    /// The line.
    pub const fn line(&self) -> &Fitted {
        &self.line
    }
}

impl CostModel for Profile {
    fn step_seconds(&self, work: &Work) -> f64 {
        // A line through noise may fall below 0 near the origin; no step runs backwards.
        self.line.step_seconds(work).max(0.0)
    }
}

fn terms(work: &Work) -> [f64; 4] {
    [1.0, f64::from(work.num_seqs), work.context_tokens as f64, work.prompt_tokens as f64]
}

/// Solves four equations by elimination with pivots; the term that cannot be told is the error.
fn solve(mut system: [[f64; 5]; 4]) -> Result<[f64; 4], usize> {
    for column in 0..4 {
        let pivot = (column..4).max_by(|&a, &b| system[a][column].abs().total_cmp(&system[b][column].abs()));
        system.swap(column, pivot.expect("there is a row"));
        let own = system[column];
        if own[column].abs() < 1e-10 {
            return Err(column);
        }
        for row in (0..4).filter(|&row| row != column) {
            let factor = system[row][column] / own[column];
            (0..5).for_each(|at| system[row][at] -= factor * own[at]);
        }
    }
    Ok(std::array::from_fn(|row| system[row][4] / system[row][row]))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    fn measured() -> String {
        let mut table = String::from("num_seqs,context_tokens,prompt_tokens,seconds\n");
        for (seqs, context, prompt) in [(1, 100, 0), (8, 900, 64), (32, 20_000, 0), (32, 9000, 512), (4, 10, 128)] {
            let work = Work { num_seqs: seqs, context_tokens: context, prompt_tokens: prompt, ..Work::default() };
            let seconds = Fitted::OPT_13B_A100.step_seconds(&work);
            writeln!(table, "{seqs},{context},{prompt},{seconds}").unwrap();
        }
        table
    }

    #[test]
    fn steps_that_lie_on_a_line_give_that_line() {
        let profile = Profile::read(measured().as_bytes()).unwrap();
        assert!((profile.line().per_prompt_token / 0.15e-3 - 1.0).abs() < 1e-6, "{profile:?}");
        assert!((profile.line().base / 23e-3 - 1.0).abs() < 1e-6, "{profile:?}");
        assert!(profile.residual < 1e-9);
    }

    #[test]
    fn steps_that_are_all_alike_are_refused() {
        let table = "num_seqs,context_tokens,prompt_tokens,seconds\n1,1,1,1\n1,1,1,1\n";
        let error = Profile::read(table.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("the steps do not tell apart what num_seqs costs"), "{error}");
    }

    #[test]
    fn a_time_below_zero_is_refused_with_its_line_and_field() {
        let table = "num_seqs,context_tokens,prompt_tokens,seconds\n1,1,1,-1\n";
        let error = Profile::read(table.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "line 2: seconds is \"-1\", expected a finite number of at least 0");
    }
}
