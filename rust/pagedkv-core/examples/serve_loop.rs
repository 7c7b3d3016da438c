//! A whole serving loop in one file: clients on threads of their own, continuous batching, streaming, a stop string.
//!
//! The model is a toy that keeps its "keys" (the tokens themselves) in paged memory and reads them back through the
//! block table, as an attention kernel would: it goes on with what followed its last eight characters in a text. So if
//! a block reached the wrong sequence, a client would read somebody else's sentence.
//!
//! `cargo run --example serve_loop`
#![allow(clippy::print_stdout, reason = "a program that shows what it does")]

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{CacheConfig, Handle, Inbox, NewRequest, Result, Scheduler, SchedulerConfig, StepPlan};

const TEXT: &str = "Blocks are shared by reference count. Sequences that begin alike hold the same blocks. \
    A block is copied only when somebody must write into one that others hold. ";
const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 64;
const MAX_NUM_SEQS: usize = 4;
const MAX_MODEL_LEN: usize = 128;

/// Memory and model of the toy: where a real server has a device.
struct ToyModel {
    /// `(row, column)`: the block that holds a sequence's tokens; kernels read nothing else.
    block_table: Vec<Vec<usize>>,
    /// One "key" per slot.
    slots: Vec<i32>,
}

impl ToyModel {
    fn new() -> Self {
        let columns = MAX_MODEL_LEN.div_ceil(BLOCK_SIZE);
        Self { block_table: vec![vec![0; columns]; MAX_NUM_SEQS], slots: vec![0; NUM_BLOCKS * BLOCK_SIZE] }
    }

    /// Applies what the plan changes, writes the keys of this step's tokens, and samples.
    fn run(&mut self, plan: &StepPlan) -> Vec<i32> {
        for update in plan.i32s(Field::TableUpdates).chunks_exact(4) {
            self.block_table[update[1] as usize][update[2] as usize] = update[3] as usize;
        }
        for copy in plan.i32s(Field::Copies).chunks_exact(2) {
            let (source, target) = (copy[0] as usize * BLOCK_SIZE, copy[1] as usize * BLOCK_SIZE);
            self.slots.copy_within(source..source + BLOCK_SIZE, target);
        }
        for (&slot, &token) in plan.i64s(Field::SlotMapping).iter().zip(plan.i32s(Field::TokenIds)) {
            self.slots[slot as usize] = token;
        }
        let starts = plan.i32s(Field::SampleStartLoc);
        let sequences = plan.i32s(Field::Rows).iter().zip(plan.i32s(Field::SeqLens)).zip(starts.windows(2));
        let samples = sequences.map(|((&row, &len), samples)| {
            let next = self.next_token(row as usize, len as usize);
            std::iter::repeat_n(next, (samples[1] - samples[0]) as usize)
        });
        samples.flatten().collect()
    }

    /// What followed the sequence's last eight characters in the text.
    fn next_token(&self, row: usize, len: usize) -> i32 {
        let key = |position: usize| {
            self.slots[self.block_table[row][position / BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE]
        };
        let last: Vec<u8> = (len.saturating_sub(8)..len).map(|position| key(position) as u8).collect();
        let found = TEXT.as_bytes().windows(last.len()).position(|window| window == last);
        found.and_then(|at| TEXT.as_bytes().get(at + last.len())).map_or(i32::from(b' '), |&byte| i32::from(byte))
    }
}

/// A request as the server sees it: where its text goes, and what ends it.
struct Stream {
    to: Sender<String>,
    text: String,
    stop: Option<&'static str>,
}

/// Steps until no client is left, and streams each token to whoever asked.
struct Server {
    scheduler: Scheduler,
    model: ToyModel,
    /// Streams by request id; a client leaves its stream here before it leaves the request in the inbox.
    opened: Receiver<(String, Stream)>,
    streams: HashMap<String, Stream>,
    /// Who sits in which row, by the plans' lists of changes.
    rows: HashMap<u32, String>,
    num_steps: u32,
    num_tokens: u32,
}

impl Server {
    fn serve(&mut self, has_clients: impl Fn() -> bool) -> Result<()> {
        while has_clients() || self.scheduler.num_unfinished_requests() > 0 {
            let plan = self.scheduler.schedule()?;
            self.follow_changes(&plan);
            if plan.sizes().num_tokens == 0 {
                thread::sleep(Duration::from_micros(100));
            }
            let tokens = self.model.run(&plan);
            let result = self.scheduler.commit(plan.id(), &tokens)?;
            self.stream(&plan, &tokens)?;
            for finished in result.finished {
                self.streams.remove(&finished.request_id);
            }
            self.num_steps += 1;
            self.num_tokens += plan.sizes().num_tokens;
        }
        Ok(())
    }

