//! Requests to simulate: when each comes, how long it is, and what its prompt shares with others.

mod arrivals;
mod chat;
mod lengths;
mod quantiles;

use crate::error::{Result, SimError, invalid};
use crate::random::mix;
use crate::trace::Lengths;

pub use arrivals::{every, poisson};
pub use chat::{Chat, chat};
pub use lengths::{alpaca, sharegpt, translation};

/// What the samples of a request are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// So many samples, drawn on their own.
    Parallel(u32),
    /// So many beams.
    Beam(u32),
}

impl Sampling {
    /// Sequences of a request.
    pub const fn width(self) -> u32 {
        match self {
            Self::Parallel(width) | Self::Beam(width) => width,
        }
    }
}

/// A run of tokens that mean the same wherever the same content appears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// What the text is.
    pub content: u64,
    /// The first token of it that is meant.
    pub start: u32,
    /// Tokens.
    pub len: u32,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Seconds from the start.
    pub arrival: f64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens that every sample draws.
    pub output_tokens: u32,
    /// Its prompt in the workload's segments; what they leave out is its own.
    pub segments: (u32, u32),
    /// Lower is more urgent.
    pub priority: i32,
    /// Whose it is.
    pub tenant: u32,
    /// Line of the file that it came from; 0 for none.
    pub line: u32,
}

/// Requests in the order of their arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// The requests.
    pub requests: Vec<Request>,
    /// Whether they were recorded or made up with arrivals; without, all are there from the start.
    pub has_arrivals: bool,
    /// Parts of prompts that others may share.
    pub segments: Vec<Segment>,
    /// What samples are.
    pub sampling: Sampling,
    /// Tokens with which every prompt begins and which are known beforehand: a system prompt.
    pub shared_prefix_tokens: u32,
}

/// Tokens of the longest prompt: what readers of it count with.
const LONGEST: u32 = i32::MAX as u32;
/// Contents from here on are answers.
const ANSWERS: u64 = 1 << 62;
/// Contents from here on are what a prompt shares with nobody.
const OWN: u64 = 1 << 63;
/// The content of a prefix that all prompts share.
const SYSTEM: u64 = OWN - 1;

impl Workload {
    /// Requests of these lengths that share nothing.
    ///
    /// # Errors
    /// [`SimError::InvalidArgument`] for another number of arrivals than of lengths, or one that is not finite, negative
    /// or before the one in front of it.
    pub fn new(lengths: &[Lengths], arrivals: &[f64]) -> Result<Self> {
        if lengths.len() != arrivals.len() {
            return invalid("arrivals", format!("{}, one per request", lengths.len()), arrivals.len());
        }
        if let Some(wrong) = arrivals.iter().find(|arrival| !arrival.is_finite() || **arrival < 0.0) {
            return invalid("arrivals", "finite seconds of at least 0", wrong);
        }
        let mut pairs = arrivals.iter().zip(arrivals.iter().skip(1));
        if let Some((before, behind)) = pairs.find(|(before, behind)| behind < before) {
            return invalid("arrivals", "ascending seconds", format!("{behind} behind {before}"));
        }
        let requests = lengths.iter().zip(arrivals).map(|(lengths, &arrival)| Request {
            arrival,
            prompt_tokens: lengths.prompt_tokens,
            output_tokens: lengths.output_tokens,
            segments: (0, 0),
            priority: 0,
            tenant: 0,
            line: 0,
        });
        Ok(Self::from_parts(requests.collect(), Vec::new()))
    }

    /// The same requests with another kind of samples.
    #[must_use]
    pub fn with_sampling(self, sampling: Sampling) -> Self {
        Self { sampling, ..self }
    }

    /// The same requests behind a system prompt that all share, which `tokens` more each then have.
    ///
    /// # Errors
    /// [`SimError::InvalidArgument`] where prompts share something else already, or would be too long to count.
    pub fn with_shared_prefix(mut self, tokens: u32) -> Result<Self> {
        if !self.segments.is_empty() {
            return invalid("tokens", "prompts that share nothing else", "a workload with shared content");
        }
        let longest = self.requests.iter().map(|request| request.prompt_tokens).max().unwrap_or(0);
        let most = LONGEST.saturating_sub(longest);
        if tokens > most {
            return invalid("tokens", format!("at most {most}, in front of a prompt of {longest}"), tokens);
        }
        if tokens > 0 {
            self.segments.push(Segment { content: SYSTEM, start: 0, len: tokens });
            for request in &mut self.requests {
                request.prompt_tokens += tokens;
                request.segments = (0, 1);
            }
        }
        self.shared_prefix_tokens = tokens;
        Ok(self)
    }

    /// The requests that are shorter than `tokens` in all, as the paper filters its traces.
    #[must_use]
    pub fn shorter_than(mut self, tokens: u32) -> Self {
        let all = |request: &Request| u64::from(request.prompt_tokens) + u64::from(request.output_tokens);
        self.requests.retain(|request| all(request) < u64::from(tokens));
        self
    }

    /// The requests at these places, in this order and without arrivals; a place may come again.
    ///
    /// # Errors
    /// [`SimError::InvalidArgument`] for a place where there is no request.
    pub fn take(mut self, places: &[i32]) -> Result<Self> {
        let at = |place: &i32| match usize::try_from(*place).ok().and_then(|place| self.requests.get(place)) {
            Some(request) => Ok(Request { arrival: 0.0, ..*request }),
            None => invalid("places", format!("places of {} requests", self.requests.len()), place),
        };
        self.requests = places.iter().map(at).collect::<Result<_>>()?;
        self.has_arrivals = false;
        Ok(self)
    }

