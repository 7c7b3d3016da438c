//! Tables of requests: CSV with a header, as Azure's LLM traces are.

use std::io::Read;

use super::{TraceError, date};
use crate::workload::{Request, Workload};

/// Names that traces have for a column.
const PROMPT: [&str; 4] = ["prompt_tokens", "input_length", "input_tokens", "ContextTokens"];
const OUTPUT: [&str; 3] = ["output_tokens", "output_length", "GeneratedTokens"];
const ARRIVAL: [&str; 3] = ["arrival", "timestamp", "TIMESTAMP"];

/// Reads a table of requests in the order of their arrival; the first comes at 0 seconds.
///
/// Columns are told by name: `prompt_tokens` and `output_tokens`, or as other traces call them. `arrival` is in seconds, a
/// `timestamp` in milliseconds, a `TIMESTAMP` a date; without any of them all requests come at once. `priority` and
/// `tenant` are whole numbers, and optional. A request without an answer, as some traces have, draws one token.
///
/// # Errors
/// [`TraceError`], naming line and field.
pub fn read_table(source: impl Read) -> Result<Workload, TraceError> {
    let mut reader = csv::Reader::from_reader(source);
    let headers = reader.headers()?.clone();
    let find = |names: &[&'static str]| {
        names.iter().find_map(|&name| Some((headers.iter().position(|header| header == name)?, name)))
    };
    let prompt = find(&PROMPT).ok_or(TraceError::NoColumn(PROMPT[0]))?;
    let output = find(&OUTPUT).ok_or(TraceError::NoColumn(OUTPUT[0]))?;
    let (arrival, priority, tenant) = (find(&ARRIVAL), find(&["priority"]), find(&["tenant"]));
    let mut requests = Vec::new();
    for record in reader.records() {
        let record = record?;
        let line = record.position().map_or(0, csv::Position::line);
        let cell =
            |(column, field): (usize, &'static str)| Cell { line, field, text: record.get(column).unwrap_or("") };
        requests.push(Request {
            arrival: arrival.map_or(Ok(0.0), |column| cell(column).seconds())?,
            prompt_tokens: cell(prompt).whole(1, i32::MAX.into())? as u32,
            output_tokens: cell(output).whole(0, i32::MAX.into())?.max(1) as u32,
            segments: (0, 0),
            priority: priority.map_or(Ok(0), |column| cell(column).whole(i32::MIN.into(), i32::MAX.into()))? as i32,
            tenant: tenant.map_or(Ok(0), |column| cell(column).whole(0, u32::MAX.into()))? as u32,
            line: line as u32,
        });
    }
    Ok(Workload { has_arrivals: arrival.is_some(), ..in_order(requests, Vec::new())? })
}

/// A workload of requests that were read, in the order of their arrival, from 0 seconds on.
pub(super) fn in_order(
    mut requests: Vec<Request>,
    segments: Vec<crate::workload::Segment>,
) -> Result<Workload, TraceError> {
    if requests.is_empty() {
        return Err(TraceError::Empty);
    }
    requests.sort_by(|one, other| one.arrival.total_cmp(&other.arrival));
    let first = requests[0].arrival;
    requests.iter_mut().for_each(|request| request.arrival -= first);
    Ok(Workload::from_parts(requests, segments))
}

struct Cell<'a> {
    line: u64,
    field: &'static str,
    text: &'a str,
}

impl Cell<'_> {
    fn whole(&self, least: i64, most: i64) -> Result<i64, TraceError> {
        let number = self.text.trim().parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| self.wrong(format!("a whole number from {least} to {most}")))
    }

    fn seconds(&self) -> Result<f64, TraceError> {
        let found = match self.field {
            "TIMESTAMP" => date::seconds(self.text),
            name => {
                let number = self.text.trim().parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
                number.map(|number| if name == "timestamp" { number / 1000.0 } else { number })
            }
        };
        let expected = if self.field == "TIMESTAMP" { "a date" } else { "a finite number of at least 0" };
        found.ok_or_else(|| self.wrong(expected.to_owned()))
    }

    fn wrong(&self, expected: String) -> TraceError {
        TraceError::WrongField { line: self.line, field: self.field, found: format!("{:?}", self.text), expected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(table: &str) -> String {
        read_table(table.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn requests_are_read_in_the_order_of_their_arrival() {
        let table = "arrival,prompt_tokens,output_tokens\n7.5,3,2\n5,4,0\n";
        let read = read_table(table.as_bytes()).unwrap();
        let found: Vec<_> =
            read.requests.iter().map(|row| (row.arrival, row.prompt_tokens, row.output_tokens, row.line)).collect();
        assert_eq!(found, [(0.0, 4, 1, 3), (2.5, 3, 2, 2)]);
    }

    #[test]
    fn the_columns_of_azure_are_known() {
        let table =
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.18,396,109\n";
        let read = read_table(table.as_bytes()).unwrap();
        assert!((read.requests[1].arrival - 3.5).abs() < 1e-6);
        assert_eq!(read.requests[1].prompt_tokens, 396);
    }

    #[test]
    fn a_table_without_arrivals_says_so() {
        let has_arrivals = |table: &str| read_table(table.as_bytes()).unwrap().has_arrivals;
        assert!(!has_arrivals("prompt_tokens,output_tokens\n3,2\n"));
        assert!(has_arrivals("arrival,prompt_tokens,output_tokens\n0,3,2\n"));
    }

    #[test]
    fn a_missing_column_is_named() {
        assert_eq!(refusal("prompt_tokens\n3\n"), "line 1: no column output_tokens");
    }

    #[test]
    fn a_negative_length_is_named_with_its_line() {
        let expected = "line 3: output_tokens is \"-2\", expected a whole number from 0 to 2147483647";
        assert_eq!(refusal("prompt_tokens,output_tokens\n3,2\n3,-2\n"), expected);
    }

    #[test]
    fn a_wrong_date_is_named_with_its_line() {
        let expected = "line 2: TIMESTAMP is \"yesterday\", expected a date";
        assert_eq!(refusal("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,2\n"), expected);
    }

    #[test]
    fn an_empty_trace_is_refused() {
        assert_eq!(refusal("prompt_tokens,output_tokens\n"), "no request: expected at least one");
    }
}
