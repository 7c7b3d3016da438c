//! Conversations: each request brings what was said before it.

use super::{Request, Sampling, Segment, Workload, answer_of};
use crate::error::{Result, invalid};
use crate::random::Random;
use crate::trace::Lengths;

/// How conversations go on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chat {
    /// Chance that an arrival opens a conversation; otherwise it goes on with a random open one.
    pub new_conversation: f64,
    /// Most tokens of history and query together: older ones are cut off.
    pub most_prompt_tokens: u32,
    /// Most tokens of an answer.
    pub most_answer_tokens: u32,
    /// Turns after which a conversation ends.
    pub most_turns: u32,
}

impl Default for Chat {
    /// The paper's: prompts of 1,024 tokens, answers of 1,016, and a new conversation every other time.
    fn default() -> Self {
        Self { new_conversation: 0.5, most_prompt_tokens: 1024, most_answer_tokens: 1016, most_turns: 16 }
    }
}

/// What has been said in a conversation, in order.
#[derive(Debug, Default)]
struct Conversation {
    said: Vec<Segment>,
    num_turns: u32,
}

/// Requests whose prompts are the last tokens of a conversation and a query; lengths of queries and answers are given.
///
/// # Errors
/// Those of [`Workload::new`]; [`crate::SimError::InvalidArgument`] also for settings out of range.
pub fn chat(lengths: &[Lengths], arrivals: &[f64], chat: Chat, seed: u64) -> Result<Workload> {
    if !(0.0..=1.0).contains(&chat.new_conversation) {
        return invalid("new_conversation", "a chance from 0 to 1", chat.new_conversation);
    }
    for (argument, value) in [
        ("most_prompt_tokens", chat.most_prompt_tokens),
        ("most_answer_tokens", chat.most_answer_tokens),
        ("most_turns", chat.most_turns),
    ] {
        if value == 0 {
            return invalid(argument, "at least 1", value);
        }
    }
    let mut workload = Workload::new(lengths, arrivals)?;
    let mut random = Random::of(seed, u64::from_le_bytes(*b"chats   "));
    let mut open: Vec<Conversation> = Vec::new();
    for (request, index) in workload.requests.iter_mut().zip(0_u32..) {
        let is_new = random.uniform() < chat.new_conversation || open.is_empty();
        if is_new {
            open.push(Conversation::default());
        }
        let at = if is_new { open.len() - 1 } else { random.below(open.len()) };
        let conversation = &mut open[at];
        conversation.said.push(Segment { content: u64::from(index), start: 0, len: request.prompt_tokens });
        let first = workload.segments.len() as u32;
        request.prompt_tokens = last_tokens(&conversation.said, chat.most_prompt_tokens, &mut workload.segments);
        request.segments = (first, workload.segments.len() as u32 - first);
        request.output_tokens = request.output_tokens.min(chat.most_answer_tokens);
        conversation.said.push(Segment { content: answer_of(index), start: 0, len: request.output_tokens });
        conversation.num_turns += 1;
        if conversation.num_turns == chat.most_turns {
            open.swap_remove(at);
        }
    }
    Ok(workload)
}

/// Appends the last `most` tokens of what was said, and returns how many those are.
fn last_tokens(said: &[Segment], most: u32, out: &mut Vec<Segment>) -> u32 {
    let all: u64 = said.iter().map(|segment| u64::from(segment.len)).sum();
    let mut cut = all.saturating_sub(u64::from(most));
    for segment in said {
        let gone = cut.min(u64::from(segment.len)) as u32;
        cut -= u64::from(gone);
        if gone < segment.len {
            out.push(Segment { content: segment.content, start: segment.start + gone, len: segment.len - gone });
        }
    }
    all.min(u64::from(most)) as u32
}

impl Workload {
    /// Requests that share what their prompts are made of.
    pub fn from_parts(requests: Vec<Request>, segments: Vec<Segment>) -> Self {
        Self { requests, segments, has_arrivals: true, sampling: Sampling::Parallel(1), shared_prefix_tokens: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk(most_prompt_tokens: u32) -> Workload {
        let lengths = [Lengths { prompt_tokens: 10, output_tokens: 5 }; 3];
        let settings = Chat { new_conversation: 0.0, most_prompt_tokens, ..Chat::default() };
        chat(&lengths, &[0.0, 1.0, 2.0], settings, 0).unwrap()
    }

    #[test]
    fn a_turn_begins_with_the_turn_before_it_and_its_answer() {
        let workload = talk(1024);
        let prompts: Vec<_> = (0..3).map(|index| workload.prompt(index)).collect();
        assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), [10, 25, 40]);
        assert_eq!(prompts[1][..10], prompts[0]);
        assert_eq!(prompts[2][..25], prompts[1]);
        let answer: Vec<_> = (0..5).map(|offset| Workload::answer(0, 0, offset)).collect();
        assert_eq!(prompts[1][10..15], answer);
    }

    #[test]
    fn a_long_history_loses_its_oldest_tokens() {
        let whole = talk(1024);
        let cut = talk(20);
        assert_eq!(cut.prompt(2), whole.prompt(2)[20..]);
    }
}