    /// The tokens of a prompt.
    pub fn prompt(&self, index: u32) -> Vec<i32> {
        let request = &self.requests[index as usize];
        let mut tokens = Vec::with_capacity(request.prompt_tokens as usize);
        let (first, count) = request.segments;
        for segment in &self.segments[first as usize..(first + count) as usize] {
            tokens.extend((segment.start..segment.start + segment.len).map(|offset| token(segment.content, offset)));
        }
        let own = OWN | u64::from(index);
        tokens.extend((tokens.len() as u32..request.prompt_tokens).map(|offset| token(own, offset)));
        tokens
    }

    /// A token that a sample of a request draws.
    pub fn answer(index: u32, sample: u32, offset: u32) -> i32 {
        token(answer_of(index) | u64::from(sample) << 32, offset)
    }

    /// Refuses requests that would never run with these limits.
    ///
    /// # Errors
    /// [`SimError::InvalidRequest`] for the first of them; [`SimError::InvalidArgument`] for a workload without requests.
    pub fn check_lengths(&self, longest: u32) -> Result<()> {
        if self.requests.is_empty() {
            return invalid("workload", "at least one request", "none");
        }
        let sum = |request: &Request| u64::from(request.prompt_tokens) + u64::from(request.output_tokens);
        let wrong = self.requests.iter().zip(0..).find(|(request, _)| {
            request.prompt_tokens == 0 || request.output_tokens == 0 || sum(request) > u64::from(longest)
        });
        let Some((request, index)) = wrong else { return Ok(()) };
        let refuse = |field, expected: String, found: String| {
            Err(SimError::InvalidRequest { index, line: request.line, field, expected, found })
        };
        match (request.prompt_tokens, request.output_tokens) {
            (0, _) => refuse("prompt_tokens", "at least 1".into(), "0".into()),
            (_, 0) => refuse("output_tokens", "at least 1".into(), "0".into()),
            _ => refuse(
                "prompt_tokens + output_tokens",
                format!("at most {longest} (max_model_len)"),
                sum(request).to_string(),
            ),
        }
    }
}

const fn answer_of(index: u32) -> u64 {
    ANSWERS | index as u64
}

/// A token id that stands for one place of one text. Two places have the same one by chance, one time in 2^31.
const fn token(content: u64, offset: u32) -> i32 {
    (mix(mix(content) ^ offset as u64) >> 33) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Workload {
        let lengths = [Lengths { prompt_tokens: 3, output_tokens: 2 }, Lengths { prompt_tokens: 5, output_tokens: 1 }];
        Workload::new(&lengths, &[0.0, 1.0]).unwrap()
    }

    #[test]
    fn prompts_share_their_system_prompt_and_nothing_else() {
        let workload = two().with_shared_prefix(4).unwrap();
        let (first, second) = (workload.prompt(0), workload.prompt(1));
        assert_eq!((first.len(), second.len()), (7, 9));
        assert_eq!(first[..4], second[..4]);
        assert_ne!(first[4..6], second[4..6]);
    }

    #[test]
    fn a_system_prompt_that_nobody_can_count_is_refused() {
        let error = two().with_shared_prefix(u32::MAX).unwrap_err().to_string();
        assert_eq!(error, "tokens: expected at most 2147483642, in front of a prompt of 5, found 4294967295");
    }

    #[test]
    fn the_longest_requests_are_longer_than_any_number_of_tokens() {
        let lengths = [Lengths { prompt_tokens: u32::MAX, output_tokens: 2 }];
        assert!(Workload::new(&lengths, &[0.0]).unwrap().shorter_than(u32::MAX).requests.is_empty());
    }

    #[test]
    fn requests_taken_again_keep_their_line_and_have_no_arrival() {
        let mut workload = two();
        workload.requests[1] = Request { line: 7, tenant: 3, arrival: 9.0, ..workload.requests[1] };
        let taken = workload.clone().take(&[1, 0, 1]).unwrap();
        assert!(!taken.has_arrivals);
        assert_eq!(taken.requests[2], Request { arrival: 0.0, ..workload.requests[1] });
        assert_ne!(taken.prompt(0), taken.prompt(2));
        let error = workload.take(&[0, 2]).unwrap_err().to_string();
        assert_eq!(error, "places: expected places of 2 requests, found 2");
    }

    #[test]
    fn a_request_longer_than_the_model_is_refused_by_its_place() {
        let error = two().check_lengths(5).unwrap_err().to_string();
        assert_eq!(error, "request 1: prompt_tokens + output_tokens: expected at most 5 (max_model_len), found 6");
    }

    #[test]
    fn a_workload_without_requests_is_refused() {
        let error = Workload::new(&[], &[]).unwrap().check_lengths(8).unwrap_err().to_string();
        assert_eq!(error, "workload: expected at least one request, found none");
    }

    #[test]
    fn arrivals_that_go_back_are_refused() {
        let lengths = [Lengths { prompt_tokens: 1, output_tokens: 1 }; 2];
        let error = Workload::new(&lengths, &[2.0, 1.0]).unwrap_err().to_string();
        assert_eq!(error, "arrivals: expected ascending seconds, found 1 behind 2");
    }
}