    fn follow_changes(&mut self, plan: &StepPlan) {
        self.streams.extend(self.opened.try_iter());
        let changes = plan.changes();
        for change in changes.preempted.iter().chain(&changes.finished) {
            self.rows.remove(&change.row);
        }
        self.rows.extend(changes.new.into_iter().map(|change| (change.row, change.request_id)));
    }

    /// Hands each sample's token to its client; ends a request whose text ends with its stop string.
    fn stream(&mut self, plan: &StepPlan, tokens: &[i32]) -> Result<()> {
        let starts = plan.i32s(Field::SampleStartLoc);
        for (s, &row) in plan.i32s(Field::Rows).iter().enumerate() {
            let id = &self.rows[&(row as u32)];
            let Some(stream) = self.streams.get_mut(id) else { continue };
            for &token in &tokens[starts[s] as usize..starts[s + 1] as usize] {
                let piece = char::from(token as u8).to_string();
                stream.text += &piece;
                stream.to.send(piece).ok();
            }
            if stream.stop.is_some_and(|stop| stream.text.ends_with(stop)) {
                self.scheduler.finish(Handle::new(plan.i64s(Field::Handles)[s]), 0)?;
                self.streams.remove(id);
            }
        }
        Ok(())
    }
}

/// What a client asks for: a prompt, the most tokens, and a string that ends the answer.
type Question = (&'static str, u32, Option<&'static str>);

/// Asks, and collects the answer piece by piece until the server drops its end.
fn client(inbox: &Inbox, open: &Sender<(String, Stream)>, id: &str, (prompt, max_tokens, stop): Question) -> String {
    let (to, pieces) = channel();
    open.send((id.to_owned(), Stream { to, text: String::new(), stop })).expect("the server runs");
    let tokens = prompt.bytes().map(i32::from).collect();
    inbox.add_request(NewRequest::new(id, tokens, max_tokens)).expect("a request that fits");
    pieces.iter().collect()
}

/// What the text says after the prompt, up to where the answer has to end.
fn expected((prompt, max_tokens, stop): Question) -> &'static str {
    let rest = &TEXT[TEXT.find(prompt).expect("the prompt is of the text") + prompt.len()..];
    let end = stop.and_then(|stop| rest.find(stop).map(|at| at + stop.len())).unwrap_or(rest.len());
    &rest[..end.min(max_tokens as usize)]
}

fn main() -> Result<()> {
    let cache = CacheConfig { block_size: BLOCK_SIZE as u32, ..CacheConfig::new(NUM_BLOCKS as u32) };
    let limits = SchedulerConfig {
        max_num_seqs: MAX_NUM_SEQS as u32,
        max_num_batched_tokens: 32,
        max_model_len: MAX_MODEL_LEN as u32,
        ..SchedulerConfig::default()
    };
    let scheduler = Scheduler::new(&cache, &limits)?;
    let (inbox, (open, opened)) = (scheduler.inbox(), channel());
    let questions: [Question; 6] = [
        ("Blocks are shared", 20, None),
        ("Blocks are shared by", 64, Some(".")),
        ("Sequences that begin", 64, Some(".")),
        ("A block is copied", 10, None),
        ("A block is copied only", 80, Some("hold.")),
        ("Blocks are shared", 40, Some(" count")),
    ];
    let mut server = Server {
        scheduler,
        model: ToyModel::new(),
        opened,
        streams: HashMap::new(),
        rows: HashMap::new(),
        num_steps: 0,
        num_tokens: 0,
    };
    thread::scope(|scope| {
        let ask = |(number, question)| {
            let (inbox, open) = (inbox.clone(), open.clone());
            scope.spawn(move || client(&inbox, &open, &format!("client {number}"), question))
        };
        let clients: Vec<_> = questions.into_iter().enumerate().map(ask).collect();
        server.serve(|| clients.iter().any(|client| !client.is_finished()))?;
        for (question, client) in questions.into_iter().zip(clients) {
            let answer = client.join().expect("the client does not panic");
            println!("{} >{answer}<", question.0);
            assert_eq!(answer, expected(question), "somebody else's text");
        }
        Ok(())
    })?;
    let pool = server.scheduler.manager().pool();
    println!(
        "{} steps, {} tokens computed, {} blocks still cached",
        server.num_steps,
        server.num_tokens,
        pool.num_cached()
    );
    assert_eq!((pool.num_held(), server.scheduler.check_integrity()), (0, Ok(())));
    Ok(())
}

#[test]
fn every_client_reads_its_own_text() -> Result<()> {
    main()
}
