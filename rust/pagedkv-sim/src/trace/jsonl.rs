//! Traces with hashed prefixes: one JSON object per line, as Mooncake's are, and as this package records them.

use std::io::{BufRead, BufReader, Read};

use serde_json::Value;

use super::TraceError;
use super::table::in_order;
use crate::workload::{Request, Segment, Workload};

/// Tokens that a hash stands for where the line does not say.
const MOONCAKE_BLOCK: i64 = 512;
const LONGEST: i64 = i32::MAX as i64;

/// Reads requests in the order of their arrival; the first comes at 0 seconds.
///
/// A line has `timestamp` in milliseconds, `input_length`, `output_length`, and optionally `hash_ids`, one for each run of
/// `block_size` tokens of the prompt (512 where it does not say): equal ids are equal tokens behind an equal prefix.
/// `priority` and `tenant` are whole numbers, and optional. Empty lines are passed over.
///
/// # Errors
/// [`TraceError`], naming line and field.
pub fn read_jsonl(source: impl Read) -> Result<Workload, TraceError> {
    let (mut requests, mut segments) = (Vec::new(), Vec::new());
    for (text, line) in BufReader::new(source).lines().zip(1..) {
        let text = text?;
        if text.trim().is_empty() {
            continue;
        }
        let value: Value =
            serde_json::from_str(&text).map_err(|error| TraceError::Json { line, message: error.to_string() })?;
        if !value.is_object() {
            return Err(TraceError::Json { line, message: "expected an object".to_owned() });
        }
        let row = Row { line, value: &value };
        let prompt_tokens = row.whole("input_length", None, 1, LONGEST)? as u32;
        let block_size = row.whole("block_size", Some(MOONCAKE_BLOCK), 1, LONGEST)? as u32;
        let first = segments.len() as u32;
        row.read_hashes(prompt_tokens, block_size, &mut segments)?;
        requests.push(Request {
            arrival: row.milliseconds()? / 1000.0,
            prompt_tokens,
            output_tokens: row.whole("output_length", None, 0, LONGEST)?.max(1) as u32,
            segments: (first, segments.len() as u32 - first),
            priority: row.whole("priority", Some(0), i32::MIN.into(), i32::MAX.into())? as i32,
            tenant: row.whole("tenant", Some(0), 0, u32::MAX.into())? as u32,
            line: line as u32,
        });
    }
    in_order(requests, segments)
}

struct Row<'a> {
    line: u64,
    value: &'a Value,
}

impl Row<'_> {
    fn whole(&self, field: &'static str, default: Option<i64>, least: i64, most: i64) -> Result<i64, TraceError> {
        let found = match self.value.get(field) {
            None | Some(Value::Null) => default,
            Some(value) => value.as_i64().filter(|number| (least..=most).contains(number)),
        };
        found.ok_or_else(|| self.wrong(field, format!("a whole number from {least} to {most}")))
    }

    fn milliseconds(&self) -> Result<f64, TraceError> {
        let found = self.value.get("timestamp").and_then(Value::as_f64);
        let found = found.filter(|number| number.is_finite() && *number >= 0.0);
        found.ok_or_else(|| self.wrong("timestamp", "milliseconds of at least 0".to_owned()))
    }

    fn read_hashes(&self, prompt_tokens: u32, block_size: u32, out: &mut Vec<Segment>) -> Result<(), TraceError> {
        let ids = match self.value.get("hash_ids") {
            None | Some(Value::Null) => return Ok(()),
            Some(value) => value.as_array(),
        };
        let most = prompt_tokens.div_ceil(block_size) as usize;
        let expected = || format!("at most {most} whole numbers, one for each {block_size} tokens of the prompt");
        let Some(ids) = ids.filter(|ids| ids.len() <= most) else { return Err(self.wrong("hash_ids", expected())) };
        for (id, nth) in ids.iter().zip(0..) {
            let Some(content) = id.as_u64() else { return Err(self.wrong("hash_ids", expected())) };
            // The lower half of the numbers is for contents that are given; hashes of 64 bits lose their highest bits.
            let content = content & (u64::MAX >> 3);
            let len = block_size.min(prompt_tokens - nth * block_size);
            out.push(Segment { content, start: 0, len });
        }
        Ok(())
    }

    fn wrong(&self, field: &'static str, expected: String) -> TraceError {
        let found = self.value.get(field).map_or_else(|| "missing".to_owned(), ToString::to_string);
        TraceError::WrongField { line: self.line, field, found, expected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(lines: &str) -> String {
        read_jsonl(lines.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn equal_hashes_are_equal_tokens() {
        let lines = concat!(
            "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [0, 1]}\n",
            "{\"timestamp\": 1500, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [0, 2]}\n",
        );
        let read = read_jsonl(lines.as_bytes()).unwrap();
        assert!((read.requests[1].arrival - 1.5).abs() < 1e-9);
        let (first, second) = (read.prompt(0), read.prompt(1));
        assert_eq!((first.len(), second.len()), (600, 700));
        assert_eq!(first[..512], second[..512]);
        assert_ne!(first[512..600], second[512..600]);
    }

    #[test]
    fn what_hashes_leave_out_is_the_requests_own() {
        let line =
            "{\"timestamp\": 0, \"input_length\": 20, \"output_length\": 1, \"hash_ids\": [7], \"block_size\": 16}\n";
        let read = read_jsonl([line, line].concat().as_bytes()).unwrap();
        assert_eq!(read.prompt(0)[..16], read.prompt(1)[..16]);
        assert_ne!(read.prompt(0)[16..], read.prompt(1)[16..]);
    }

    #[test]
    fn a_missing_field_is_named_with_its_line() {
        let lines = "{\"timestamp\": 0, \"input_length\": 3, \"output_length\": 5}\n\n{\"timestamp\": 1, \"input_length\": 3}\n";
        let expected = "line 3: output_length is missing, expected a whole number from 0 to 2147483647";
        assert_eq!(refusal(lines), expected);
    }

    #[test]
    fn more_hashes_than_the_prompt_has_blocks_are_refused() {
        let found = refusal("{\"timestamp\": 0, \"input_length\": 512, \"output_length\": 5, \"hash_ids\": [1, 2]}\n");
        assert!(found.starts_with("line 1: hash_ids is [1,2], expected at most 1 whole numbers"), "{found}");
    }

    #[test]
    fn a_line_that_is_no_json_is_refused_with_its_number() {
        assert!(refusal("{\"timestamp\": 0,\n").starts_with("line 1: EOF"), "{}", refusal("{"));
    }
}
